// Shards of several processes in files: any number loads what any number has saved, and a save that
// fails leaves what was there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "checkpoint/models.h"
#include "checkpoint/sharded_models.h"
#include "checkpoint/stored_state.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/reference_path.h"
#include "support/shared_folder.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::FlatModel;
using test::FlatOptimizer;
using test::message_of;
using test::names_in;
using test::SharedFolder;
using Names = std::vector<std::string>;

void save(const std::shared_ptr<ShardedState>& state, const fs::path& folder,
          const ShardedFileOptions& options = {}) {
  save_sharded_files(*state, folder, options, "test", std::source_location::current());
}

void save(const std::shared_ptr<ShardedModel>& model, const fs::path& folder,
          const ShardedFileOptions& options = {}) {
  save(sharded_state(model), folder, options);
}

void load(const std::shared_ptr<ShardedModel>& model, const fs::path& folder,
          const ShardedFileOptions& options = {}) {
  load_sharded_files(*sharded_state(model), folder, options);
}

TEST(ShardedFiles, AreLoadedByAnyNumberOfProcesses) {
  const SharedFolder folder;
  for (const StateDictType type :
       {StateDictType::kShardedStateDict, StateDictType::kFullStateDict}) {
    const auto folder_of = [&](int saved_by) {
      return folder.path() / (std::string(to_string(type)) + std::to_string(saved_by));
    };
    for (const int saved_by : {1, 2, 3, 4}) {
      on_processes(saved_by, folder.options(), [&](PartialState&) {
        const auto model = std::make_shared<FlatModel>(saved_by, /*skew=*/saved_by - 2);
        const auto optimizer = std::make_shared<FlatOptimizer>(*model, saved_by);
        save(model, folder_of(saved_by), {.type = type});
        save(test::optimizer_state(model, optimizer), folder_of(saved_by), {.type = type});
      });
    }
    for (const int world : {1, 2, 3, 4}) {
      on_processes(world, folder.options(), [&](PartialState&) {
        for (const int saved_by : {1, 2, 3, 4}) {
          const auto model = std::make_shared<FlatModel>(-1);
          const auto optimizer = std::make_shared<FlatOptimizer>(*model, -1);
          load(model, folder_of(saved_by), {.type = type});
          EXPECT_TRUE(model->has_values(saved_by)) << saved_by << " processes, " << world;
          EXPECT_EQ(model->loads, 1);
          load_sharded_files(*test::optimizer_state(model, optimizer), folder_of(saved_by),
                             {.type = type});
          EXPECT_EQ(optimizer->state, FlatOptimizer(*model, saved_by).state)
              << saved_by << " processes, " << world << ": " << optimizer->state.repr();
        }
      });
    }
  }
}

TEST(ShardedFiles, HaveTheNamesOfPython) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState& state) {
    const auto model = std::make_shared<FlatModel>(3);
    const auto optimizer = test::optimizer_state(model, std::make_shared<FlatOptimizer>(*model, 3));
    const auto saved = [&](const std::string& name, const ShardedFileOptions& options) {
      save(model, folder.path() / name, options);
      save(optimizer, folder.path() / name, options);
      return names_in(folder.path() / name);
    };
    const auto full = StateDictType::kFullStateDict;
    const auto local = StateDictType::kLocalStateDict;
    EXPECT_EQ(saved("full", {.type = full}), (Names{"optimizer.bin", "pytorch_model_fsdp.bin"}));
    EXPECT_EQ(saved("full1", {.index = 1, .type = full}),
              (Names{"optimizer_1.bin", "pytorch_model_fsdp_1.bin"}));
    EXPECT_EQ(saved("local", {.type = local}), (Names{"optimizer_0", "pytorch_model_fsdp_rank0.bin",
                                                      "pytorch_model_fsdp_rank1.bin"}));
    EXPECT_EQ(
        saved("local1", {.index = 1, .type = local}),
        (Names{"optimizer_1", "pytorch_model_fsdp_1_rank0.bin", "pytorch_model_fsdp_1_rank1.bin"}));
    EXPECT_EQ(saved("sharded", {}), (Names{"optimizer_0", "pytorch_model_fsdp_0"}));
    EXPECT_EQ(names_in(folder.path() / "sharded/optimizer_0"),
              (Names{".metadata", "__0_0.distcp", "__1_0.distcp"}));
    EXPECT_EQ(saved("files", {.use_dcp = false}),
              (Names{"optimizer_0_rank0.bin", "optimizer_0_rank1.bin",
                     "pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin"}));
    // Each is loaded again.
    for (const auto& [name, options] : std::vector<std::pair<std::string, ShardedFileOptions>>{
             {"full1", {.index = 1, .type = full}},
             {"local", {.type = local}},
             {"sharded", {}},
             {"files", {.use_dcp = false}}}) {
      const auto other = std::make_shared<FlatModel>(-1);
      load(other, folder.path() / name, options);
      EXPECT_TRUE(other->has_values(3)) << name;
      const auto states = std::make_shared<FlatOptimizer>(*other, -1);
      load_sharded_files(*test::optimizer_state(other, states), folder.path() / name, options);
      EXPECT_EQ(states->state, FlatOptimizer(*model, 3).state) << name;
    }
    static_cast<void>(state);
  });
}

TEST(ShardedFiles, OfOneProcessFitThisProcessOfAsManyOnly) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState&) {
    const ShardedFileOptions local{.type = StateDictType::kLocalStateDict};
    save(std::make_shared<FlatModel>(3), folder.path(), local);
    const auto message = message_of<StateDictMismatch>(
        [&] { load(std::make_shared<FlatModel>(3, /*skew=*/1), folder.path(), local); });
    EXPECT_EQ(message,
              "The file of this process has another part of 'first.weight'. Load it with as many "
              "processes and the same units as it was saved with, or save with "
              "SHARDED_STATE_DICT.");
  });
}

TEST(ShardedFiles, HoldWhatProcessesShareOnce) {
  const SharedFolder folder;
  on_processes(4, folder.options(), [&](PartialState& state) {
    // Two replicas of two shards.
    const auto rank = state.process_index();
    const auto shard = [&](double base) {
      auto model = std::make_shared<FlatModel>(base, 0, std::vector<test::ShardedTensor>{});
      const std::int64_t begin = rank % 2 * 5;
      model->shards = {{.name = "w",
                        .sizes = {10},
                        .begin = begin,
                        .end = begin + 5,
                        .values = torch::arange(begin, begin + 5).to(torch::kFloat) + base,
                        .replica = rank >= 2}};
      return model;
    };
    save(shard(10), folder.path());
    const auto model = shard(0);
    load(model, folder.path());
    EXPECT_TRUE(torch::equal(model->shards[0].values, shard(10)->shards[0].values));
    EXPECT_EQ(stored_whole(open_stored_state(folder.path() / "pytorch_model_fsdp_0").at("w"))
                  .sum()
                  .item<double>(),
              145);
  });
}

// ---- faults -------------------------------------------------------------------------------------

TEST(ShardedFiles, StayAsTheyWereIfThePartsOfProcessesDoNotFit) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState& state) {
    save(std::make_shared<FlatModel>(3), folder.path());
    const auto wrong = std::make_shared<FlatModel>(4);
    if (state.process_index() == 1) wrong->shards.pop_back();
    const auto message = message_of<Error>([&] { save(wrong, folder.path()); });
    EXPECT_TRUE(test::has(message, "the chunks of 'model.flags' have 4 of its 9 bytes")) << message;
    state.wait_for_everyone();
    EXPECT_EQ(names_in(folder.path()), Names{"pytorch_model_fsdp_0"});
    const auto model = std::make_shared<FlatModel>(-1);
    load(model, folder.path());
    EXPECT_TRUE(model->has_values(3));
  });
}

/// Kills this process when its part of the shards is being written.
std::jthread killer_of_writer(const fs::path& folder) {
  return std::jthread([folder](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::error_code error;
      for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
        if (test::has(entry.path().string(), ".tmp/__1_0.distcp")) ::raise(SIGKILL);
      }
    }
  });
}

TEST(ShardedFiles, StayAsTheyWereIfAProcessIsKilledWhileItWrites) {
  const SharedFolder folder;
  const std::vector<test::ShardedTensor> large{{"large", {16 << 20}}};
  const auto outcomes = run_processes(2, folder.options(), [&](PartialState& state) {
    save(std::make_shared<FlatModel>(3, 0, large), folder.path());
    const auto model = std::make_shared<FlatModel>(4, 0, large);
    std::jthread killer;
    if (state.process_index() == 1) killer = killer_of_writer(folder.path());
    const auto message = message_of<CommError>([&] { save(model, folder.path()); });
    EXPECT_TRUE(test::has(message, "rank 1")) << message;
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_EQ(names_in(folder.path() / "pytorch_model_fsdp_0").size(), 3U);
  on_processes(3, folder.options(), [&](PartialState&) {
    const auto model = std::make_shared<FlatModel>(-1, 0, large);
    load(model, folder.path());
    EXPECT_TRUE(model->has_values(3));
    // What the crash has left is removed by the next save.
    save(std::make_shared<FlatModel>(5), folder.path());
    EXPECT_EQ(names_in(folder.path()), Names{"pytorch_model_fsdp_0"});
    const auto other = std::make_shared<FlatModel>(-1);
    load(other, folder.path());
    EXPECT_TRUE(other->has_values(5));
  });
}

TEST(ShardedFiles, OfAnEarlierSaveAreReplacedWithTheirFolder) {
  const SharedFolder folder;
  on_processes(3, folder.options(),
               [&](PartialState&) { save(std::make_shared<FlatModel>(3), folder.path()); });
  on_processes(2, folder.options(), [&](PartialState&) {
    save(std::make_shared<FlatModel>(4), folder.path());
    EXPECT_EQ(names_in(folder.path() / "pytorch_model_fsdp_0"),
              (Names{".metadata", "__0_0.distcp", "__1_0.distcp"}));
    const auto model = std::make_shared<FlatModel>(-1);
    load(model, folder.path());
    EXPECT_TRUE(model->has_values(4));
  });
}

TEST(MergeFsdpWeights, GivesAllProcessesTheFileOrTheErrorOfTheFirst) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState&) {
    const auto path =
        merge_fsdp_weights(test::reference_path("dcp/model"), folder.path() / "merged");
    EXPECT_EQ(path, folder.path() / "merged" / "model.safetensors");
    const auto merged = safetensors::load_file(path);
    EXPECT_EQ(merged.size(), 9U);
    EXPECT_TRUE(merged["rows"].flatten().equal(torch::arange(15, torch::kFloat)));
    const auto text = message_of<Error>([&] { (void)merge_fsdp_weights(folder.path(), path); });
    EXPECT_TRUE(test::has(text, "couldn't find a valid metadata file")) << text;
  });
}

}  // namespace
}  // namespace accelerate::detail::checkpoint
