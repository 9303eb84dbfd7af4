// save_state and load_state of several processes: who writes what, and what the others see.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "accelerator/runs.h"
#include "checkpoint/models.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::anew;
using test::automatic;
using test::damage;
using test::has;
using test::message_of;
using test::names_in;
using test::Progress;
using test::SavedRun;
using test::SharedFolder;
using Names = std::vector<std::string>;

std::vector<std::string> keys_of(const fs::path& file) {
  std::vector<std::string> keys;
  for (const auto& entry : load_state_dict(file)) keys.push_back(entry.key());
  return keys;
}

/// A rank of a run in which each process draws numbers of its own.
struct Drawn {
  Drawn() : host(host_rng()()), torch(torch::rand({1}).item<double>()) {}
  std::uint64_t host;
  double torch;
  bool operator==(const Drawn&) const = default;
};

TEST(SaveStateOnProcesses, TheMainProcessWritesWhatIsCommonAndEachOneItsOwn) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run(anew(), /*value=*/3);
    auto optimizer = run.accelerator.prepare(SGD(run.net->parameters(), {.lr = 0.1}));
    auto loader = run.accelerator.prepare(make_data_loader(torch::arange(8), {.batch_size = 2}));
    Progress progress{.batches = run.accelerator.process_index()};
    run.accelerator.register_for_checkpointing(progress);
    set_seed(1, {.device_specific = true});
    run.accelerator.save_state(folder.path() / "state");
    // Complete when it returns, on every rank.
    EXPECT_EQ(names_in(folder.path() / "state"),
              (Names{"accelerate_state.json", "custom_checkpoint_0.pkl", "dl_state_dict.bin",
                     "dl_state_dict_rank0.bin", "dl_state_dict_rank1.bin", "model.safetensors",
                     "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"}));
    EXPECT_EQ(keys_of(folder.path() / "state/model.safetensors")[0], "first.bias")
        << "without the prefix of a wrapper: Python would not load it";
    const Drawn expected;
    run.fill(0);
    progress.batches = 9;
    run.accelerator.load_state(folder.path() / "state", {.strict_rng = true});
    EXPECT_TRUE(Drawn() == expected) << "each process has its own numbers";
    EXPECT_EQ(run.value(), 3);
    EXPECT_EQ(progress.batches, 0) << "of the main process";
  });
}

TEST(SaveStateOnProcesses, WithSaveOnEachNodeOneProcessOfEachHostWrites) {
  const SharedFolder folder;
  auto options = folder.options();
  options.processes_per_host = 2;
  on_processes(4, options, [&] {
    SavedRun run(anew({.project_config = ProjectConfiguration{.save_on_each_node = true}}),
                 /*value=*/2);
    const int rank = run.accelerator.process_index();
    // Hosts without a common disk: the same path leads to a folder of each host.
    const auto host = folder.path() / ("host" + std::to_string(rank / 2));
    fs::create_directories(host);
    run.accelerator.wait_for_everyone();
    fs::current_path(host);
    run.accelerator.save_state("state");
    const auto first = std::to_string(rank / 2 * 2);
    const auto second = std::to_string(rank / 2 * 2 + 1);
    EXPECT_EQ(names_in(host / "state"),
              (Names{"accelerate_state.json", "model.safetensors",
                     "random_states_" + first + ".pkl", "random_states_" + second + ".pkl"}));
    run.fill(0);
    run.accelerator.load_state("state", {.strict_rng = true});
    EXPECT_EQ(run.value(), 2);
  });
}

TEST(SaveStateOnProcesses, NumbersAndLimitsAreThoseOfOneProcess) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run(automatic(folder.path(), /*total_limit=*/2));
    for (int i = 0; i < 11; ++i) {
      run.fill(i);
      run.accelerator.save_state({}, {.asynchronous = i % 2 == 1});
    }
    run.accelerator.wait_for_save_state();
    run.accelerator.wait_for_everyone();
    EXPECT_EQ(names_in(folder.path()), Names{"checkpoints"});
    EXPECT_EQ(names_in(folder.path() / "checkpoints"), (Names{"checkpoint_10", "checkpoint_9"}));
    run.accelerator.set_save_iteration(9);
    EXPECT_THROW(run.accelerator.save_state(), Error);  // "already exists" on the main process
    run.fill(0);
    if (run.accelerator.is_main_process()) {
      damage(folder.path() / "checkpoints/checkpoint_10/random_states_1.pkl");
    }
    run.accelerator.wait_for_everyone();
    const test::CapturedLog log;
    EXPECT_EQ(run.accelerator.load_state(), folder.path() / "checkpoints/checkpoint_9");
    EXPECT_EQ(log.messages().size(), run.accelerator.is_main_process() ? 1 : 0);
    EXPECT_EQ(run.value(), 9);
    EXPECT_EQ(run.accelerator.save_iteration(), 11) << "the damaged one keeps its number";
  });
}

// ---- preemption ---------------------------------------------------------------------------------

TEST(PreemptedRun, CompletesItsEpochAndItsEvaluation) {
  const SharedFolder folder;
  const auto outcomes = run_processes(1, folder.options(), [&] {
    auto options = automatic(folder.path());
    options.project_config->save_on_preemption = true;
    SavedRun run(options);
    auto loader = run.accelerator.prepare(make_data_loader(torch::ones({6, 3}), {.batch_size = 2}));
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : loader) {
        run.accelerator.backward(run.model(batch).sum());
        std::cout << "epoch " << epoch << ", a batch" << std::endl;
        if (run.accelerator.gradient_state().end_of_dataloader()) ::raise(SIGUSR1);
      }
      const torch::NoGradGuard no_grad;
      for (auto& batch : loader) std::cout << "evaluated " << batch.size(0) << std::endl;
    }
  });
  const auto& end = outcomes.front();
  EXPECT_EQ(end.exit_code, 75) << end.output;
  EXPECT_EQ(test::count_of(end.output, "epoch 0, a batch"), 3) << end.output;
  EXPECT_EQ(test::count_of(end.output, "evaluated 2"), 3) << end.output;
  EXPECT_EQ(test::count_of(end.output, "epoch 1"), 0) << end.output;
  if (in_child_process()) return;
  EXPECT_EQ(names_in(folder.path() / "checkpoints"), Names{"checkpoint_0"});
}

// ---- another number of processes ----------------------------------------------------------------

/// Saves, with random states of each process, and gradients of a batch that is only accumulated.
void save_between_steps(const fs::path& folder) {
  SavedRun run(anew({.gradient_accumulation_steps = 2}), /*value=*/6);
  const auto accumulating = run.accelerator.accumulate(run.model);
  const double scale = 1 + run.accelerator.process_index();
  run.accelerator.backward((run.model(torch::ones({1, 3})) * scale).sum());
  run.accelerator.save_state(folder);
}

/// Loads it on any number of processes; `gradient` is what the bias of the last layer has then.
void load_between_steps(const fs::path& folder, int saved_by, double gradient) {
  const test::CapturedLog log;
  SavedRun run(anew({.gradient_accumulation_steps = 2}));
  run.accelerator.load_state(folder);
  EXPECT_EQ(run.value(), 6);
  EXPECT_NEAR(run.net->second->bias.grad()[0].item<double>(), gradient, 1e-6);
  const bool has_states = run.accelerator.process_index() < saved_by;
  ASSERT_EQ(log.messages().size(), has_states ? 0 : 1);
  if (run.accelerator.num_processes() <= saved_by) return;
  const auto load_strictly = [&] { run.accelerator.load_state(folder, {.strict_rng = true}); };
  const auto message = has_states ? message_of<CommError>(load_strictly)
                                  : message_of<CheckpointError>(load_strictly);
  EXPECT_TRUE(has(message, "no random states of process 1"));
  if (!has_states) {
    EXPECT_TRUE(has(log.messages()[0], "no random states of process 1"));
  }
}

TEST(SaveStateOnProcesses, TwoSaveAndOneLoads) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] { save_between_steps(folder.path()); });
  ASSERT_TRUE(fs::exists(folder.path() / "accumulated_gradients_1.bin"));
  // Halves of 1 and of 2: what the next average of two processes would have held.
  on_processes(1, folder.options(), [&] { load_between_steps(folder.path(), 2, 0.75); });
}

TEST(SaveStateOnProcesses, OneSavesAndTwoLoad) {
  const SharedFolder folder;
  on_processes(1, folder.options(), [&] { save_between_steps(folder.path()); });
  on_processes(2, folder.options(), [&] { load_between_steps(folder.path(), 1, 0.5); });
}

TEST(SaveStateOnProcesses, NamesWithThePrefixOfAWrapperAreLoaded) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run(anew(), /*value=*/4);
    run.accelerator.save_state(folder.path());
    if (run.accelerator.is_main_process()) {
      fs::remove(folder.path() / "accelerate_state.json");
      safetensors::save_file(run.accelerator.get_state_dict(run.model, /*unwrap=*/false),
                             folder.path() / "model.safetensors");
      EXPECT_EQ(keys_of(folder.path() / "model.safetensors")[0], "module.first.bias");
    }
    run.accelerator.wait_for_everyone();
    run.fill(0);
    run.accelerator.load_state(folder.path());
    EXPECT_EQ(run.value(), 4);
  });
}

TEST(SaveStateOnProcesses, TwoSaveAndTwoLoad) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    save_between_steps(folder.path());
    const double own = 0.5 * (1 + PartialState().process_index());
    load_between_steps(folder.path(), 2, own);
  });
}

// ---- errors -------------------------------------------------------------------------------------

TEST(SaveStateOnProcesses, WhatOneProcessCannotWriteAllAreTold) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run(anew(), /*value=*/1);
    const auto state = folder.path() / "state";
    run.accelerator.save_state(state);
    run.fill(2);
    for (const bool asynchronous : {false, true}) {
      const auto blocked = state / "random_states_1.pkl";
      if (run.accelerator.is_main_process()) {
        fs::rename(blocked, folder.path() / "kept");
        fs::create_directory(blocked);
      }
      run.accelerator.wait_for_everyone();
      const auto save = [&] {
        run.accelerator.save_state(state, {.asynchronous = asynchronous});
        run.accelerator.wait_for_save_state();
      };
      const auto message = run.accelerator.is_main_process() ? message_of<CommError>(save)
                                                             : message_of<CheckpointError>(save);
      EXPECT_TRUE(has(message, "random_states_1.pkl"));
      run.accelerator.wait_for_everyone();
      if (run.accelerator.is_main_process()) {
        fs::remove(blocked);
        fs::rename(folder.path() / "kept", blocked);
      }
      run.accelerator.wait_for_everyone();
    }
    run.accelerator.load_state(state);
    EXPECT_EQ(run.value(), 1) << "the checkpoint before is whole";
  });
}

TEST(SaveStateOnProcesses, AHookThatThrowsOnOneProcessEndsTheSaveOfAll) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run(automatic(folder.path()));
    auto handle = run.accelerator.register_save_state_pre_hook([&](auto, auto&, const fs::path&) {
      if (!run.accelerator.is_main_process()) throw std::runtime_error("not this one");
    });
    const auto save = [&] { run.accelerator.save_state(); };
    EXPECT_TRUE(has(run.accelerator.is_main_process() ? message_of<CommError>(save)
                                                      : message_of<std::runtime_error>(save),
                    "not this one"));
    if (run.accelerator.is_main_process()) {
      EXPECT_EQ(names_in(folder.path()), Names{}) << "nothing is left";
    }
    handle.remove();
    run.accelerator.save_state();
    EXPECT_TRUE(fs::exists(folder.path() / "checkpoints/checkpoint_0"));
  });
}

TEST(SaveStateOnProcesses, AMissingFolderIsNamedOnAll) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run;
    EXPECT_TRUE(
        has(message_of<ArgumentError>([&] { run.accelerator.load_state(folder.path() / "none"); }),
            "folder does not exist"));
    const auto other = folder.path() / std::to_string(run.accelerator.process_index());
    EXPECT_TRUE(has(message_of<ArgumentError>([&] { run.accelerator.save_state(other); }),
                    "All must name one folder"));
  });
}

TEST(SaveStateOnProcesses, HooksRunOnEachProcess) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    SavedRun run(automatic(folder.path()), /*value=*/1);
    run.accelerator.register_save_state_pre_hook([&](auto, auto& weights, const fs::path& to) {
      EXPECT_EQ(weights.size(), 1);
      test::write_text(to / ("hook_" + std::to_string(run.accelerator.process_index())), "x");
    });
    const auto saved = run.accelerator.save_state();
    EXPECT_TRUE(fs::exists(saved / "hook_0") && fs::exists(saved / "hook_1"));
    run.accelerator.wait_for_everyone();
    if (run.accelerator.is_main_process()) damage(saved / "hook_1");
    run.accelerator.wait_for_everyone();
    EXPECT_THROW(run.accelerator.load_state(), Error);
  });
}

}  // namespace
}  // namespace accelerate
