// The simulated schedules send what the closed formulas say, and hide what can be hidden.
#include "tools/shard_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace accelerate::tools {
namespace {

constexpr double kParameters = 96e6;
constexpr std::int64_t kUnits = 12;

std::vector<std::int64_t> worlds() { return {8, 16, 32, 64, 128, 256, 512}; }

Setting of(Sharding sharding, std::int64_t ranks, std::int64_t micro_batches = 1) {
  return {.sharding = sharding,
          .shard_ranks = ranks,
          .micro_batches = micro_batches,
          .units = kUnits,
          .parameters = kParameters,
          .param_bytes = 2,
          .reduce_bytes = 4};
}

double kappa(std::int64_t ranks) {
  return static_cast<double>(ranks - 1) / static_cast<double>(ranks);
}

void expect(const Setting& setting, double bytes, std::int64_t calls) {
  const auto step = simulate(setting);
  EXPECT_NEAR(step.bytes_sent / bytes, 1, 1e-12) << setting.shard_ranks << " ranks";
  EXPECT_EQ(step.calls, calls) << setting.shard_ranks << " ranks";
}

TEST(ShardSchedule, SendsWhatTheFormulasSay) {
  for (const auto ranks : worlds()) {
    const double all = kappa(ranks) * kParameters;
    for (const std::int64_t a : {1, 3}) {
      const auto times = static_cast<double>(a);
      expect(of(Sharding::kNone, ranks, a), all * 2 * 4, kUnits);
      expect(of(Sharding::kOptimizer, ranks, a), all * (4 + 2), 2 * kUnits);
      expect(of(Sharding::kGradients, ranks, a), all * (times * 4 + 2), (a + 1) * kUnits);
      auto setting = of(Sharding::kParameters, ranks, a);
      expect(setting, all * (times * 2 * 2 + 4), (2 * a + 1) * kUnits);
      setting.accumulate_unsharded = false;
      expect(setting, all * times * (2 * 2 + 4), 3 * a * kUnits);
      setting.reshard = false;
      expect(setting, all * times * (2 + 4), 2 * a * kUnits);
    }
  }
}

TEST(ShardSchedule, GathersTheLastUnitsOnce) {
  auto setting = of(Sharding::kParameters, 64);
  setting.kept_units = 3;
  const double unit = kParameters / kUnits;
  expect(setting, kappa(64) * unit * (2 * kUnits * 2 - 3 * 2 + kUnits * 4), 3 * kUnits - 3);
}

TEST(ShardSchedule, ReducesShardsOverReplicas) {
  for (const auto ranks : worlds()) {
    auto setting = of(Sharding::kParameters, 8);
    setting.replicas = ranks / 8;
    const double over_replicas =
        setting.replicas == 1 ? 0 : 2 * kappa(setting.replicas) * kParameters / 8 * 4;
    const std::int64_t more = setting.replicas == 1 ? 0 : kUnits;
    expect(setting, kappa(8) * kParameters * (2 * 2 + 4) + over_replicas, 3 * kUnits + more);
  }
}

/// One second of compute per unit and pass, and gathers and reductions of `gather` and twice that.
Setting timed(double gather, std::int64_t prefetch) {
  auto setting = of(Sharding::kParameters, 8);
  setting.prefetch = prefetch;
  setting.shard_link.bytes_per_second = kappa(8) * kParameters / kUnits * 2 / gather;
  setting.forward_seconds = 1;
  setting.backward_seconds = 1;
  return setting;
}

TEST(ShardSchedule, PrefetchHidesAllButTheFirstGatherAndTheLastReduction) {
  // On demand each of the 24 gathers is waited for, and so is a reduction before each in backward.
  EXPECT_NEAR(simulate(timed(0.25, 0)).exposed_seconds, 24 * 0.25 + 11 * 0.5 + 0.5, 1e-9);
  // Ahead of time: the first gather, that of the first unit of backward, the last reduction.
  EXPECT_NEAR(simulate(timed(0.25, 1)).exposed_seconds, 0.25 + 0.25 + 0.5, 1e-9);
  auto kept = timed(0.25, 1);
  kept.kept_units = 1;
  EXPECT_NEAR(simulate(kept).exposed_seconds, 0.25 + 0.5, 1e-9);
}

TEST(ShardSchedule, ASlowLinkIsTheWholeStep) {
  const auto step = simulate(timed(10, 2));
  const double sent = 24 * 10 + 12 * 20;
  // The link rests while the last unit of forward is computed: backward begins with the same unit.
  EXPECT_NEAR(step.compute_seconds + step.exposed_seconds, sent + 1, 1e-9);
}

TEST(ShardSchedule, LatencyIsOfEachStepOfARing) {
  for (const auto ranks : worlds()) {
    auto setting = of(Sharding::kNone, ranks);
    setting.shard_link = {.bytes_per_second = 1e30, .latency_seconds = 1e-6};
    EXPECT_NEAR(simulate(setting).exposed_seconds,
                static_cast<double>(kUnits * 2 * (ranks - 1)) * 1e-6, 1e-12);
  }
}

TEST(ShardSchedule, MemoryIsThatOfTheStages) {
  const double unit = kParameters / kUnits;
  EXPECT_EQ(simulate(of(Sharding::kNone, 8)).memory_bytes, 16 * kParameters);
  EXPECT_EQ(simulate(of(Sharding::kOptimizer, 8)).memory_bytes, (4 + 12.0 / 8) * kParameters);
  EXPECT_EQ(simulate(of(Sharding::kGradients, 8)).memory_bytes, (2 + 14.0 / 8) * kParameters);
  EXPECT_EQ(simulate(of(Sharding::kParameters, 8)).memory_bytes,
            2 * kParameters + 2 * 2 * unit + 4 * unit);
  auto whole = of(Sharding::kParameters, 8, 4);
  whole.reshard = false;
  EXPECT_EQ(simulate(whole).memory_bytes, 2 * kParameters + 2 * kParameters + 4 * kParameters);
}

}  // namespace
}  // namespace accelerate::tools
