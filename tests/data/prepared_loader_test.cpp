#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "accelerate/kwargs.h"
#include "accelerate/state.h"
#include "core/captured_log.h"
#include "data/sharing.h"
#include "support/message_of.h"

namespace accelerate::test::prepared_loader_test {
namespace {

using LoaderMaker =
    std::function<DataLoader<at::Tensor>(std::int64_t size, const DataLoaderOptions& options)>;

/// The loaders that the processes of a run would have.
std::vector<DataLoader<at::Tensor>> all_shares(const std::function<DataLoader<at::Tensor>()>& make,
                                               int num_processes,
                                               PrepareDataLoaderOptions options = {}) {
  std::vector<DataLoader<at::Tensor>> loaders;
  for (int process = 0; process < num_processes; ++process) {
    options.num_processes = num_processes;
    options.process_index = process;
    loaders.push_back(prepare_data_loader(make(), options));
  }
  return loaders;
}

/// What is gathered from all processes in one pass, without repeated samples.
IndexBatch gathered(const std::vector<DataLoader<at::Tensor>>& loaders) {
  std::vector<Batches> all;
  std::int64_t remainder = 0;
  for (const auto& loader : loaders) {
    all.push_back({});
    for (auto& batch : loader) {
      all.back().push_back(indices(batch));
      if (loader.end_of_dataloader()) remainder = loader.remainder();
    }
  }
  IndexBatch result;
  for (std::size_t round = 0; round < all.front().size(); ++round) {
    IndexBatch together;
    for (const auto& batches : all) append(together, batches[round]);
    const bool last = round + 1 == all.front().size();
    if (last && remainder > 0) together.resize(static_cast<std::size_t>(remainder));
    append(result, together);
  }
  return result;
}

// --- against Python -----------------------------------------------------------------------------

TEST(PreparedLoader, GivesEachProcessTheBatchesOfPython) {
  int cases = 0;
  for (const auto& line : read_grid("shard.txt", EvenColumn::kYes)) {
    auto setting = line.setting;
    // A single process is not sharded: nothing is filled up there.
    if (setting.num_processes == 1 && setting.even_batches) continue;
    for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
      const auto make = [&] { return indexed(length, loader_options(setting)); };
      std::string text;
      for (const auto& loader : all_shares(make, setting.num_processes, prepare_options(setting))) {
        text += batches_text(batches(loader)) + "#" + std::to_string(loader.size()) + "|";
      }
      const auto& entry = line.entries[static_cast<std::size_t>(length)];
      ASSERT_TRUE(is_entry("shard.txt", length, setting, text, entry));
      ++cases;
    }
  }
  EXPECT_EQ(cases, 61 * (32 + 128 + 36));  // one process, whole batches, split batches
}

TEST(PreparedLoader, SharesOutAStreamAsPythonDoes) {
  int cases = 0;
  for (const auto& line : read_grid("iterable.txt", EvenColumn::kNo)) {
    const auto& setting = line.setting;
    for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
      const auto make = [&] { return counted(length, loader_options(setting)); };
      std::string text;
      for (const auto& loader : all_shares(make, setting.num_processes, prepare_options(setting))) {
        text += batches_text(batches(loader)) + "|";
      }
      const auto& entry = line.entries[static_cast<std::size_t>(length)];
      ASSERT_TRUE(is_entry("iterable.txt", length, setting, text, entry));
      ++cases;
    }
  }
  EXPECT_EQ(cases, 61 * (32 + 64 + 18));  // one process, whole batches, split batches
}

TEST(PreparedLoader, KnowsTheRemainderOfPythonWithTheLastBatch) {
  for (const auto& line : read_grid("remainder.txt", EvenColumn::kYes)) {
    const auto& setting = line.setting;
    for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
      auto options = prepare_options(setting);
      options.num_processes = setting.num_processes;
      options.process_index = 0;
      const auto loader = prepare_data_loader(indexed(length, loader_options(setting)), options);
      std::string seen = "none";
      for ([[maybe_unused]] auto& batch : loader) {
        EXPECT_EQ(seen, "none");
        if (loader.end_of_dataloader()) seen = std::to_string(loader.remainder());
      }
      ASSERT_EQ(seen, line.entries[static_cast<std::size_t>(length)]) << to_text(length, setting);
    }
  }
}

TEST(PreparedLoader, HasTheRemainderOfAStreamToo) {
  // Python says 0 here, and repeated samples stay in the metrics.
  for (const bool sized : {false, true}) {
    const auto make = [&] {
      const DataLoaderOptions options{.batch_size = 4};
      return sized ? make_data_loader(CountingWithSize(21), options) : counted(21, options);
    };
    EXPECT_EQ(gathered(all_shares(make, 2)), iota(21));
  }
}

TEST(PreparedLoader, ShufflesInTheOrderOfPythonsSeedableSampler) {
  const auto make = [] { return indexed(10, {.batch_size = 2, .shuffle = true}); };
  const auto loaders = all_shares(make, 2, {.use_seedable_sampler = true, .data_seed = 0});
  EXPECT_EQ(gathered(loaders), (IndexBatch{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  EXPECT_EQ(gathered(loaders), (IndexBatch{5, 6, 1, 2, 0, 8, 9, 3, 7, 4}));
  for (auto loader : loaders) loader.set_epoch(42);
  EXPECT_EQ(gathered(loaders), (IndexBatch{2, 6, 1, 8, 4, 5, 0, 9, 3, 7}));
}

TEST(PreparedLoader, CountsWhatASamplerEmitsAndNotTheDataset) {
  const auto make = [] {
    return make_data_loader(torch::arange(100), IndexBatch{7, 3, 5, 1, 9}, {.batch_size = 2});
  };
  EXPECT_EQ(gathered(all_shares(make, 2)), (IndexBatch{7, 3, 5, 1, 9}));
}

// --- decisions ----------------------------------------------------------------------------------

TEST(PreparedLoader, IsReturnedAsItIsWhenPreparedAgain) {
  const auto loader = prepare_data_loader(indexed(10, {.batch_size = 2}));
  EXPECT_EQ(prepare_data_loader(loader, {.split_batches = true})._core(), loader._core());
}

TEST(PreparedLoader, RefusesToSplitWhatTheProcessesCannotShare) {
  EXPECT_EQ(message_of<ArgumentError>([] {
              std::ignore = prepare_data_loader(
                  indexed(10, {.batch_size = 4}),
                  {.num_processes = 3, .process_index = 0, .split_batches = true});
            }),
            "To use a `DataLoader` in `split_batches` mode, the batch size (4) needs to be a round "
            "multiple of the number of processes (3).");
  EXPECT_NE(message_of<ArgumentError>([] {
              std::ignore = prepare_data_loader(
                  indexed(10, {.batch_size = std::nullopt}),
                  {.num_processes = 2, .process_index = 0, .split_batches = true});
            }).find("must have a `batch_size`"),
            std::string::npos);
}

TEST(PreparedLoader, DispatchesOnlyWhatIsPutOnADevice) {
  EXPECT_EQ(message_of<ArgumentError>([] {
              std::ignore = prepare_data_loader(indexed(10, {}), {.dispatch_batches = true});
            }),
            "Using `dispatch_batches=True` requires `put_on_device=True`.");
}

TEST(PreparedLoader, TakesRanksThatShareDataForOne) {
  const MeshLayout mesh({"dp_replicate", "dp_shard", "tp"}, {2, 2, 3});
  const auto loader =
      prepare_data_loader(indexed(40, {.batch_size = 5}),
                          {.num_processes = 12, .process_index = 7, .device_mesh = mesh});
  EXPECT_EQ(loader.total_batch_size(), 20);
  EXPECT_EQ(batches(loader), (Batches{{10, 11, 12, 13, 14}, {30, 31, 32, 33, 34}}));
}

TEST(PreparedLoader, FollowsADataLoaderConfiguration) {
  const auto options =
      accelerate::prepare_options(DataLoaderConfiguration{.split_batches = true,
                                                          .dispatch_batches = false,
                                                          .even_batches = false,
                                                          .use_seedable_sampler = true,
                                                          .data_seed = 7,
                                                          .non_blocking = true,
                                                          .use_stateful_dataloader = true,
                                                          .already_sharded = true});
  EXPECT_TRUE(options.split_batches && !*options.dispatch_batches && !options.even_batches);
  EXPECT_TRUE(options.use_seedable_sampler && options.non_blocking && options.already_sharded);
  EXPECT_TRUE(options.use_stateful_dataloader);
  EXPECT_EQ(options.data_seed, 7);
}

TEST(PreparedLoader, LeavesDataAloneThatAreShardedAlready) {
  const auto loader = prepare_data_loader(
      indexed(5, {.batch_size = 2}),
      {.num_processes = 2, .process_index = 1, .even_batches = false, .already_sharded = true});
  EXPECT_EQ(batches(loader), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(loader.remainder(), 0);
}

/// Eight numbers in four parts.
class InParts : public Counting {
 public:
  explicit InParts(std::int64_t size) : Counting(size), numbers_(size) {}
  [[nodiscard]] std::int64_t num_shards() const { return 4; }
  [[nodiscard]] InParts shard(std::int64_t count, std::int64_t index) const {
    return InParts(numbers_ / count + index);
  }

 private:
  std::int64_t numbers_;
};

TEST(PreparedLoader, LetsAStreamCutItself) {
  const auto loader = prepare_data_loader(make_data_loader(InParts(8), {.batch_size = 3}),
                                          {.num_processes = 4, .process_index = 3});
  EXPECT_EQ(batches(loader), (Batches{{0, 1, 2}, {3, 4}}));  // 8 / 4 + 3 numbers
  EXPECT_THROW(std::ignore = loader.size(), StateError);
}

TEST(PreparedLoader, TakesAnotherSampler) {
  auto loader =
      prepare_data_loader(indexed(6, {.batch_size = 2}), {.num_processes = 2, .process_index = 1});
  EXPECT_EQ(loader.get_sampler()->size(), 6);
  loader.set_sampler(std::make_shared<ListSampler>(IndexBatch{5, 4, 3, 2}));
  EXPECT_EQ(batches(loader), (Batches{{3, 2}}));
  EXPECT_THROW(counted(6, {}).set_sampler(std::make_shared<SequentialSampler>(6)), ArgumentError);
}

/// Eight numbers drawn from a generator of its own.
class Drawing {
 public:
  explicit Drawing(std::uint64_t seed)
      : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

  void reset() { at_ = 0; }
  std::optional<std::int64_t> next() {
    if (at_++ == 8) return std::nullopt;
    return torch::randint(1000, {1}, generator_, torch::kLong).item<std::int64_t>();
  }
  [[nodiscard]] at::Generator generator() const { return generator_; }

 private:
  at::Generator generator_;
  int at_ = 0;
};

TEST(PreparedLoader, DrawsOneStreamOnAllProcesses) {
  std::uint64_t seed = 0;
  const auto make = [&] { return make_data_loader(Drawing(++seed), {.batch_size = 2}); };
  const auto loaders = all_shares(make, 2);
  const auto whole = [](std::uint64_t epoch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(epoch);
    IndexBatch numbers;
    for (int i = 0; i < 8; ++i) {
      numbers.push_back(torch::randint(1000, {1}, generator, torch::kLong).item<std::int64_t>());
    }
    return numbers;
  };
  EXPECT_EQ(gathered(loaders), whole(0));  // the epoch is the seed, as in Python
  EXPECT_EQ(gathered(loaders), whole(1));
}

TEST(PreparedLoader, PutsBatchesOnTheDevice) {
  const auto loader = prepare_data_loader(
      make_data_loader(std::pair{torch::arange(4), torch::ones(4)}, {.batch_size = 2}),
      {.device = torch::kMeta, .put_on_device = true});
  for (auto& [x, y] : loader) {
    EXPECT_TRUE(x.is_meta());
    EXPECT_TRUE(y.is_meta());
  }
}

// A name for the place where batches are already: nothing moves.
TEST(PreparedLoader, CopiesNothingToTheCpu) {
  const auto own = torch::arange(4);
  const auto collate = [&](const std::vector<at::Tensor>&) { return own; };
  for (const char* name : {"cpu", "cpu:0"}) {
    const auto loader = prepare_data_loader(
        make_data_loader(std::vector<at::Tensor>{own, own}, {.batch_size = 2}, collate),
        {.device = torch::Device(name), .put_on_device = true});
    for (auto& batch : loader) EXPECT_TRUE(batch.is_alias_of(own)) << name;
  }
}

TEST(PreparedLoader, DispatchesToItselfWhenAlone) {
  const auto loader = prepare_data_loader(
      make_data_loader(std::vector<std::string>{"a", "b", "c"}, {.batch_size = 2}),
      {.put_on_device = true, .dispatch_batches = true});
  std::vector<std::vector<std::string>> seen;
  for (auto& batch : loader) seen.push_back(batch);
  EXPECT_EQ(seen, (std::vector<std::vector<std::string>>{{"a", "b"}, {"c"}}));
}

// --- the gradient state -------------------------------------------------------------------------

TEST(PreparedLoader, TellsTheGradientStateWhereItIs) {
  const GradientState state;
  const auto loader = prepare_data_loader(indexed(10, {.batch_size = 4}));
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<bool> ends;
    for ([[maybe_unused]] auto& batch : loader) {
      EXPECT_EQ(state.active_dataloader(), loader._core());
      ends.push_back(state.end_of_dataloader());
    }
    EXPECT_EQ(ends, (std::vector{false, false, true}));
    EXPECT_FALSE(state.in_dataloader());
  }
  EXPECT_EQ(loader.iteration(), 2);
}

TEST(PreparedLoader, LeavesTheGradientStateWithTheLoop) {
  const GradientState state;
  const auto loader = prepare_data_loader(indexed(10, {.batch_size = 4}));
  for ([[maybe_unused]] auto& batch : loader) break;
  EXPECT_FALSE(state.in_dataloader());
  EXPECT_THROW(for ([[maybe_unused]] auto& batch : loader) throw std::runtime_error("of the loop"),
               std::runtime_error);
  EXPECT_FALSE(state.in_dataloader());
  EXPECT_EQ(loader.iteration(), 0);  // the order of the epoch is repeated
}

TEST(PreparedLoader, Nests) {
  const GradientState state;
  const auto train = prepare_data_loader(indexed(4, {.batch_size = 2}));
  const auto validation = prepare_data_loader(indexed(3, {.batch_size = 3}));
  for ([[maybe_unused]] auto& batch : train) {
    const bool last = state.end_of_dataloader();
    for ([[maybe_unused]] auto& other : validation) {
      EXPECT_EQ(state.active_dataloader(), validation._core());
      EXPECT_TRUE(state.end_of_dataloader());
    }
    EXPECT_EQ(state.active_dataloader(), train._core());
    EXPECT_EQ(state.end_of_dataloader(), last);
  }
  EXPECT_EQ(state.dataloader_references().size(), 0U);
}

TEST(PreparedLoader, IsFreedWhenItsOwnersGo) {
  auto loader = std::make_optional(prepare_data_loader(indexed(4, {.batch_size = 2})));
  const std::weak_ptr<detail::data::LoaderCore> core = loader->_core();
  auto half = std::make_optional(loader->begin());
  loader.reset();
  half.reset();
  EXPECT_TRUE(core.expired());
  EXPECT_FALSE(GradientState().in_dataloader());
}

TEST(PreparedLoader, DoesNotCountAnEmptyPass) {
  const auto loader = prepare_data_loader(indexed(0, {.batch_size = 2}));
  EXPECT_TRUE(batches(loader).empty());
  EXPECT_EQ(loader.iteration(), 0);
  EXPECT_FALSE(GradientState().in_dataloader());
}

struct EpochLog {
  std::vector<std::int64_t> sampler;
  std::vector<std::int64_t> dataset;
};

struct EpochBatches {
  std::shared_ptr<EpochLog> log;
  std::size_t at = 0;
  void begin(std::int64_t epoch) {
    log->sampler.push_back(epoch);
    at = 0;
  }
  std::optional<IndexBatch> next() {
    if (at == 2) return std::nullopt;
    ++at;
    return IndexBatch{static_cast<std::int64_t>(at)};
  }
  [[nodiscard]] std::size_t size() const { return 2; }
};

struct EpochDataset {
  std::shared_ptr<EpochLog> log;
  [[nodiscard]] std::size_t size() const { return 3; }
  std::int64_t get(std::size_t index) { return static_cast<std::int64_t>(index); }
  void set_epoch(std::int64_t epoch) { log->dataset.push_back(epoch); }
};

TEST(PreparedLoader, TellsTheEpochToSamplersAndDataset) {
  const auto log = std::make_shared<EpochLog>();
  auto loader = prepare_data_loader(make_data_loader(EpochDataset{log}, EpochBatches{log}),
                                    {.num_processes = 2, .process_index = 0});
  std::ignore = batches(loader);
  loader.set_epoch(5);
  std::ignore = batches(skip_first_batches(loader));
  EXPECT_EQ(log->sampler, (std::vector<std::int64_t>{0, 5}));
  EXPECT_EQ(log->dataset, (std::vector<std::int64_t>{0, 5}));
}

// --- skipping -----------------------------------------------------------------------------------

TEST(SkipFirstBatches, LeavesOutWhatThisProcessWouldBeGiven) {
  const auto plain = indexed(16, {.batch_size = 4});
  EXPECT_EQ(batches(skip_first_batches(plain, 2)), (Batches{{8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(skip_first_batches(plain, 2).size(), 2);
  EXPECT_EQ(skip_first_batches(plain, 9).size(), 0);
  EXPECT_EQ(batches(plain).size(), 4U);  // as it was

  for (const LoaderMaker& make : {LoaderMaker(indexed), LoaderMaker(counted)}) {
    for (int process = 0; process < 2; ++process) {
      const auto loader = prepare_data_loader(make(21, {.batch_size = 4}),
                                              {.num_processes = 2, .process_index = process});
      const auto all = batches(loader);
      for (std::size_t skipped = 0; skipped <= all.size() + 1; ++skipped) {
        const Batches rest(all.begin() + static_cast<std::ptrdiff_t>(std::min(skipped, all.size())),
                           all.end());
        const auto skipping = skip_first_batches(loader, static_cast<std::int64_t>(skipped));
        EXPECT_EQ(batches(skipping), rest) << skipped << " of " << all.size();
        EXPECT_EQ(skipping.remainder(), rest.empty() ? -1 : 5);
      }
    }
  }
}

TEST(SkipFirstBatches, AddsUpAndKeepsTheEpoch) {
  auto loader = prepare_data_loader(indexed(12, {.batch_size = 2, .shuffle = true}),
                                    {.use_seedable_sampler = true, .data_seed = 3});
  loader.set_epoch(4);
  const auto all = batches(loader);
  loader.set_epoch(4);
  const auto skipping = skip_first_batches(skip_first_batches(loader, 2), 1);
  EXPECT_EQ(skipping.iteration(), 4);
  EXPECT_EQ(batches(skipping), Batches(all.begin() + 3, all.end()));
}

TEST(SkipFirstBatches, LoadsNothingToGetThere) {
  auto reads = std::make_shared<int>(0);
  const auto loader = make_data_loader(
      FunctionDataset(1000, [reads](std::int64_t i) { return ++*reads, i; }), {.batch_size = 10});
  EXPECT_EQ(batches(skip_first_batches(prepare_data_loader(loader), 99)).size(), 1U);
  EXPECT_EQ(*reads, 10);
}

TEST(SkipFirstBatches, RefusesANegativeNumber) {
  EXPECT_THROW(std::ignore = skip_first_batches(indexed(4, {}), -1), ArgumentError);
}

// --- position -----------------------------------------------------------------------------------

TEST(DataLoaderState, ResumesBehindTheBatchThatWasHeld) {
  for (const std::int64_t workers : {0, 1, 2, 8}) {
    for (const bool stream : {false, true}) {
      const auto make = [&] {
        const DataLoaderOptions options{.batch_size = 3, .num_workers = workers};
        return prepare_data_loader(stream ? counted(20, options) : indexed(20, options));
      };
      const auto all = batches(make());
      for (std::size_t held = 0; held < all.size(); ++held) {
        auto loader = make();
        auto at = loader.begin();
        for (std::size_t i = 0; i < held; ++i) ++at;
        const auto state = loader.state_dict();
        EXPECT_EQ(state.batches_yielded, static_cast<std::int64_t>(held) + 1);
        EXPECT_EQ(state.finished, held + 1 == all.size());

        auto other = make();
        other.load_state_dict(from_value<DataLoaderState>(to_value(state)));
        const auto rest = batches(other);
        const auto from = static_cast<std::ptrdiff_t>(held + 1 == all.size() ? 0 : held + 1);
        EXPECT_EQ(rest, Batches(all.begin() + from, all.end())) << workers << " " << held;
        EXPECT_EQ(other.iteration(), state.finished ? 2 : 1);
        EXPECT_EQ(batches(other), all);  // the next pass only
      }
    }
  }
}

TEST(DataLoaderState, ContinuesTheOrderWithAnotherNumberOfProcesses) {
  const auto make = [](bool shuffle, std::int64_t size) {
    return [=] {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
      return indexed(size, {.batch_size = 2, .shuffle = shuffle, .generator = generator});
    };
  };
  for (const bool shuffle : {false, true}) {
    for (const std::int64_t size : {24, 29}) {
      for (int before = 1; before <= 4; ++before) {
        const auto loaders = all_shares(make(shuffle, size), before);
        const auto order = gathered(all_shares(make(shuffle, size), 1));
        auto at = loaders.front().begin();
        for (auto state = loaders.front().state_dict(); !state.finished;
             ++at, state = loaders.front().state_dict()) {
          for (int after = 1; after <= 5; ++after) {
            auto others = all_shares(make(shuffle, size), after);
            for (auto& loader : others) loader.load_state_dict(state);
            EXPECT_EQ(gathered(others),
                      IndexBatch(order.begin() + *state.samples_yielded, order.end()))
                << before << " then " << after << " processes, " << size << " samples";
          }
        }
      }
    }
  }
}

TEST(DataLoaderState, ContinuesAStreamWithAnotherNumberOfProcesses) {
  int cases = 0;
  for (int before = 1; before <= 3; ++before) {
    const auto make = [] { return counted(29, {.batch_size = 2}); };
    const auto loaders = all_shares(make, before);
    auto at = loaders.front().begin();
    for (auto state = loaders.front().state_dict(); !state.finished;
         ++at, state = loaders.front().state_dict()) {
      for (int after = 1; after <= 4; ++after) {
        auto others = all_shares(make, after);
        for (auto& loader : others) loader.load_state_dict(state);
        const auto order = iota(29);
        EXPECT_EQ(gathered(others), IndexBatch(order.begin() + *state.samples_yielded, order.end()))
            << before << " then " << after;
        ++cases;
      }
    }
  }
  EXPECT_EQ(cases, 4 * (14 + 7 + 4));
}

TEST(DataLoaderState, RepeatsWhatBatchesDrew) {
  const auto make = [] {
    return make_data_loader(
        FunctionDataset(
            12, [](std::int64_t, at::Generator& generator) { return torch::rand({1}, generator); }),
        {.batch_size = 2, .num_workers = 2});
  };
  auto loader = make();
  auto at = loader.begin();
  ++at;
  const auto state = loader.state_dict();
  std::vector<at::Tensor> rest;
  for (++at; at != std::default_sentinel; ++at) rest.push_back(*at);

  auto other = make();
  other.load_state_dict(state);
  std::size_t i = 0;
  for (auto& batch : other) EXPECT_TRUE(torch::equal(batch, rest[i++]));
  EXPECT_EQ(i, rest.size());
}

TEST(DataLoaderState, IsFollowedByTheEpochThatWouldHaveFollowed) {
  const auto make = [](bool seedable) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    return prepare_data_loader(
        indexed(12, {.batch_size = 2, .shuffle = true, .generator = generator}),
        {.num_processes = 2, .process_index = 0, .use_seedable_sampler = seedable});
  };
  for (const bool seedable : {false, true}) {
    auto loader = make(seedable);
    DataLoaderState state;
    for ([[maybe_unused]] auto& batch : loader) {
      if (!loader.end_of_dataloader()) state = loader.state_dict();
    }
    const auto second = batches(loader);

    auto other = make(seedable);
    other.load_state_dict(state);
    EXPECT_EQ(batches(other).size(), 1U);
    EXPECT_EQ(batches(other), second) << (seedable ? "seedable" : "generator");
  }
}

TEST(DataLoaderState, OfALoaderThatSkipsIsThatOfTheWholePass) {
  const auto skipping = skip_first_batches(indexed(12, {.batch_size = 2}), 2);
  auto fresh = skip_first_batches(indexed(12, {.batch_size = 2}), 2);
  fresh.load_state_dict(skipping.state_dict());  // before any batch
  EXPECT_EQ(batches(fresh).front(), (IndexBatch{4, 5}));

  auto at = skipping.begin();
  ++at;
  EXPECT_EQ(skipping.state_dict().batches_yielded, 4);
  auto whole = indexed(12, {.batch_size = 2});
  for (auto loader : {whole, fresh}) {
    loader.load_state_dict(skipping.state_dict());
    EXPECT_EQ(batches(loader), (Batches{{8, 9}, {10, 11}}));
  }
}

TEST(PreparedLoader, CanBeLeftAndBegunAnewWithBatchesInFlight) {
  for (const bool stream : {false, true}) {
    const DataLoaderOptions options{.batch_size = 2, .num_workers = 2, .prefetch_factor = 3};
    const auto loader = prepare_data_loader(stream ? counted(40, options) : indexed(40, options),
                                            {.num_processes = 2, .process_index = 1});
    const auto all = batches(loader);
    for (std::int64_t held = 1; held < std::ssize(all); ++held) {
      Batches seen;
      for (auto& batch : loader) {
        seen.push_back(indices(batch));
        if (std::ssize(seen) == held) break;
      }
      EXPECT_EQ(seen, Batches(all.begin(), all.begin() + held));
      EXPECT_FALSE(GradientState().in_dataloader());
    }
    EXPECT_EQ(batches(loader), all);
    EXPECT_EQ(loader.iteration(), 2);
  }
}

TEST(DataLoaderState, IsThatOfTheEpochBeforeAnyBatch) {
  auto loader = indexed(4, {});
  loader.set_epoch(3);
  EXPECT_EQ(loader.state_dict().epoch, 3);
  EXPECT_EQ(loader.state_dict().samples_yielded, 0);
  for ([[maybe_unused]] auto& batch : loader) break;
  auto other = indexed(4, {});
  other.load_state_dict(loader.state_dict());
  EXPECT_EQ(other.state_dict().samples_yielded, 1);  // loaded, not begun
  EXPECT_EQ(other.iteration(), 3);
}

TEST(DataLoaderState, ReadsTheDictionaryOfPythonWithAndWithoutWorkers) {
  const auto generator = torch::arange(4, torch::kByte);
  const Value sampler =
      Value::Dict{{"samples_yielded", 6},
                  {"sampler_iter_state", Value::Dict{{"yielded", 6}, {"generator", generator}}}};
  for (const auto* key : {"_index_sampler_state", "_sampler_iter_state"}) {
    const auto state = from_value<DataLoaderState>(
        Value::Dict{{key, sampler}, {"_num_yielded", 3}, {"_iterator_finished", false}});
    EXPECT_EQ(state.batches_yielded, 3);
    EXPECT_EQ(state.samples_yielded, 6);
    EXPECT_TRUE(torch::equal(state.generator, generator));
    EXPECT_FALSE(state.epoch.has_value());
  }

  const auto workers = from_value<DataLoaderState>(
      Value::Dict{{"_snapshot", Value::Dict{{"_snapshot_step", 2}, {"_main_snapshot", nullptr}}},
                  {"_steps_since_snapshot", 1},
                  {"_iterator_finished", false}});
  EXPECT_EQ(workers.batches_yielded, 3);
  EXPECT_FALSE(workers.samples_yielded.has_value());
  auto loader =
      prepare_data_loader(indexed(20, {.batch_size = 2}), {.num_processes = 2, .process_index = 1});
  loader.load_state_dict(workers);
  EXPECT_EQ(batches(loader), (Batches{{14, 15}, {18, 19}}));

  EXPECT_EQ(from_value<DataLoaderState>(Value::Dict{}).batches_yielded, 0);
}

TEST(DataLoaderState, WritesTheKeysThatPythonReads) {
  auto loader = indexed(6, {.batch_size = 2, .shuffle = true});
  const auto at = loader.begin();
  const auto dict = to_value(loader.state_dict()).as_dict();
  for (const auto* key : {"_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded",
                          "_num_yielded", "_IterableDataset_len_called", "_shared_seed",
                          "fetcher_state", "dataset_state", "_iterator_finished"}) {
    EXPECT_TRUE(dict.contains(key)) << key;
  }
  EXPECT_EQ(dict.at("_sampler_iter_state").at("samples_yielded"), Value(2));
  EXPECT_TRUE(dict.at("_sampler_iter_state").at("sampler_iter_state").at("generator").is_tensor());
}

TEST(DataLoaderState, NamesTheKeyThatIsMissingOrWrong) {
  const auto refusal = [](Value::Dict dict) {
    return message_of<ArgumentError>(
        [&] { std::ignore = from_value<DataLoaderState>(Value(std::move(dict))); });
  };
  EXPECT_NE(refusal({{"_iterator_finished", true}}).find("lacks the key '_num_yielded'"),
            std::string::npos);
  EXPECT_NE(refusal({{"_snapshot", Value::Dict{{"_snapshot_step", 1}}}})
                .find("lacks the key '_steps_since_snapshot'"),
            std::string::npos);
  EXPECT_NE(refusal({{"_num_yielded", "three"}}).find("'three' under '_num_yielded'"),
            std::string::npos);
  EXPECT_NE(refusal({{"_num_yielded", -1}}).find("0 or more"), std::string::npos);
  EXPECT_THROW(indexed(4, {}).load_state_dict({.batches_yielded = -1}), ArgumentError);
}

TEST(IterableDatasetShard, TakesItsShareOfEachGroup) {
  const auto samples = [](std::int64_t size, const IterableDatasetShardOptions& options) {
    IterableDatasetShard shard(CountingWithSize(size), options);
    IndexBatch all;
    while (const auto sample = shard.next()) all.push_back(*sample);
    EXPECT_EQ(shard.size(), std::ssize(all));
    return all;
  };
  EXPECT_EQ(samples(7, {.batch_size = 2, .num_processes = 2, .process_index = 0}),
            (IndexBatch{0, 1, 4, 5}));
  EXPECT_EQ(samples(7, {.batch_size = 2, .num_processes = 2, .process_index = 1}),
            (IndexBatch{2, 3, 6, 0}));
  EXPECT_EQ(samples(7, {.batch_size = 2, .drop_last = true, .num_processes = 2}),
            (IndexBatch{0, 1}));
  EXPECT_EQ(samples(1, {.batch_size = 3, .num_processes = 2, .process_index = 1}),
            (IndexBatch{0, 0, 0}));
  EXPECT_THROW(IterableDatasetShard(Counting(4),
                                    {.batch_size = 3, .num_processes = 2, .split_batches = true}),
               ArgumentError);
}

}  // namespace
}  // namespace accelerate::test::prepared_loader_test
