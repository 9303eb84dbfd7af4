#include "accelerate/datasets.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <list>
#include <optional>
#include <vector>

#include "accelerate/data_loader.h"
#include "accelerate/errors.h"
#include "data/loading.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::batches;
using test::iota;
using test::message_of;
using test::Numbers;
using test::numbers;
using test::samples;

using Example = torch::data::Example<>;

Example example(std::int64_t i) { return {torch::full({2}, i), torch::tensor(10 * i)}; }

void expect_example(const Example& batch, const Numbers& data, const Numbers& target) {
  EXPECT_EQ(numbers(batch.data), data);
  EXPECT_EQ(numbers(batch.target), target);
}

/// LibTorch's plain dataset.
struct TenExamples : torch::data::datasets::Dataset<TenExamples> {
  Example get(std::size_t i) override { return example(static_cast<std::int64_t>(i)); }
  std::optional<std::size_t> size() const override { return 10; }
};

TEST(TorchDatasets, AreCollatedUnlessTheyDoItThemselves) {
  for (auto& batch : make_data_loader(TenExamples(), std::vector<int>{3, 1}, {.batch_size = 2})) {
    expect_example(batch, {3, 3, 1, 1}, {30, 10});
  }
  auto stacked = make_data_loader(TenExamples().map(torch::data::transforms::Stack<>()),
                                  {.batch_size = 5, .num_workers = 2});
  EXPECT_EQ(stacked.size(), 2);
  std::int64_t first = 0;
  for (auto& batch : stacked) {
    EXPECT_EQ(numbers(batch.target), numbers(10 * torch::arange(first, first + 5)));
    first += 5;
  }
  for (auto& batch : make_data_loader(torch::data::datasets::TensorDataset(torch::arange(3)),
                                      {.batch_size = 3})) {
    EXPECT_EQ(numbers(batch.data), iota(3));
  }
}

/// Seven examples, as many at a time as asked for.
struct Stateful : torch::data::datasets::StatefulDataset<Stateful> {
  std::int64_t at = 0;
  std::optional<std::vector<Example>> get_batch(std::size_t count) override {
    std::vector<Example> some;
    for (; count > 0 && at < 7; --count) some.push_back(example(at++));
    if (some.empty()) return std::nullopt;
    return some;
  }
  std::optional<std::size_t> size() const override { return 7; }
  void reset() override { at = 0; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
};

TEST(TorchDatasets, CanBeStateful) {
  for (const std::int64_t workers : {0, 2}) {
    auto loader = make_data_loader(Stateful(), {.batch_size = 3, .num_workers = workers});
    EXPECT_EQ(loader.size(), 3);
    for (int pass = 0; pass < 2; ++pass) {
      Numbers seen;
      for (auto& batch : loader) {
        for (const auto target : numbers(batch.target)) seen.push_back(target / 10);
      }
      EXPECT_EQ(seen, iota(7));
    }
  }
  Numbers sizes;
  for (auto& batch :
       make_data_loader(Stateful().map(torch::data::transforms::Stack<>()), {.batch_size = 4})) {
    sizes.push_back(batch.data.size(0));
  }
  EXPECT_EQ(sizes, (Numbers{4, 3}));
}

/// Never ends by itself.
struct Stream : torch::data::datasets::StreamDataset<Stream> {
  std::vector<Example> get_batch(std::size_t count) override {
    return std::vector<Example>(count, example(1));
  }
  std::optional<std::size_t> size() const override { return 5; }
};

TEST(TorchDatasets, CanBeStreams) {
  Numbers sizes;
  for (auto& batch : make_data_loader(Stream(), {.batch_size = 2}))
    sizes.push_back(batch.data.size(0));
  EXPECT_EQ(sizes, (Numbers{2, 2, 1}));
}

struct ChunkReader : torch::data::datasets::ChunkDataReader<std::int64_t> {
  using BatchType = std::vector<std::int64_t>;
  using DataType = std::int64_t;
  std::vector<std::int64_t> read_chunk(std::size_t chunk) override {
    return {static_cast<std::int64_t>(2 * chunk), static_cast<std::int64_t>(2 * chunk + 1)};
  }
  std::size_t chunk_count() override { return 3; }
  void reset() override {}
};

TEST(TorchDatasets, CanBeReadInChunks) {
  using torch::data::samplers::SequentialSampler;
  using Chunks =
      torch::data::datasets::ChunkDataset<ChunkReader, SequentialSampler, SequentialSampler>;
  const auto chunks = torch::data::datasets::make_shared_dataset<Chunks>(
      ChunkReader(), SequentialSampler(0), SequentialSampler(0),
      torch::data::datasets::ChunkDatasetOptions(/*preloader_count=*/1, /*batch_size=*/3));
  const auto loader = make_data_loader(chunks, {.batch_size = 3});
  EXPECT_EQ(batches(loader), (std::vector<Numbers>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(samples(loader), iota(6));
}

TEST(IterableData, ComesFromRangesGeneratorsAndObjects) {
  EXPECT_EQ(batches(make_data_loader(std::list<int>{1, 2, 3}, {.batch_size = 2})),
            (std::vector<Numbers>{{1, 2}, {3}}));

  std::int64_t next = 0;
  const auto count = [&next]() -> std::optional<std::int64_t> {
    if (next == 5) return std::nullopt;
    return next++;
  };
  const auto generated = make_data_loader(count, {.batch_size = 2, .drop_last = true});
  EXPECT_EQ(batches(generated), (std::vector<Numbers>{{0, 1}, {2, 3}}));
  EXPECT_EQ(message_of<StateError>([&] { (void)generated.size(); }),
            "This data loader has no length: its dataset or sampler does not say how many samples "
            "there are.");

  struct Countdown {
    std::int64_t left = 0;
    std::int64_t epoch = 0;
    void set_epoch(std::int64_t of_pass) { epoch = of_pass; }
    void reset() { left = 3; }
    std::optional<std::int64_t> next() {
      if (left == 0) return std::nullopt;
      return 10 * epoch + left--;
    }
  };
  const auto countdown = make_data_loader(Countdown(), {.batch_size = 2, .num_workers = 2});
  EXPECT_EQ(batches(countdown), (std::vector<Numbers>{{3, 2}, {1}}));
  EXPECT_EQ(batches(countdown), (std::vector<Numbers>{{13, 12}, {11}}));
}

TEST(IterableData, CannotBeShuffled) {
  EXPECT_EQ(message_of<ArgumentError>(
                [] { (void)make_data_loader(std::list<int>{1}, {.shuffle = true}); }),
            "shuffle is set for an iterable dataset, which comes in its own order. Shuffle in the "
            "dataset, or make it one with samples by index.");
}

/// What each of `processes` gets of 0, 1, ..., size - 1.
std::vector<Numbers> shares(std::int64_t size, const DataLoaderOptions& options,
                            const detail::data::StreamShard& shard) {
  const auto order = test::iota(size);
  const auto loader =
      make_data_loader(std::list<std::int64_t>(order.begin(), order.end()), options);
  const auto stream = loader._core()->recipe()->stream->begin(shard, 0);
  std::vector<Numbers> result;
  while (auto load = stream->next()) {
    const auto batch = load->make(load->indices, {});
    result.push_back(numbers(batch.as<at::Tensor>()));
    EXPECT_EQ(result.back(), load->indices);  // here a sample is its position
  }
  return result;
}

TEST(IterableData, IsDealtOutAsPythonsIterableDatasetShardDoes) {
  using Shares = std::vector<Numbers>;
  EXPECT_EQ(shares(7, {.batch_size = 2}, {2, 0}), (Shares{{0, 1}, {4, 5}}));
  EXPECT_EQ(shares(7, {.batch_size = 2}, {2, 1}), (Shares{{2, 3}, {6, 0}}));
  EXPECT_EQ(shares(7, {.batch_size = 2, .drop_last = true}, {2, 1}), (Shares{{2, 3}}));
  EXPECT_EQ(shares(1, {.batch_size = 3}, {2, 0}), (Shares{{0, 0, 0}}));
  EXPECT_EQ(shares(1, {.batch_size = 3}, {2, 1}), (Shares{{0, 0, 0}}));
  EXPECT_EQ(shares(6, {.batch_size = 4}, {2, 1, true}), (Shares{{2, 3}, {0, 1}}));
  // What fills up after skipping is what would have filled up without.
  EXPECT_EQ(shares(7, {.batch_size = 2}, {2, 1, false, 4}), (Shares{{6, 0}}));
}

}  // namespace
}  // namespace accelerate
