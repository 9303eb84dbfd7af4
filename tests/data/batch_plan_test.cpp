#include "data/batch_plan.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ctime>
#include <functional>
#include <random>
#include <string>

#include "accelerate/data/sampler_adaptors.h"
#include "accelerate/errors.h"
#include "accelerate/samplers.h"
#include "data/index_reference.h"
#include "data/index_samplers.h"
#include "support/message_of.h"

namespace accelerate::detail::data {
namespace {

using test::BatchesOfSizes;
using test::GridSetting;
using test::message_of;
using test::rest_of;
using test::sequential_batches;
using test::SizedBatchesOfSizes;
using BatchSamplerPtr = std::shared_ptr<BatchIndexSampler>;

/// As a prepared loader asks: one process alone takes the batch sampler as it is.
PlanOptions plan_options(const GridSetting& setting, int process = 0) {
  if (setting.num_processes == 1) return {};
  return {.num_processes = setting.num_processes,
          .process_index = process,
          .split_batches = setting.split_batches,
          .even_batches = setting.even_batches};
}

bool accepted(const GridSetting& setting) {
  return !setting.split_batches || setting.batch_size % setting.num_processes == 0;
}

/// Every setting of the grid that can be planned.
std::vector<GridSetting> settings() {
  std::vector<GridSetting> all;
  for (std::int64_t batch_size = 1; batch_size <= 8; ++batch_size) {
    for (int processes = 1; processes <= 5; ++processes) {
      for (int flags = 0; flags < 8; ++flags) {
        const GridSetting setting{batch_size, processes, (flags & 1) != 0, (flags & 2) != 0,
                                  (flags & 4) != 0};
        if (accepted(setting)) all.push_back(setting);
      }
    }
  }
  return all;
}

/// What all processes get, the way they see it when they gather: round by round, and of the last
/// round the genuine samples.
struct Walked {
  IndexBatch gathered;
  std::int64_t remainder = -1;
  std::int64_t padded_size = -1;
  std::int64_t last_round = -1;  // samples that the processes hold in it
  std::vector<std::vector<PlannedBatch>> processes;
};

Walked walk(const BatchSamplerPtr& batches, PlanOptions options, const PlanPosition& from = {}) {
  Walked walked;
  std::size_t rounds = 0;
  for (int process = 0; process < options.num_processes; ++process) {
    options.process_index = process;
    BatchPlan plan(batches, options, /*epoch=*/0, from);
    walked.processes.push_back(rest_of(plan));
    walked.remainder = plan.remainder();
    walked.padded_size = plan.padded_size();
    rounds = std::max(rounds, walked.processes.back().size());
  }
  for (std::size_t round = 0; round < rounds; ++round) {
    const auto before = walked.gathered.size();
    for (const auto& planned : walked.processes) {
      if (round >= planned.size()) continue;
      const auto& indices = planned[round].indices;
      walked.gathered.insert(walked.gathered.end(), indices.begin(), indices.end());
    }
    if (round + 1 < rounds) continue;
    walked.last_round = static_cast<std::int64_t>(walked.gathered.size() - before);
    if (walked.remainder > 0) {
      walked.gathered.resize(before + static_cast<std::size_t>(walked.remainder));
    }
  }
  return walked;
}

std::vector<IndexBatch> indices_of(const std::vector<PlannedBatch>& planned) {
  std::vector<IndexBatch> indices;
  for (const auto& batch : planned) indices.push_back(batch.indices);
  return indices;
}

void expect_equal(const std::vector<PlannedBatch>& found, std::span<const PlannedBatch> expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].indices, expected[i].indices);
    ASSERT_EQ(found[i].facts.last, expected[i].facts.last);
    ASSERT_EQ(found[i].facts.samples_after, expected[i].facts.samples_after);
    ASSERT_EQ(found[i].facts.batches_after, expected[i].facts.batches_after);
  }
}

TEST(BatchPlan, CountsPythonsRemainderInEveryCase) {
  for (const auto& [setting, entries] : test::read_grid("remainder.txt", test::EvenColumn::kYes)) {
    EXPECT_EQ(entries.empty(), !accepted(setting));
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto length = static_cast<std::int64_t>(i);
      const auto batches = sequential_batches(length, setting.batch_size, setting.drop_last);
      BatchPlan plan(batches, plan_options(setting), 0);
      std::string found = "none";
      while (const auto planned = plan.next()) {
        if (planned->facts.last) found = std::to_string(plan.remainder());
      }
      ASSERT_EQ(found, entries[i]) << to_text(length, setting);
    }
  }
}

TEST(BatchPlan, SaysWhichBatchIsTheLastAndHowFarEveryoneIs) {
  for (const auto& setting : settings()) {
    for (std::int64_t length = 0; length <= 60; ++length) {
      const auto batches = sequential_batches(length, setting.batch_size, setting.drop_last);
      const auto walked = walk(batches, plan_options(setting));
      SCOPED_TRACE(to_text(length, setting));
      for (const auto& planned : walked.processes) {
        for (std::size_t i = 0; i < planned.size(); ++i) {
          ASSERT_EQ(planned[i].facts.last, i + 1 == planned.size());
          ASSERT_EQ(planned[i].facts.samples_after, walked.processes[0][i].facts.samples_after);
          ASSERT_EQ(planned[i].facts.batches_after, walked.processes[0][i].facts.batches_after);
        }
      }
      const auto& first = walked.processes[0];
      const auto handed_out = first.empty() ? 0 : first.back().facts.samples_after;
      if (!setting.drop_last) {
        ASSERT_EQ(handed_out, length);
        ASSERT_EQ(walked.padded_size, walked.last_round);
      }
      ASSERT_EQ(walked.gathered, test::iota(handed_out));
    }
  }
}

TEST(BatchPlan, SkippingIsDroppingFromTheFrontInEveryCase) {
  for (const auto& setting : settings()) {
    for (std::int64_t length = 0; length <= 60; ++length) {
      const auto batches = sequential_batches(length, setting.batch_size, setting.drop_last);
      const auto walked = walk(batches, plan_options(setting));
      SCOPED_TRACE(to_text(length, setting));
      for (int process = 0; process < setting.num_processes; ++process) {
        const auto& planned = walked.processes[static_cast<std::size_t>(process)];
        for (std::size_t skip = 0; skip <= planned.size() + 1; ++skip) {
          BatchPlan plan(batches, plan_options(setting, process), 0);
          plan.skip(static_cast<std::int64_t>(skip));
          expect_equal(rest_of(plan), std::span(planned).subspan(std::min(skip, planned.size())));
          if (HasFatalFailure()) return;
          if (skip < planned.size()) {
            ASSERT_EQ(plan.remainder(), walked.remainder);
          }
        }
      }
    }
  }
}

TEST(BatchPlan, SkipsAgainWhereItStands) {
  const auto batches = sequential_batches(60, 2);
  const PlanOptions options{.num_processes = 2, .process_index = 1, .even_batches = true};
  BatchPlan whole(batches, options, 0);
  const auto all = rest_of(whole);
  BatchPlan plan(batches, options, 0);
  plan.skip(2);
  EXPECT_EQ(plan.next()->indices, all[2].indices);
  plan.skip(3);
  plan.skip(0);
  plan.skip(1);
  expect_equal(rest_of(plan), std::span(all).subspan(7));
}

/// Goes on from every position of a walk with 1 to 5 processes: what comes is what is left.
void expect_continued(const BatchSamplerPtr& batches, const GridSetting& setting,
                      const Walked& walked, const IndexBatch& order,
                      const at::Tensor& generator_state = {}) {
  for (const auto& held : walked.processes[0]) {
    if (held.facts.last) continue;
    for (int processes = 1; processes <= 5; ++processes) {
      GridSetting other = setting;
      other.num_processes = processes;
      if (!accepted(other)) continue;
      const PlanPosition from{held.facts.samples_after, held.facts.batches_after, generator_state};
      const auto rest = walk(batches, plan_options(other), from);
      const auto round = other.batch_size * (other.split_batches ? 1 : processes);
      auto left = std::ssize(order) - from.samples;
      if (setting.drop_last) left -= left % round;
      const auto begin = order.begin() + from.samples;
      ASSERT_EQ(rest.gathered, IndexBatch(begin, begin + left))
          << from.samples << " samples, then " << processes << " processes";
    }
  }
}

TEST(BatchPlan, GoesOnWithAnotherNumberOfProcessesInEveryCase) {
  for (const auto& setting : settings()) {
    for (std::int64_t length = 0; length <= 60; ++length) {
      SCOPED_TRACE(to_text(length, setting));
      const auto batches = sequential_batches(length, setting.batch_size, setting.drop_last);
      const auto walked = walk(batches, plan_options(setting));
      expect_continued(batches, setting, walked, test::iota(length));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(BatchPlan, GoesOnAtTheSameNumberOfProcessesAsIfNothingHadHappened) {
  for (const auto& setting : settings()) {
    for (const std::int64_t length : {1, 23, 38, 59, 60}) {
      SCOPED_TRACE(to_text(length, setting));
      const auto batches = sequential_batches(length, setting.batch_size, setting.drop_last);
      const auto walked = walk(batches, plan_options(setting));
      for (std::size_t i = 0; i + 1 < walked.processes[0].size(); ++i) {
        const auto& held = walked.processes[0][i];
        const auto rest =
            walk(batches, plan_options(setting),
                 {.samples = held.facts.samples_after, .batches = held.facts.batches_after});
        ASSERT_EQ(rest.remainder, walked.remainder);
        for (std::size_t process = 0; process < rest.processes.size(); ++process) {
          const std::span<const PlannedBatch> whole = walked.processes[process];
          expect_equal(rest.processes[process], whole.subspan(std::min(i + 1, whole.size())));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(BatchPlan, GoesOnAtTheSampleWhenTheBatchSizeHasChanged) {
  BatchPlan before(sequential_batches(30, 4), {.num_processes = 2, .even_batches = true}, 0);
  const auto held = *before.next();
  const PlanPosition from{held.facts.samples_after, held.facts.batches_after};
  for (std::int64_t batch_size = 1; batch_size <= 12; ++batch_size) {
    const auto rest =
        walk(sequential_batches(30, batch_size), {.num_processes = 3, .even_batches = true}, from);
    auto expected = test::iota(30);
    expected.erase(expected.begin(), expected.begin() + 8);
    EXPECT_EQ(rest.gathered, expected) << batch_size;
  }
}

TEST(BatchPlan, GoesOnInARandomOrderFromTheStateOfItsGenerator) {
  const auto own = [] { return at::make_generator<at::CPUGeneratorImpl>(3); };
  using R = RandomSamplerOptions;
  const std::vector<std::function<std::shared_ptr<Sampler>()>> makers{
      [] { return std::make_shared<RandomSampler>(43); },
      [=] { return std::make_shared<RandomSampler>(43, R{.generator = own()}); },
      [=] { return std::make_shared<RandomSampler>(10, R{.num_samples = 43, .generator = own()}); },
      [=] {
        return std::make_shared<RandomSampler>(
            10, R{.replacement = true, .num_samples = 43, .generator = own()});
      },
      [] { return std::make_shared<SeedableRandomSampler>(43); },
      [] { return std::make_shared<SubsetRandomSampler>(test::iota(43)); },
      [] { return std::make_shared<WeightedRandomSampler>(std::vector<double>(9, 1.0), 43); },
      [] { return as_sampler(torch::data::samplers::RandomSampler(43)); },
      [] { return as_sampler(test::StridingSampler(43)); }};
  for (std::size_t i = 0; i < makers.size(); ++i) {
    SCOPED_TRACE(i);
    const GridSetting setting{4, 1, false, false, true};
    torch::manual_seed(1);
    const auto batches = std::make_shared<BatchSampler>(makers[i](), 4, false);
    BatchPlan plan(batches, {}, 0);
    Walked walked;
    walked.processes.push_back(rest_of(plan));
    for (const auto& planned : walked.processes[0]) {
      walked.gathered.insert(walked.gathered.end(), planned.indices.begin(), planned.indices.end());
    }
    ASSERT_EQ(walked.gathered.size(), 43u);

    torch::manual_seed(2);
    const auto anew = std::make_shared<BatchSampler>(makers[i](), 4, false);
    expect_continued(anew, setting, walked, walked.gathered, plan.generator_state());
  }
}

TEST(BatchPlan, LeavesAGeneratorWhereAnUninterruptedPassLeavesIt) {
  const auto make = [](at::Generator generator) {
    return std::make_shared<BatchSampler>(
        std::make_shared<RandomSampler>(20, RandomSamplerOptions{.generator = generator}), 3,
        false);
  };
  const auto whole_generator = at::make_generator<at::CPUGeneratorImpl>(3);
  BatchPlan whole(make(whole_generator), {}, 0);
  const auto first = *whole.next();
  std::ignore = rest_of(whole);

  // The first round of eight processes is the last one too: it is read before the plan goes to its
  // position.
  for (const int processes : {1, 5, 8}) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(4);
    BatchPlan resumed(
        make(generator), {.num_processes = processes, .even_batches = true}, 0,
        {first.facts.samples_after, first.facts.batches_after, whole.generator_state()});
    std::ignore = rest_of(resumed);
    EXPECT_TRUE(torch::equal(generator.get_state(), whole_generator.get_state())) << processes;
  }
}

TEST(BatchPlan, GoesOnAtTheBatchWithABatchSamplerOfTheUser) {
  const auto batches = as_batch_sampler(SizedBatchesOfSizes({4, 3, 4, 2, 4, 4, 1, 4, 2}, 4));
  BatchPlan plan(batches, {.num_processes = 2, .even_batches = true}, 0);
  const auto held = *plan.next();
  EXPECT_EQ(held.facts.samples_after, 7);
  EXPECT_EQ(held.facts.batches_after, 2);
  const auto rest = walk(batches, {.num_processes = 3, .even_batches = true},
                         {held.facts.samples_after, held.facts.batches_after});
  auto expected = test::iota(28);
  expected.erase(expected.begin(), expected.begin() + 7);
  EXPECT_EQ(rest.gathered, expected);
}

/// A sequence that counts how often it is asked for indices.
class CountingSampler : public Sampler {
 public:
  explicit CountingSampler(std::int64_t size) : size_(size) {}

  std::unique_ptr<IndexStream> begin(std::int64_t /*epoch*/, const at::Tensor&) override {
    struct Stream final : IndexStream {
      Stream(std::unique_ptr<IndexStream> all, std::int64_t& taken)
          : all(std::move(all)), taken(taken) {}
      std::size_t take(std::span<std::int64_t> out) override {
        taken += std::ssize(out);
        return all->take(out);
      }
      std::int64_t skip(std::int64_t count) override { return all->skip(count); }
      void rewind() override { all->rewind(); }
      std::unique_ptr<IndexStream> all;
      std::int64_t& taken;
    };
    return std::make_unique<Stream>(SequentialSampler(size_).begin(0), taken);
  }
  std::optional<std::int64_t> size() const override { return size_; }

  std::int64_t taken = 0;

 private:
  std::int64_t size_;
};

TEST(BatchPlan, SeeksWithoutWalking) {
  const auto sampler = std::make_shared<CountingSampler>(std::int64_t{5} << 40);
  const auto batches = std::make_shared<BatchSampler>(sampler, 256, false);
  const PlanOptions options{.num_processes = 4, .process_index = 3, .even_batches = true};
  constexpr std::int64_t kBatch = 600'000;

  BatchPlan skipped(batches, options, 0);
  skipped.skip(kBatch);
  const auto found = *skipped.next();
  EXPECT_EQ(found.indices.front(), (kBatch * 4 + 3) * 256);
  EXPECT_EQ(found.facts.samples_after, (kBatch + 1) * 4 * 256);

  BatchPlan resumed(batches, options, 0, {.samples = kBatch * 4 * 256, .batches = kBatch * 4});
  EXPECT_EQ(resumed.next()->indices, found.indices);
  EXPECT_LT(sampler->taken, 10 * 4 * 256) << "a few rounds, whatever the distance";
}

/// Of this thread: others may take the processor meanwhile.
double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST(BatchPlan, SeeksInAPermutationInNoTime) {
  const auto batches =
      std::make_shared<BatchSampler>(std::make_shared<RandomSampler>(1'200'100), 2, false);
  BatchPlan plan(batches, {}, 0);
  const auto start = processor_seconds();
  plan.skip(600'000);
  EXPECT_LT(processor_seconds() - start, 0.010);
  EXPECT_EQ(rest_of(plan).size(), 50u);
}

TEST(BatchPlan, KeepsRoundsOfShortBatches) {
  // Upstream drops a round that ends in a short batch, and its processes fall out of step.
  const auto walked = walk(as_batch_sampler(SizedBatchesOfSizes({8, 8, 7, 7}, 8)),
                           {.num_processes = 2, .even_batches = true});
  for (const auto& planned : walked.processes) {
    ASSERT_EQ(planned.size(), 2u);
    EXPECT_EQ(planned[0].indices.size(), 8u);
    EXPECT_EQ(planned[1].indices.size(), 7u);
  }
  EXPECT_EQ(walked.remainder, 0);
  EXPECT_EQ(walked.gathered, test::iota(30));
}

TEST(BatchPlan, FillsALastRoundBehindItsGenuineSamples) {
  // The short batch is not the last one: gathered, the repeated sample is at the end nevertheless.
  const auto walked = walk(as_batch_sampler(SizedBatchesOfSizes({4, 4, 3, 4}, 4)),
                           {.num_processes = 2, .even_batches = true});
  EXPECT_EQ(indices_of(walked.processes[0]),
            (std::vector<IndexBatch>{{0, 1, 2, 3}, {8, 9, 10, 11}}));
  EXPECT_EQ(indices_of(walked.processes[1]),
            (std::vector<IndexBatch>{{4, 5, 6, 7}, {12, 13, 14, 0}}));
  EXPECT_EQ(walked.remainder, 7);
}

TEST(BatchPlan, SharesAShortBatchInMidStreamOut) {
  const auto batches = as_batch_sampler(SizedBatchesOfSizes({4, 3, 4, 1}, 4));
  for (const bool even : {false, true}) {
    const auto walked =
        walk(batches, {.num_processes = 2, .split_batches = true, .even_batches = even});
    EXPECT_EQ(walked.gathered, test::iota(12));
    EXPECT_EQ(walked.processes[0][1].indices, (IndexBatch{4, 5}));
    EXPECT_EQ(walked.processes[1][1].indices, (IndexBatch{6}));
    EXPECT_EQ(walked.remainder, 1);
  }
}

TEST(BatchPlan, LeavesNoProcessWithoutAPartInMidStream) {
  const auto batches = as_batch_sampler(SizedBatchesOfSizes({4, 1, 4}, 4));
  for (const bool even : {false, true}) {
    const auto walked =
        walk(batches, {.num_processes = 4, .split_batches = true, .even_batches = even});
    for (const auto& planned : walked.processes) EXPECT_EQ(planned.size(), 3u);
    EXPECT_EQ(walked.processes[0][1].indices, IndexBatch{4});
    EXPECT_EQ(walked.processes[3][1].indices, IndexBatch{2});
  }
}

TEST(BatchPlan, CountsTheRemainderOfWhatTheSamplerEmits) {
  // Seven of many samples: upstream would cut by the length of the dataset.
  const auto subset = std::make_shared<SubsetRandomSampler>(IndexBatch{5, 15, 25, 35, 45, 55, 65});
  const auto walked = walk(std::make_shared<BatchSampler>(subset, 2, false),
                           {.num_processes = 2, .even_batches = true});
  EXPECT_EQ(walked.remainder, 3);
}

TEST(BatchPlan, ReadsDropLastFromTheBatchSampler) {
  const std::vector<std::int64_t> sizes{4, 4, 4, 4, 4};
  const auto walked = walk(as_batch_sampler(SizedBatchesOfSizes(sizes, 4, /*drop_last=*/true)),
                           {.num_processes = 2, .even_batches = true});
  EXPECT_EQ(walked.remainder, -1);
  EXPECT_EQ(walked.gathered, test::iota(16));
}

TEST(BatchPlan, HandsOutABatchSamplerAsItIs) {
  // Nothing is dropped or filled for one process: what a sampler emits is what it means.
  const std::vector<std::int64_t> sizes{3, 1, 4, 2};
  for (const bool drop_last : {false, true}) {
    const auto batches = as_batch_sampler(SizedBatchesOfSizes(sizes, 4, drop_last));
    const auto emitted = test::batches_of(*batches);
    BatchPlan plan(batches, {}, 0);
    EXPECT_EQ(indices_of(rest_of(plan)), emitted);
    EXPECT_EQ(plan.size(), 4);
  }
}

TEST(BatchPlan, KnowsNoRemainderBeforeTheLastRound) {
  BatchPlan plan(sequential_batches(10, 2), {.num_processes = 2, .even_batches = true}, 0);
  EXPECT_EQ(plan.remainder(), -1);
  EXPECT_FALSE(plan.next()->facts.last);
  EXPECT_EQ(plan.remainder(), -1);
  EXPECT_FALSE(plan.next()->facts.last);
  EXPECT_TRUE(plan.next()->facts.last);
  EXPECT_EQ(plan.remainder(), 2);
  EXPECT_FALSE(plan.next());
}

TEST(BatchPlan, RefusesToRepeatAFewSamplesWithoutMeasure) {
  const auto batches =
      std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(10), 1'500'000'000, false);
  const auto text = message_of<ArgumentError>(
      [&] { (void)BatchPlan(batches, {.num_processes = 2, .even_batches = true}, 0).next(); });
  EXPECT_EQ(text,
            "batch_size asks for 1500000000 samples, but the data have only 10, which would be "
            "repeated 150000000 times so that all processes get full batches. Lower batch_size, or "
            "leave the last batch out (drop_last).");
}

TEST(BatchPlan, RefusesWhatCannotBePlanned) {
  EXPECT_THROW(BatchPlan(nullptr, {}, 0), ArgumentError);
  EXPECT_THROW(BatchPlan(sequential_batches(4, 3), {.num_processes = 2, .split_batches = true}, 0),
               ArgumentError);
}

TEST(BatchPlan, KeepsItsPromisesForBatchesOfAnySize) {
  std::mt19937 random(20240611);
  const auto draw = [&](int from, int to) {
    return std::uniform_int_distribution<int>(from, to)(random);
  };
  for (int run = 0; run < 20'000; ++run) {
    const int processes = draw(1, 5);
    const bool split = draw(0, 2) == 0;
    const bool sized = split || draw(0, 1) == 0;
    const bool drop_last = draw(0, 3) == 0;
    const int batch_size = processes * draw(1, 3);
    std::vector<std::int64_t> sizes;
    std::int64_t total = 0;
    for (int batches = draw(0, 20); batches > 0; --batches) {
      // A part that would be empty is filled up in mid-stream, which repeats samples.
      sizes.push_back(draw(split ? processes : 1, batch_size));
      total += sizes.back();
    }
    PlanOptions options{.num_processes = processes,
                        .split_batches = split,
                        .even_batches = processes > 1 && draw(0, 1) == 0};
    BatchSamplerPtr batches = as_batch_sampler(
        SizedBatchesOfSizes(sizes, static_cast<std::size_t>(batch_size), drop_last));
    if (!sized) batches = as_batch_sampler(BatchesOfSizes(sizes));
    const bool drops = sized && drop_last && processes > 1;

    const auto walked = walk(batches, options);
    SCOPED_TRACE(run);
    if (!drops) {
      ASSERT_EQ(std::ssize(walked.gathered), total);
    }
    if (!sized || !drop_last) {
      ASSERT_EQ(walked.padded_size, walked.last_round);
    }
    ASSERT_EQ(walked.gathered, test::iota(std::ssize(walked.gathered)));
    const auto rounds = walked.processes[0].size();
    for (const auto& planned : walked.processes) {
      if (options.even_batches || drops) {
        ASSERT_EQ(planned.size(), rounds);
      }
      ASSERT_LE(planned.size(), rounds);
      ASSERT_LE(rounds, planned.size() + 1);
    }
    if (rounds < 2) continue;
    const auto stop = static_cast<std::size_t>(draw(0, static_cast<int>(rounds) - 2));
    const auto& held = walked.processes[0][stop];
    const auto rest =
        walk(batches, options,
             {.samples = held.facts.samples_after, .batches = held.facts.batches_after});
    for (std::size_t process = 0; process < rest.processes.size(); ++process) {
      const std::span<const PlannedBatch> whole = walked.processes[process];
      expect_equal(rest.processes[process], whole.subspan(std::min(stop + 1, whole.size())));
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace accelerate::detail::data
