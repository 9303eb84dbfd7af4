// Loaders at the edges: streams that are taken up in the middle, loaders that were let go, settings
// that are refused.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "accelerate/memory.h"
#include "core/captured_log.h"
#include "data/sharing.h"
#include "support/message_of.h"

namespace accelerate::test {
namespace {

using Example = torch::data::Example<>;

/// Fourteen examples, as many at a time as asked for.
struct Stateful : torch::data::datasets::StatefulDataset<Stateful> {
  std::int64_t at = 0;
  std::optional<std::vector<Example>> get_batch(std::size_t count) override {
    std::vector<Example> some;
    for (; count > 0 && at < 14; --count, ++at) {
      some.emplace_back(torch::full({1}, at), torch::full({1}, at));
    }
    if (some.empty()) return std::nullopt;
    return some;
  }
  std::optional<std::size_t> size() const override { return 14; }
  void reset() override { at = 0; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
};

/// The dataset joins samples itself: the loader is given whole batches.
auto whole_batches() {
  return make_data_loader(Stateful().map(torch::data::transforms::Stack<>()), {.batch_size = 4});
}

Batches targets(const DataLoader<Example>& loader) {
  Batches result;
  for (auto& batch : loader) result.push_back(indices(batch.target));
  return result;
}

TEST(WholeBatches, AreSkippedOneByOne) {
  const auto all = targets(whole_batches());
  ASSERT_EQ(all, (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13}}));
  for (std::int64_t skipped = 0; skipped <= 4; ++skipped) {
    const auto loader = skip_first_batches(whole_batches(), skipped);
    EXPECT_EQ(targets(loader), Batches(all.begin() + skipped, all.end())) << skipped;
    EXPECT_EQ(loader.size(), 4 - skipped);
    EXPECT_EQ(targets(skip_first_batches(prepare_data_loader(whole_batches()), skipped)),
              Batches(all.begin() + skipped, all.end()));
  }
}

TEST(WholeBatches, AreResumedFromSamplesAndFromBatches) {
  const auto loader = whole_batches();
  auto at = loader.begin();
  ++at;
  const auto state = loader.state_dict();
  EXPECT_EQ(state.samples_yielded, 8);
  auto of_python = state;
  of_python.samples_yielded.reset();  // the form with workers
  for (const auto& saved : {state, of_python}) {
    auto other = whole_batches();
    other.load_state_dict(saved);
    EXPECT_EQ(targets(other), (Batches{{8, 9, 10, 11}, {12, 13}}));
  }
}

TEST(StateBetweenTwoPasses, IsFollowedByTheOrderOfTheSecond) {
  const auto shuffled = [] {
    return indexed(20, {.batch_size = 4,
                        .shuffle = true,
                        .generator = at::detail::createCPUGenerator(/*seed=*/3)});
  };
  const auto loader = shuffled();
  const auto first = batches(loader);
  const auto state = loader.state_dict();
  const auto second = batches(loader);
  EXPECT_NE(first, second);
  auto other = shuffled();
  other.load_state_dict(state);
  EXPECT_EQ(other.iteration(), 1);
  EXPECT_EQ(other.state_dict().generator.equal(state.generator), true);  // saved again at once
  EXPECT_EQ(batches(other), second);
  EXPECT_EQ(batches(other), batches(loader));
}

// --- streams that keep a state
// --------------------------------------------------------------------

/// Counts, can be taken up in the middle, and says how often it was asked.
class Resumable : public Counting {
 public:
  Resumable(std::int64_t size, std::shared_ptr<std::int64_t> reads)
      : Counting(size), size_(size), reads_(std::move(reads)) {}

  std::optional<std::int64_t> next() {
    ++*reads_;
    return Counting::next();
  }
  [[nodiscard]] Value state_dict() const { return Value::Dict{{"read", *reads_}}; }
  void load_state_dict(const Value& state) {
    Counting::reset();
    *reads_ = state.at("read").as_int();
    for (std::int64_t i = 0; i < *reads_; ++i) std::ignore = Counting::next();
  }
  void reset() {
    Counting::reset();
    *reads_ = 0;
  }

 private:
  std::int64_t size_;
  std::shared_ptr<std::int64_t> reads_;
};

TEST(StreamState, IsThatBehindTheBatchAndIsGoneOnFrom) {
  for (const std::int64_t workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 3, .num_workers = workers};
    const auto make = [&] {
      return prepare_data_loader(
          make_data_loader(Resumable(20, std::make_shared<std::int64_t>(0)), options));
    };
    const auto all = batches(make());
    for (std::int64_t held = 1; held < std::ssize(all); ++held) {
      const auto loader = make();
      auto at = loader.begin();
      for (std::int64_t i = 1; i < held; ++i) ++at;
      const auto dictionary = to_value(loader.state_dict());
      EXPECT_EQ(dictionary.at("dataset_state").at("read"), Value(3 * held));

      CapturedLog log;
      auto other = make();
      other.load_state_dict(from_value<DataLoaderState>(dictionary));
      EXPECT_EQ(batches(other), Batches(all.begin() + held, all.end())) << held;
      EXPECT_TRUE(log.messages().empty());  // nothing was read again
      EXPECT_EQ(batches(other), all);

      // Behind the batches that came after it too.
      auto again = make();
      again.load_state_dict(from_value<DataLoaderState>(dictionary));
      const auto next = again.begin();
      EXPECT_EQ(again.state_dict().sampler_batches, held + 1);
      EXPECT_EQ(again.state_dict().samples_yielded, std::min<std::int64_t>(20, 3 * held + 3));
    }
  }
}

TEST(StreamState, IsNotUsedWhereProcessesShareTheStream) {
  const auto make = [] {
    return make_data_loader(Resumable(7, std::make_shared<std::int64_t>(0)), {.batch_size = 2});
  };
  const auto single = make();
  const auto at = single.begin();
  auto second = prepare_data_loader(make(), {.num_processes = 2, .process_index = 1});
  second.load_state_dict(single.state_dict());
  EXPECT_EQ(batches(second), (Batches{{4, 5}, {1, 2}}));  // 6 and 0 are with the other one
}

TEST(DataLoaderState, HasNoSamplerStateWithoutAGenerator) {
  // torchdata insists on a sampler with a state where the key is there.
  const auto loader = indexed(6, {.batch_size = 2});
  const auto at = loader.begin();
  const auto dictionary = to_value(loader.state_dict());
  const auto& sampler = dictionary.at("_sampler_iter_state").as_dict();
  EXPECT_EQ(sampler.at("samples_yielded"), Value(2));
  EXPECT_FALSE(sampler.contains("sampler_iter_state"));
  auto other = indexed(6, {.batch_size = 2});
  other.load_state_dict(from_value<DataLoaderState>(dictionary));
  EXPECT_EQ(batches(other), (Batches{{2, 3}, {4, 5}}));
}

// --- loaders that were let go
// ---------------------------------------------------------------------

TEST(FreedLoader, SaysSo) {
  for (const bool prepared : {false, true}) {
    auto loader = indexed(6, {.batch_size = 2});
    if (prepared) loader = prepare_data_loader(loader);
    release_memory(loader);
    EXPECT_THROW(std::ignore = loader.size(), StateError);
    EXPECT_THROW(std::ignore = loader.begin(), StateError);
    EXPECT_THROW(std::ignore = loader.dataset_size(), StateError);
    EXPECT_THROW(std::ignore = loader.batch_size(), StateError);
    EXPECT_THROW(std::ignore = loader.options(), StateError);
    EXPECT_THROW(std::ignore = loader.state_dict(), StateError);
    EXPECT_THROW(std::ignore = loader.get_sampler(), StateError);
    EXPECT_THROW(loader.set_epoch(1), StateError);
    EXPECT_THROW(std::ignore = skip_first_batches(loader, 1), StateError);
    EXPECT_NE(message_of<StateError>([&] {
                std::ignore = prepare_data_loader(loader);
              }).find("has let go of its data"),
              std::string::npos);
    loader = indexed(6, {.batch_size = 3});
    EXPECT_EQ(loader.size(), 2);
  }
}

TEST(NullPointers, AreRefused) {
  EXPECT_THROW(std::ignore = make_data_loader(std::shared_ptr<at::Tensor>()), ArgumentError);
  EXPECT_THROW(std::ignore = make_data_loader(std::shared_ptr<Counting>()), ArgumentError);
  EXPECT_THROW(std::ignore = make_data_loader(
                   torch::arange(4), std::shared_ptr<torch::data::samplers::SequentialSampler>()),
               ArgumentError);
  EXPECT_THROW(std::ignore = make_data_loader(torch::arange(4), std::shared_ptr<BatchSampler>()),
               ArgumentError);
}

// --- settings
// -------------------------------------------------------------------------------------

TEST(PreparedLoader, RefusesAnEpochBelow0) {
  auto loader = prepare_data_loader(indexed(6, {}));
  EXPECT_EQ(message_of<ArgumentError>([&] { loader.set_epoch(-1); }),
            "The epoch is -1, but epochs count from 0.");
  EXPECT_EQ(loader.iteration(), 0);
}

TEST(PreparedLoader, RefusesAGpuThatIsNotThere) {
  const auto refusal = message_of<ArgumentError>([] {
    std::ignore = prepare_data_loader(indexed(6, {}),
                                      {.device = torch::Device("cuda:99"), .put_on_device = true});
  });
  EXPECT_TRUE(refusal.starts_with("Batches are to be put on cuda:99, but this process sees "))
      << refusal;
}

/// A batch sampler of the user's own, around a random sampler.
struct OwnBatches {
  std::shared_ptr<Sampler> inner = std::make_shared<RandomSampler>(4);
  int at = 0;
  void begin(std::int64_t) { at = 0; }
  std::optional<IndexBatch> next() {
    if (at == 2) return std::nullopt;
    return IndexBatch{at++};
  }
  [[nodiscard]] std::size_t size() const { return 2; }
  [[nodiscard]] std::shared_ptr<Sampler> sampler() const { return inner; }
};

TEST(PreparedLoader, LeavesABatchSamplerAloneWhoseSamplerCannotBeReplaced) {
  const auto loader =
      prepare_data_loader(make_data_loader(torch::arange(4), OwnBatches()),
                          {.num_processes = 2, .process_index = 1, .use_seedable_sampler = true});
  EXPECT_EQ(batches(loader), (Batches{{1}}));
}

TEST(IterableDatasetShard, RefusesAProcessThatThereIsNot) {
  const auto refusal = [](int num_processes, int process_index, bool split) {
    return message_of<ArgumentError>([&] {
      std::ignore = IterableDatasetShard(Counting(4), {.batch_size = 2,
                                                       .num_processes = num_processes,
                                                       .process_index = process_index,
                                                       .split_batches = split});
    });
  };
  for (const bool split : {false, true}) {
    EXPECT_TRUE(refusal(2, 5, split).starts_with("There is no process 5 of 2:"));
    EXPECT_TRUE(refusal(2, -1, split).starts_with("There is no process -1 of 2:"));
    EXPECT_TRUE(refusal(0, 0, split).starts_with("There is no process 0 of 0:"));
  }
}

/// Numbers from a generator of its own.
struct Drawing {
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>(5);
  int at = 0;
  void reset() { at = 0; }
  std::optional<std::int64_t> next() {
    if (at++ == 4) return std::nullopt;
    return torch::randint(1000, {1}, own, torch::kLong).item<std::int64_t>();
  }
  [[nodiscard]] at::Generator generator() const { return own; }
};

TEST(IterableDatasetShard, SeedsTheGeneratorOfTheDatasetByTheEpoch) {
  IterableDatasetShard shard{Drawing()};
  const auto pass = [&](std::int64_t epoch) {
    shard.set_epoch(epoch);
    shard.reset();
    IndexBatch numbers;
    while (const auto number = shard.next()) numbers.push_back(*number);
    return numbers;
  };
  const auto expected = [](std::uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    IndexBatch numbers;
    for (int i = 0; i < 4; ++i) {
      numbers.push_back(torch::randint(1000, {1}, generator, torch::kLong).item<std::int64_t>());
    }
    return numbers;
  };
  EXPECT_EQ(pass(0), expected(0));
  EXPECT_EQ(pass(3), expected(3));
  EXPECT_EQ(pass(0), expected(0));
}

}  // namespace
}  // namespace accelerate::test
