#include "accelerate/data/batch_samplers.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "accelerate/errors.h"
#include "accelerate/samplers.h"
#include "data/index_reference.h"
#include "data/index_samplers.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::batches_of;
using test::BatchesOfSizes;
using test::message_of;
using test::sequential_batches;
using Batches = std::vector<IndexBatch>;

BatchSamplerShardOptions shard_options(const test::GridSetting& setting, int process) {
  return {.num_processes = setting.num_processes,
          .process_index = process,
          .split_batches = setting.split_batches,
          .even_batches = setting.even_batches};
}

/// What the reference has the hash of.
std::string shard_text(std::int64_t length, const test::GridSetting& setting) {
  const auto batches = sequential_batches(length, setting.batch_size, setting.drop_last);
  std::string text;
  for (int process = 0; process < setting.num_processes; ++process) {
    BatchSamplerShard shard(batches, shard_options(setting, process));
    text += test::batches_text(batches_of(shard)) + "#" + std::to_string(*shard.size()) + "|";
  }
  return text;
}

TEST(BatchSampler, GroupsIndices) {
  EXPECT_EQ(batches_of(*sequential_batches(5, 2)), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(batches_of(*sequential_batches(5, 2, true)), (Batches{{0, 1}, {2, 3}}));
  EXPECT_EQ(batches_of(*sequential_batches(0, 2)), Batches{});
}

TEST(BatchSampler, HasNoSizeWhereItsSamplerHasNone) {
  struct Endless {
    void begin(std::int64_t /*epoch*/) {}
    std::optional<int> next() { return 0; }
  };
  BatchSampler batches(as_sampler(Endless{}), 3, false);
  EXPECT_EQ(batches.size(), std::nullopt);
  EXPECT_EQ(BatchSamplerShard(std::make_shared<BatchSampler>(batches), {.num_processes = 2}).size(),
            std::nullopt);
  EXPECT_EQ(batches.begin(0)->next(), (IndexBatch{0, 0, 0}));
}

TEST(BatchSampler, RefusesABatchSizeBelowOne) {
  EXPECT_EQ(message_of<ArgumentError>([] { std::ignore = sequential_batches(5, 0); }),
            "batch_size should be a positive integer value, but got batch_size=0.");
  EXPECT_THROW(BatchSampler(nullptr, 1, false), ArgumentError);
}

TEST(BatchSampler, SaysWhatItSkipped) {
  auto pass = sequential_batches(10, 4)->begin(0);
  EXPECT_EQ(pass->skip(2), (SkippedBatches{2, 8}));
  EXPECT_EQ(pass->skip(5), (SkippedBatches{1, 2}));
  EXPECT_EQ(pass->next(), std::nullopt);
  pass = sequential_batches(10, 4, true)->begin(0);
  EXPECT_EQ(pass->skip(5), (SkippedBatches{2, 8}));
  EXPECT_EQ(pass->next(), std::nullopt);
}

TEST(BatchSampler, TakesAnotherSampler) {
  const auto batches = sequential_batches(4, 3, true);
  const auto other = std::make_shared<SequentialSampler>(7);
  const auto replaced = batches->with_sampler(other);
  EXPECT_EQ(replaced->sampler(), other);
  EXPECT_EQ(batches_of(*replaced), (Batches{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(BatchSamplerShard(batches).with_sampler(other)->sampler(), other);
  EXPECT_EQ(SkipBatchSampler(batches).with_sampler(other)->sampler(), other);
  EXPECT_EQ(as_batch_sampler(BatchesOfSizes({2}))->with_sampler(other), nullptr);
}

TEST(BatchSamplerShard, HandsOutPythonsIndicesInEveryCase) {
  std::int64_t cases = 0;
  for (const auto& [setting, entries] : test::read_grid("shard.txt", test::EvenColumn::kYes)) {
    if (entries.empty()) {
      const auto batches = sequential_batches(10, setting.batch_size, setting.drop_last);
      EXPECT_THROW(BatchSamplerShard(batches, shard_options(setting, 0)), ArgumentError)
          << to_text(10, setting);
      cases += 61;
    }
    for (std::size_t i = 0; i < entries.size(); ++i, ++cases) {
      const auto length = static_cast<std::int64_t>(i);
      const auto text = shard_text(length, setting);
      ASSERT_TRUE(test::is_entry("shard.txt", length, setting, text, entries[i]));
    }
  }
  EXPECT_EQ(cases, 61 * 8 * 5 * 8);
}

TEST(BatchSamplerShard, HandsOutPythonsIndicesInFull) {
  std::ifstream file(test::reference_path("data/texts.txt"));
  int cases = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind;
    std::string expected;
    std::int64_t length = 0;
    test::GridSetting setting;
    words >> kind;
    if (kind != "shard") continue;
    words >> length >> setting.batch_size >> setting.num_processes >> setting.drop_last >>
        setting.split_batches >> setting.even_batches >> expected;
    if (expected == "-") continue;
    EXPECT_EQ(shard_text(length, setting), expected) << to_text(length, setting);
    ++cases;
  }
  EXPECT_GT(cases, 300);
}

TEST(BatchSamplerShard, FillsTheLastRoundFromTheStartOfThePass) {
  const auto shards = [](std::int64_t length, std::int64_t batch_size,
                         BatchSamplerShardOptions options) {
    std::vector<Batches> all;
    for (int process = 0; process < options.num_processes; ++process) {
      options.process_index = process;
      BatchSamplerShard shard(sequential_batches(length, batch_size), options);
      all.push_back(batches_of(shard));
    }
    return all;
  };
  EXPECT_EQ(shards(10, 4, {.num_processes = 2}),
            (std::vector<Batches>{{{0, 1, 2, 3}, {8, 9, 0, 1}}, {{4, 5, 6, 7}, {2, 3, 4, 5}}}));
  EXPECT_EQ(shards(3, 4, {.num_processes = 2}),
            (std::vector<Batches>{{{0, 1, 2, 0}}, {{1, 2, 0, 1}}}));
  EXPECT_EQ(shards(7, 2, {.num_processes = 3}),
            (std::vector<Batches>{{{0, 1}, {6, 0}}, {{2, 3}, {1, 2}}, {{4, 5}, {3, 4}}}));
  EXPECT_EQ(shards(8, 6, {.num_processes = 2, .split_batches = true}),
            (std::vector<Batches>{{{0, 1, 2}, {6, 7, 0}}, {{3, 4, 5}, {1, 2, 3}}}));
  EXPECT_EQ(shards(2, 6, {.num_processes = 2, .split_batches = true}),
            (std::vector<Batches>{{{0, 1, 0}}, {{1, 0, 1}}}));
  EXPECT_EQ(shards(8, 6, {.num_processes = 2, .split_batches = true, .even_batches = false}),
            (std::vector<Batches>{{{0, 1, 2}, {6, 7}}, {{3, 4, 5}}}));
}

/// Batches [0], [1,2], [3,4,5], [6], [7,8] of a batch sampler without a batch size.
std::vector<Batches> dynamic_shards(BatchSamplerShardOptions options,
                                    const std::shared_ptr<BatchIndexSampler>& batches =
                                        as_batch_sampler(BatchesOfSizes({1, 2, 3, 1, 2}))) {
  std::vector<Batches> all;
  for (int process = 0; process < options.num_processes; ++process) {
    options.process_index = process;
    BatchSamplerShard shard(batches, options);
    all.push_back(batches_of(shard));
    EXPECT_EQ(shard.size(), std::ssize(all.back()));
  }
  return all;
}

TEST(BatchSamplerShard, RepeatsWholeBatchesWhereTheyHaveNoCommonSize) {
  EXPECT_EQ(dynamic_shards({.num_processes = 2}),
            (std::vector<Batches>{{{0}, {3, 4, 5}, {7, 8}}, {{1, 2}, {6}, {0}}}));
  EXPECT_EQ(
      dynamic_shards({.num_processes = 4}),
      (std::vector<Batches>{{{0}, {7, 8}}, {{1, 2}, {0}}, {{3, 4, 5}, {1, 2}}, {{6}, {3, 4, 5}}}));
  EXPECT_EQ(dynamic_shards({.num_processes = 3}, as_batch_sampler(BatchesOfSizes({2}))),
            (std::vector<Batches>{{{0, 1}}, {{0, 1}}, {{0, 1}}}));
}

TEST(BatchSamplerShard, LeavesBatchesWithoutACommonSizeUneven) {
  EXPECT_EQ(dynamic_shards({.num_processes = 2, .even_batches = false}),
            (std::vector<Batches>{{{0}, {3, 4, 5}, {7, 8}}, {{1, 2}, {6}}}));
}

TEST(BatchSamplerShard, DropsTheLastRoundOfBatchesWithoutACommonSize) {
  struct Dropping : BatchesOfSizes {
    using BatchesOfSizes::BatchesOfSizes;
    [[nodiscard]] bool drop_last() const { return true; }
  };
  EXPECT_EQ(dynamic_shards({.num_processes = 2}, as_batch_sampler(Dropping({1, 2, 3, 1, 2}))),
            (std::vector<Batches>{{{0}, {3, 4, 5}}, {{1, 2}, {6}}}));
}

TEST(BatchSamplerShard, RefusesToSplitWhatCannotBeSharedEqually) {
  const BatchSamplerShardOptions options{.num_processes = 2, .split_batches = true};
  EXPECT_EQ(
      message_of<ArgumentError>([&] { BatchSamplerShard(sequential_batches(10, 3), options); }),
      "To use `BatchSamplerShard` in `split_batches` mode, the batch size (3) needs to be a "
      "round multiple of the number of processes (2).");
  EXPECT_EQ(
      message_of<ArgumentError>(
          [&] { BatchSamplerShard(as_batch_sampler(BatchesOfSizes({2, 2})), options); }),
      "To use `BatchSamplerShard` in `split_batches` mode, the batch size (none) needs to be a "
      "round multiple of the number of processes (2).");
}

TEST(BatchSamplerShard, RefusesAProcessThatIsNotThere) {
  EXPECT_THROW(
      BatchSamplerShard(sequential_batches(4, 2), {.num_processes = 2, .process_index = 2}),
      ArgumentError);
  EXPECT_THROW(BatchSamplerShard(sequential_batches(4, 2), {.num_processes = 0}), ArgumentError);
}

TEST(BatchSamplerShard, KeepsWhatItsBatchSamplerSays) {
  const auto batches = sequential_batches(10, 4, true);
  const BatchSamplerShard shard(batches, {.num_processes = 2});
  EXPECT_EQ(shard.batch_size(), 4);
  EXPECT_TRUE(shard.drop_last());
  EXPECT_EQ(shard.sampler(), batches->sampler());
  EXPECT_EQ(shard.total_length(), 2);
}

TEST(BatchSamplerShard, CanBeShardedAndSkippedAgain) {
  const auto outer = std::make_shared<BatchSamplerShard>(
      sequential_batches(40, 2), BatchSamplerShardOptions{.num_processes = 2, .process_index = 1});
  // Batches 1, 3, 5, ... of 20: every other one of those from the third on.
  const auto skipped = std::make_shared<SkipBatchSampler>(outer, 2);
  BatchSamplerShard inner(skipped, {.num_processes = 2, .process_index = 1});
  EXPECT_EQ(batches_of(inner), (Batches{{14, 15}, {22, 23}, {30, 31}, {38, 39}}));

  auto pass = inner.begin(0);
  EXPECT_EQ(pass->skip(2), (SkippedBatches{2, 4}));
  EXPECT_EQ(pass->next(), (IndexBatch{30, 31}));
  pass->seek(2, 1);
  EXPECT_EQ(pass->next(), (IndexBatch{22, 23}));
}

TEST(SkipBatchSampler, LeavesOutTheFirstBatches) {
  for (std::int64_t skip = 0; skip < 7; ++skip) {
    const auto batches = sequential_batches(18, 4);
    auto expected = batches_of(*batches);
    expected.erase(expected.begin(), expected.begin() + std::min<std::int64_t>(skip, 5));
    SkipBatchSampler skipping(batches, skip);
    EXPECT_EQ(batches_of(skipping), expected);
    EXPECT_EQ(skipping.size(), std::ssize(expected));
    EXPECT_EQ(skipping.total_length(), 5);
  }
  EXPECT_THROW(SkipBatchSampler(sequential_batches(4, 2), -1), ArgumentError);
}

TEST(SkipBatchSampler, SeeksFromWhereItBegins) {
  SkipBatchSampler skipping(sequential_batches(18, 4), 2);
  auto pass = skipping.begin(0);
  const auto all = test::rest_of(*pass);
  pass->seek(4, 1);
  EXPECT_EQ(pass->next(), all[1]);
  pass->seek(0, 0);
  EXPECT_EQ(pass->next(), all[0]);
}

TEST(UserBatchSampler, IsAskedForWhatItHas) {
  struct Buckets : test::SizedBatchesOfSizes {
    using SizedBatchesOfSizes::SizedBatchesOfSizes;
    void set_epoch(std::int64_t epoch) { *epoch_seen = epoch; }
    [[nodiscard]] std::shared_ptr<Sampler> sampler() const { return inner; }
    std::shared_ptr<Sampler> inner = std::make_shared<SequentialSampler>(3);
    std::shared_ptr<std::int64_t> epoch_seen = std::make_shared<std::int64_t>(-1);
  };
  const Buckets buckets({2, 1}, 2, true);
  const auto batches = as_batch_sampler(buckets);
  EXPECT_EQ(batches->batch_size(), 2);
  EXPECT_TRUE(batches->drop_last());
  EXPECT_EQ(batches->size(), 2);
  EXPECT_EQ(batches->sampler(), buckets.inner);
  EXPECT_EQ(batches_of(*batches, 5), (Batches{{0, 1}, {2}}));
  EXPECT_EQ(*buckets.epoch_seen, 5);
}

TEST(UserBatchSampler, MayReturnAnyRangeOfIntegers) {
  struct Small {
    void begin(std::int64_t epoch) { left = static_cast<int>(epoch) + 1; }
    std::optional<std::vector<unsigned char>> next() {
      if (left-- <= 0) return std::nullopt;
      return std::vector<unsigned char>{1, 2};
    }
    int left = 0;
  };
  EXPECT_EQ(batches_of(*as_batch_sampler(Small{}), 1), (Batches{{1, 2}, {1, 2}}));
}

TEST(UserBatchSampler, EndsAnOlderPassWhenANewOneBegins) {
  const auto batches = as_batch_sampler(BatchesOfSizes({2, 2}));
  auto older = batches->begin(0);
  auto newer = batches->begin(0);
  EXPECT_EQ(newer->next(), (IndexBatch{0, 1}));
  const auto message = message_of<StateError>([&] { std::ignore = older->next(); });
  EXPECT_NE(message.find("Another pass over this sampler has begun"), std::string::npos) << message;
  EXPECT_EQ(newer->next(), (IndexBatch{2, 3}));
}

}  // namespace
}  // namespace accelerate
