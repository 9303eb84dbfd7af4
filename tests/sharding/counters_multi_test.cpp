// What a step sends and holds: the table of docs/sharding.md.
#include <gtest/gtest.h>

#include "sharding/sharded_run.h"
#include "support/on_processes.h"

namespace accelerate {
namespace detail::sharding {

std::ostream& operator<<(std::ostream& out, const CallCount& count) {
  return out << count.calls << " calls, " << count.bytes << " bytes";
}

}  // namespace detail::sharding

namespace {

using detail::sharding::CallCount;
using test::RunOptions;
using test::sharded;
using test::ShardedRun;
using test::ShardLevel;

/// Bytes of the flat buffers of two processes: of the root and of a block.
struct Sizes {
  static std::int64_t padded(std::int64_t elements) {
    return 4 * 2 * ((elements + 127) / 128 * 64);
  }
  std::int64_t root = padded(2 * 64 * 64 + 2 * 64);
  std::int64_t block =
      padded(2 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 64 * 128 + 128 + 128 * 64 + 64);
};

/// What one step adds, after the orders are learned.
detail::sharding::ShardStats of_one_step(const RunOptions& options) {
  ShardedRun training(options);
  const auto step = [&](int number) {
    for (int batch = 0; batch < options.batches; ++batch) {
      (void)training.train(number, batch, batch + 1 == options.batches);
    }
    training.take_step();
  };
  for (int number = 0; number < 2; ++number) step(number);
  const auto before = training.engine->stats();
  step(2);
  auto stats = training.engine->stats();
  const auto subtract = [](CallCount& a, const CallCount& b) {
    a.calls -= b.calls;
    a.bytes -= b.bytes;
  };
  subtract(stats.all_gather, before.all_gather);
  subtract(stats.reduce_scatter, before.reduce_scatter);
  subtract(stats.all_reduce, before.all_reduce);
  subtract(stats.broadcast, before.broadcast);
  return stats;
}

TEST(ShardedCounters, LevelsWithWholeParametersReduceAndGatherEachUnitOnce) {
  on_processes(2, [] {
    const Sizes sizes;
    const auto all = sizes.root + 3 * sizes.block;
    for (const auto level : {ShardLevel::kOptimizer, ShardLevel::kGradients}) {
      auto spec = sharded(level);
      const auto stats = of_one_step({.spec = spec});
      EXPECT_EQ(stats.all_gather, (CallCount{4, all}));
      EXPECT_EQ(stats.reduce_scatter, (CallCount{4, all}));
      EXPECT_EQ(stats.all_reduce, CallCount());
      EXPECT_EQ(stats.peak_full_bytes, 0);
      spec.accumulate_unsharded = false;
      const int reduced = level == ShardLevel::kGradients ? 3 : 1;
      const auto accumulated = of_one_step({.spec = spec, .batches = 3});
      EXPECT_EQ(accumulated.reduce_scatter, (CallCount{4 * reduced, reduced * all}));
      EXPECT_EQ(accumulated.all_gather, (CallCount{4, all}));
    }
  });
}

TEST(ShardedCounters, ShardedParametersAreGatheredTwiceButForTheRootAndTheLastUnit) {
  on_processes(2, [] {
    const Sizes sizes;
    const auto all = sizes.root + 3 * sizes.block;
    for (const int prefetch : {0, 1, 2}) {
      auto spec = sharded(ShardLevel::kParameters, prefetch);
      const auto stats = of_one_step({.spec = spec});
      EXPECT_EQ(stats.all_gather, (CallCount{6, all + 2 * sizes.block}));
      EXPECT_EQ(stats.reduce_scatter, (CallCount{4, all}));
      EXPECT_EQ(stats.all_reduce, CallCount());
      EXPECT_EQ(stats.wasted_gathers, 0);
      EXPECT_EQ(stats.full_bytes, 0) << "all are released";
      EXPECT_LE(stats.peak_full_bytes, (1 + prefetch) * sizes.block + sizes.root);
      const auto accumulated = of_one_step({.spec = spec, .batches = 3});
      EXPECT_EQ(accumulated.all_gather.calls, 18);
      EXPECT_EQ(accumulated.reduce_scatter, (CallCount{4, all}));
      spec.accumulate_unsharded = false;
      EXPECT_EQ(of_one_step({.spec = spec, .batches = 3}).reduce_scatter, (CallCount{12, 3 * all}));
    }
    auto spec = sharded(ShardLevel::kParameters);
    spec.reshard_after_forward = false;
    const auto stats = of_one_step({.spec = spec});
    EXPECT_EQ(stats.all_gather, (CallCount{4, all})) << "kept from forward to backward";
    EXPECT_EQ(stats.peak_full_bytes, all);
  });
}

}  // namespace
}  // namespace accelerate
