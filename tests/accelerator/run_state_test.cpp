// save_state and load_state of one process: names, hooks, and what is in the files.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/runs.h"
#include "accelerator/trace_runs.h"
#include "checkpoint/models.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::anew;
using test::automatic;
using test::damage;
using test::Folder;
using test::has;
using test::Json;
using test::message_of;
using test::Mlp;
using test::names_in;
using test::Progress;
using test::SavedRun;
using test::write_text;
using Names = std::vector<std::string>;

class SaveStateTest : public test::WithFolder {};
class AutomaticNamesTest : public SaveStateTest {};
class StateHooksTest : public SaveStateTest {};

/// The names of `checkpoints` in numeric order, as the reference has them.
Names checkpoints_of(const fs::path& project) {
  auto names = names_in(project / "checkpoints");
  std::ranges::sort(names, {}, [](const std::string& name) {
    return std::stoi(name.substr(name.rfind('_') + 1));
  });
  return names;
}

Json reference_calls() { return test::read_json(test::reference_path("run_state/calls.json")); }

// ---- files --------------------------------------------------------------------------------------

TEST_F(SaveStateTest, WritesTheFilesOfPythonAndAManifest) {
  SavedRun run;
  auto sgd = SGD(run.net->parameters(), {.lr = 0.1});
  auto optimizer = run.accelerator.prepare(sgd);
  EXPECT_EQ(run.accelerator.save_state(path_ / "new/folder"), path_ / "new/folder");
  EXPECT_EQ(names_in(path_ / "new/folder"), (Names{"accelerate_state.json", "model.safetensors",
                                                   "optimizer.bin", "random_states_0.pkl"}));
}

TEST_F(SaveStateTest, NumbersObjectsOfOneKindAsPythonDoes) {
  SavedRun run;
  Mlp second;
  auto sgd = SGD(run.net->parameters(), {.lr = 0.1});
  auto adamw = AdamW(second->parameters(), {.lr = 0.1});
  auto steps = StepLR(sgd, {.step_size = 1});
  auto more_steps = StepLR(adamw, {.step_size = 1});
  const auto data = [] { return make_data_loader(torch::arange(4), {.batch_size = 2}); };
  auto prepared = run.accelerator.prepare(second, sgd, adamw, steps, more_steps, data(), data());
  Progress first_object, second_object;
  run.accelerator.register_for_checkpointing(first_object, second_object);
  run.accelerator.save_state(path_, {.safe_serialization = false});
  EXPECT_EQ(names_in(path_),
            (Names{"accelerate_state.json", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl",
                   "dl_state_dict.bin", "dl_state_dict_1.bin", "optimizer.bin", "optimizer_1.bin",
                   "pytorch_model.bin", "pytorch_model_1.bin", "random_states_0.pkl",
                   "scheduler.bin", "scheduler_1.bin"}));
}

TEST_F(SaveStateTest, KeepsForeignFilesAndRemovesThoseOfItsEarlierSaveThatAreStale) {
  write_text(path_ / "notes.txt", "mine");
  write_text(path_ / "deeper/random_states_5.pkl", "mine");
  Progress progress;
  {
    SavedRun run;
    run.accelerator.register_for_checkpointing(progress);
    run.accelerator.save_state(path_);
    EXPECT_TRUE(fs::exists(path_ / "custom_checkpoint_0.pkl"));
  }
  SavedRun run;
  run.accelerator.save_state(path_, {.safe_serialization = false});
  EXPECT_EQ(names_in(path_), (Names{"accelerate_state.json", "deeper", "notes.txt",
                                    "pytorch_model.bin", "random_states_0.pkl"}));
  EXPECT_TRUE(fs::exists(path_ / "deeper/random_states_5.pkl"));
}

TEST_F(SaveStateTest, WeightsOfPythonInTheOtherFormatDoNotHideTheNewOnes) {
  fs::copy(test::reference_path("run_state/safetensors"), path_, fs::copy_options::recursive);
  SavedRun run(anew(), /*value=*/5);
  Progress progress;
  run.accelerator.register_for_checkpointing(progress);
  run.accelerator.save_state(path_, {.safe_serialization = false});
  run.fill(0);
  run.accelerator.load_state(path_);
  EXPECT_EQ(run.value(), 5);
}

TEST_F(SaveStateTest, NeedsAFolder) {
  SavedRun run;
  EXPECT_TRUE(
      has(message_of<ArgumentError>([&] { run.accelerator.save_state(); }), "no folder is given"));
  SavedRun without_project(
      anew({.project_config = ProjectConfiguration{.automatic_checkpoint_naming = true}}));
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { without_project.accelerator.save_state(); }),
                  "project_dir"));
  EXPECT_EQ(run.accelerator.save_iteration(), 0) << "only saves that worked count";
}

TEST_F(SaveStateTest, ExpandsTheHomeFolder) {
  const std::string before = std::getenv("HOME");
  ::setenv("HOME", path_.c_str(), 1);
  SavedRun run(anew(), /*value=*/3);
  EXPECT_EQ(run.accelerator.save_state("~/state"), path_ / "state");
  run.fill(0);
  EXPECT_EQ(run.accelerator.load_state("~/state"), path_ / "state");
  ::setenv("HOME", before.c_str(), 1);
  EXPECT_EQ(run.value(), 3);
  EXPECT_FALSE(fs::exists("~"));
}

TEST_F(SaveStateTest, LeavesTheOldCheckpointWhereAFileCannotBeWritten) {
  SavedRun run(anew(), /*value=*/1);
  run.accelerator.save_state(path_);
  fs::create_directory(path_ / "custom_checkpoint_0.pkl");
  Progress progress;
  run.accelerator.register_for_checkpointing(progress);
  run.fill(2);
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { run.accelerator.save_state(path_); }),
                  "custom_checkpoint_0.pkl"));
  EXPECT_EQ(run.accelerator.save_iteration(), 1);
  fs::remove(path_ / "custom_checkpoint_0.pkl");
  SavedRun reader;
  reader.accelerator.load_state(path_);
  EXPECT_EQ(reader.value(), 1);
}

// ---- asynchronous -------------------------------------------------------------------------------

TEST_F(SaveStateTest, AsynchronousSavesHoldTheStateOfTheirCall) {
  SavedRun run(anew(), /*value=*/1);
  Progress progress{.batches = 1};
  run.accelerator.register_for_checkpointing(progress);
  for (int i = 0; i < 5; ++i) {
    run.accelerator.save_state(path_ / std::to_string(i), {.asynchronous = true});
    run.fill(2 + i);
    progress.batches = 2 + i;
  }
  run.accelerator.wait_for_save_state();
  EXPECT_EQ(run.accelerator.save_iteration(), 5);
  for (int i = 0; i < 5; ++i) {
    run.accelerator.load_state(path_ / std::to_string(i));
    EXPECT_EQ(run.value(), 1 + i);
    EXPECT_EQ(progress.batches, 1 + i);
  }
}

TEST_F(SaveStateTest, ErrorsOfAnAsynchronousSaveAppearAtTheNextCallOnce) {
  fs::create_directories(path_ / "bad/model.safetensors");
  SavedRun run(anew(), /*value=*/1);
  run.accelerator.save_state(path_ / "good");
  const std::vector<std::function<void()>> next = {
      [&] { run.accelerator.wait_for_save_state(); },
      [&] { run.accelerator.save_state(path_ / "good"); },
      [&] { run.accelerator.load_state(path_ / "good"); }};
  for (const auto& call : next) {
    run.accelerator.save_state(path_ / "bad", {.asynchronous = true});
    EXPECT_TRUE(has(message_of<CheckpointError>(call), "model.safetensors"));
    call();
  }
}

TEST_F(SaveStateTest, AnErrorAtTheEndOfTheProgramIsAWarning) {
  const test::CapturedLog log;
  fs::create_directories(path_ / "model.safetensors");
  {
    SavedRun run;
    run.accelerator.save_state(path_, {.asynchronous = true});
  }
  ASSERT_EQ(log.messages().size(), 1);
  EXPECT_TRUE(has(log.messages()[0], "asynchronous save_state failed"));
}

// ---- automatic names ----------------------------------------------------------------------------

TEST_F(AutomaticNamesTest, AreThoseOfPythonOnTheSameCalls) {
  const auto reference = reference_calls();
  for (const auto& one : reference.at("naming")) {
    SCOPED_TRACE(one.at("name"));
    const Folder project;
    std::unique_ptr<SavedRun> run;
    auto results = one.at("results").begin();
    const auto& calls = one.at("calls");
    for (auto call = calls.begin(); call != calls.end(); ++call) {
      if (*call == "new") {
        const auto& fields = *++call;
        auto options = automatic(project.path());
        if (fields.contains("total_limit")) {
          options.project_config->total_limit = fields.at("total_limit").get<std::int64_t>();
        }
        options.project_config->iteration = fields.value("iteration", 0);
        run.reset();
        run = std::make_unique<SavedRun>(options);
      } else if (call->is_number()) {
        run->accelerator.set_save_iteration(*call);
      } else {
        const auto& expected = *results++;
        if (expected.contains("saved")) {
          EXPECT_EQ(run->accelerator.save_state("ignored"),
                    project.path() / expected.at("saved").get<std::string>());
        } else {
          EXPECT_TRUE(
              has(message_of<ArgumentError>([&] { run->accelerator.save_state("ignored"); }),
                  expected.at("error").get<std::string>()));
        }
        EXPECT_EQ(Json(checkpoints_of(project.path())), expected.at("folders"));
        EXPECT_EQ(run->accelerator.save_iteration(), expected.at("save_iteration"));
        EXPECT_EQ(names_in(project.path()), Names{"checkpoints"}) << "nothing is left over";
      }
    }
  }
  EXPECT_FALSE(fs::exists("ignored"));
}

TEST_F(AutomaticNamesTest, StraysDoNotCountAndAreNotDeleted) {
  const auto checkpoints = path_ / "checkpoints";
  write_text(checkpoints / "README", "mine");
  write_text(checkpoints / "checkpoint_99", "a file");
  fs::create_directories(checkpoints / "checkpoint_5_best");
  fs::create_directories(checkpoints / "old_checkpoint_7");
  SavedRun run(automatic(path_, /*total_limit=*/1), /*value=*/1);
  for (int i = 0; i < 3; ++i) run.accelerator.save_state();
  EXPECT_EQ(names_in(checkpoints), (Names{"README", "checkpoint_2", "checkpoint_5_best",
                                          "checkpoint_99", "old_checkpoint_7"}));
  EXPECT_EQ(run.accelerator.load_state(), checkpoints / "checkpoint_2");
}

TEST_F(AutomaticNamesTest, ExplicitFoldersMoveTheNumberToo) {
  SavedRun run;
  run.accelerator.save_state(path_ / "a");
  run.accelerator.save_state(path_ / "a");
  EXPECT_EQ(run.accelerator.save_iteration(), 2);
  EXPECT_TRUE(
      has(message_of<ArgumentError>([&] { run.accelerator.set_save_iteration(-1); }), "-1"));
}

TEST_F(AutomaticNamesTest, WithoutAFolderTheNewestIsLoadedAndNumbersGoOnBehindIt) {
  SavedRun first(automatic(path_), /*value=*/1);
  for (int i = 0; i < 11; ++i) {
    first.fill(i);
    first.accelerator.save_state();
  }
  first.fill(99);
  EXPECT_EQ(first.accelerator.load_state(), path_ / "checkpoints/checkpoint_10");
  EXPECT_EQ(first.value(), 10) << "the saved weights, not those that the model has";

  SavedRun second(automatic(path_));
  EXPECT_EQ(second.accelerator.load_state(), path_ / "checkpoints/checkpoint_10");
  EXPECT_EQ(second.value(), 10);
  EXPECT_EQ(second.accelerator.save_state(), path_ / "checkpoints/checkpoint_11");
}

TEST_F(AutomaticNamesTest, ADamagedCheckpointIsPassedOverWithAWarning) {
  SavedRun run(automatic(path_));
  for (int i = 0; i < 3; ++i) {
    run.fill(i);
    run.accelerator.save_state();
  }
  damage(path_ / "checkpoints/checkpoint_2/model.safetensors");
  {
    const test::CapturedLog log;
    EXPECT_EQ(run.accelerator.load_state(), path_ / "checkpoints/checkpoint_1");
    ASSERT_EQ(log.messages().size(), 1);
    EXPECT_TRUE(has(log.messages()[0], "checkpoint_2"));
    EXPECT_TRUE(has(log.messages()[0], "model.safetensors"));
  }
  EXPECT_EQ(run.value(), 1);
  EXPECT_EQ(run.accelerator.save_iteration(), 3) << "not a number that is taken";

  const test::CapturedLog log;
  for (int i = 0; i < 2; ++i) {
    fs::remove(path_ / "checkpoints" / ("checkpoint_" + std::to_string(i)) / "random_states_0.pkl");
  }
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { run.accelerator.load_state(); }),
                  "has no complete checkpoint"));
}

TEST_F(AutomaticNamesTest, WithoutACheckpointThereIsNothingToLoad) {
  SavedRun run(automatic(path_));
  EXPECT_TRUE(
      has(message_of<ArgumentError>([&] { run.accelerator.load_state(); }), "has no checkpoint"));
  SavedRun named;
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { named.accelerator.load_state(); }),
                  "no folder is given and automatic checkpoint naming is off"));
}

// ---- hooks --------------------------------------------------------------------------------------

/// Two models that are told apart by their number of outputs, as in the reference.
struct TwoModels {
  TwoModels() : accelerator(anew()) {
    for (auto& net : nets) {
      models.push_back(accelerator.prepare(net));
      optimizers.push_back(accelerator.prepare(SGD(net->parameters(), {.lr = 0.1})));
    }
  }
  static std::vector<std::int64_t> outputs_of(
      std::span<const std::shared_ptr<torch::nn::Module>> modules) {
    std::vector<std::int64_t> outputs;
    for (const auto& module : modules)
      outputs.push_back(module->as<torch::nn::Linear>()->bias.size(0));
    return outputs;
  }

  Accelerator accelerator;
  std::vector<torch::nn::Linear> nets = {torch::nn::Linear(1, 1), torch::nn::Linear(1, 2)};
  std::vector<PreparedModel<torch::nn::Linear>> models;
  std::vector<AcceleratedOptimizer> optimizers;
};

TEST_F(StateHooksTest, AreCalledAsPythonCallsThem) {
  TwoModels run;
  Json seen = Json::array();
  const auto save_hook = [&](const std::string& name, auto act) -> SaveStateHook {
    return [&seen, name, act](auto models, auto& weights, const fs::path& output_dir) {
      std::vector<std::int64_t> sizes;
      for (const auto& state : weights) sizes.push_back(state["bias"].size(0));
      seen.push_back({name, TwoModels::outputs_of(models), sizes});
      act(weights, output_dir);
    };
  };
  const auto write_side_file = [](auto&, const fs::path& output_dir) {
    write_text(output_dir / "side.txt", "by a hook");
  };
  const auto remove_first = [](auto& weights, const fs::path&) { weights.erase(weights.begin()); };
  const auto expected = reference_calls().at("hooks");
  const auto save = [&](std::size_t index) {
    const Folder folder;
    seen = Json::array();
    run.accelerator.save_state(folder.path());
    EXPECT_EQ(seen, expected[index].at("seen")) << index;
    auto names = names_in(folder.path());
    std::erase(names, "accelerate_state.json");
    EXPECT_EQ(Json(names), expected[index].at("files")) << index;
  };
  auto first = run.accelerator.register_save_state_pre_hook(save_hook("first", write_side_file));
  auto second = run.accelerator.register_save_state_pre_hook(save_hook("second", remove_first));
  save(0);
  first.remove();
  save(1);
  first.remove();
  second.remove();
  save(2);

  run.accelerator.register_load_state_pre_hook([&](auto& models, const fs::path& input_dir) {
    std::string text;
    std::getline(std::ifstream(input_dir / "side.txt"), text);
    seen.push_back({"load_first", TwoModels::outputs_of(models), text});
    models.erase(models.begin());
  });
  run.accelerator.register_load_state_pre_hook([&](auto& models, const fs::path&) {
    seen.push_back({"load_second", TwoModels::outputs_of(models), nullptr});
  });
  run.accelerator.register_save_state_pre_hook(save_hook("first", write_side_file));
  run.accelerator.register_save_state_pre_hook(save_hook("second", remove_first));
  run.accelerator.save_state(path_);
  seen = Json::array();
  Json loaded = Json::array();
  for (auto& net : run.nets) net->bias.data().fill_(7);
  run.accelerator.load_state(path_);
  for (auto& net : run.nets) {
    if (!net->bias.eq(7).all().item<bool>()) loaded.push_back(net->bias.size(0));
  }
  EXPECT_EQ(seen, expected[3].at("seen"));
  EXPECT_EQ(loaded, expected[3].at("loaded"));
}

TEST_F(StateHooksTest, FilesOfAHookBelongToAnAutomaticallyNamedCheckpoint) {
  SavedRun run(automatic(path_), /*value=*/1);
  auto handle =
      run.accelerator.register_save_state_pre_hook([](auto, auto&, const fs::path& output_dir) {
        write_text(output_dir / "adapters/first.txt", "from a hook");
      });
  run.accelerator.save_state();
  run.fill(2);
  const auto folder = run.accelerator.save_state();
  EXPECT_TRUE(fs::exists(folder / "adapters/first.txt"));
  damage(folder / "adapters/first.txt");
  const test::CapturedLog log;
  run.accelerator.load_state();
  EXPECT_EQ(run.value(), 1) << "the manifest names what the hook wrote";
  EXPECT_TRUE(has(log.messages().at(0), "adapters/first.txt"));
}

TEST_F(StateHooksTest, MayRemoveThemselvesAndHandlesMayBeCopied) {
  SavedRun run;
  Names called;
  std::optional<RemovableHandle> first;
  first = run.accelerator.register_save_state_pre_hook([&](auto, auto&, const fs::path&) {
    called.emplace_back("once");
    first->remove();
  });
  const auto second = run.accelerator.register_save_state_pre_hook(
      [&](auto, auto&, const fs::path&) { called.emplace_back("always"); });
  run.accelerator.save_state(path_);
  run.accelerator.save_state(path_);
  EXPECT_EQ(called, (Names{"once", "always", "always"}));
  auto copy = second;
  auto other_copy = second;
  copy.remove();
  other_copy.remove();
  first->remove();
  run.accelerator.save_state(path_);
  EXPECT_EQ(called.size(), 3);
}

TEST_F(StateHooksTest, HandlesOutliveTheAccelerator) {
  std::optional<RemovableHandle> handle;
  {
    SavedRun run;
    handle = run.accelerator.register_load_state_pre_hook([](auto&, const fs::path&) {});
  }
  EXPECT_NO_THROW(handle->remove());
}

TEST_F(StateHooksTest, WhatAHookThrowsLeavesNoCheckpoint) {
  SavedRun run(automatic(path_));
  run.accelerator.register_save_state_pre_hook(
      [](auto, auto&, const fs::path&) { throw std::runtime_error("the hook does not like it"); });
  EXPECT_EQ(message_of<std::runtime_error>([&] { run.accelerator.save_state(); }),
            "the hook does not like it");
  EXPECT_EQ(run.accelerator.save_iteration(), 0);
  EXPECT_TRUE(names_in(path_).empty()) << "no leftover";
}

}  // namespace
}  // namespace accelerate
