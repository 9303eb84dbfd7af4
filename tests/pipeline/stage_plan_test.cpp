#include "pipeline/stage_plan.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/errors.h"
#include "accelerate/parallel.h"

namespace accelerate::detail::pipeline {
namespace {

TEST(BalancedCuts, MakeTheLargestStageSmall) {
  EXPECT_EQ(balanced_cuts({1, 1, 1, 1}, 2), (Cuts{2}));
  EXPECT_EQ(balanced_cuts({8, 1, 1, 1, 1}, 2), (Cuts{1}));
  EXPECT_EQ(balanced_cuts({1, 1, 1, 1, 8}, 2), (Cuts{4}));
  EXPECT_EQ(balanced_cuts({3, 1, 2, 2, 3, 1}, 3), (Cuts{2, 4}));
}

TEST(BalancedCuts, GiveEachStageALayer) {
  EXPECT_EQ(balanced_cuts({9, 0, 0}, 3), (Cuts{1, 2}));
  EXPECT_EQ(balanced_cuts({0, 0, 9}, 3), (Cuts{1, 2}));
  EXPECT_EQ(balanced_cuts({0, 0, 0, 0}, 4), (Cuts{1, 2, 3}));
  EXPECT_THROW((void)balanced_cuts({1, 1}, 3), ArgumentError);
}

TEST(BalancedCuts, AreTheLeftmostOfSeveral) { EXPECT_EQ(balanced_cuts({4, 1, 4}, 2), (Cuts{1})); }

// Against all ways to cut.
TEST(BalancedCuts, AreAsGoodAsTheBestOfAll) {
  torch::manual_seed(3);
  for (int round = 0; round < 200; ++round) {
    const auto numbers = torch::randint(0, 9, {6}, torch::kLong);
    const std::vector<std::int64_t> bytes(numbers.data_ptr<std::int64_t>(),
                                          numbers.data_ptr<std::int64_t>() + 6);
    const auto largest = [&](std::size_t first, std::size_t second) {
      std::int64_t most = 0;
      const std::size_t ends[] = {0, first, second, bytes.size()};
      for (int i = 0; i < 3; ++i) {
        std::int64_t sum = 0;
        for (auto k = ends[i]; k < ends[i + 1]; ++k) sum += bytes[k];
        most = std::max(most, sum);
      }
      return most;
    };
    auto best = largest(1, 2);
    for (std::size_t first = 1; first < 5; ++first) {
      for (auto second = first + 1; second < 6; ++second) {
        best = std::min(best, largest(first, second));
      }
    }
    const auto cuts = balanced_cuts(bytes, 3);
    ASSERT_EQ(cuts.size(), 2U);
    EXPECT_EQ(largest(cuts[0], cuts[1]), best);
  }
}

TEST(StagePlan, FindsTheStagesThatUseAParameter) {
  const auto tied = torch::nn::Linear(2, 2);
  const auto middle = torch::nn::Linear(2, 2);
  const auto same = [](const at::Tensor& x) { return x; };
  const std::vector<PipelineLayer> layers{pipeline_layer("first", {tied.ptr()}, same),
                                          pipeline_layer("middle", {middle.ptr()}, same),
                                          pipeline_layer("last", {tied.ptr()}, same)};
  const std::vector<std::string> split_points{"middle", "last"};

  const auto plan = make_plan(layers, split_points, {.ranks = 3}, /*rank=*/1);

  EXPECT_EQ(plan.holders(tied->weight), (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(plan.holders(middle->bias), (std::vector<std::int64_t>{1}));
  EXPECT_FALSE(plan.is_held(tied->weight));
  EXPECT_TRUE(plan.is_held(middle->weight));
}

}  // namespace
}  // namespace accelerate::detail::pipeline
