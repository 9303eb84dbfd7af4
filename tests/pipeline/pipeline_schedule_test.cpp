#include "accelerate/parallel/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "core/text.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
using enum PipelineSchedule;

std::string text_of(PipelineSchedule schedule, const PipelineShape& shape, std::int64_t rank) {
  return detail::join(pipeline_actions(schedule, shape, rank), " ");
}

/// Every shape of a small pipeline that the schedule can have.
std::vector<PipelineShape> shapes_of(PipelineSchedule schedule) {
  std::vector<PipelineShape> shapes;
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    for (const std::int64_t micro_batches : {1, 2, 3, 4, 8, 12}) {
      if (schedule != kInterleaved1F1B) {
        shapes.push_back({ranks, micro_batches, 1});
        continue;
      }
      if (micro_batches % ranks != 0) continue;
      for (const std::int64_t chunks : {1, 2, 3}) shapes.push_back({ranks, micro_batches, chunks});
    }
  }
  return shapes;
}

TEST(PipelineSchedule, RunsAllForwardsBeforeAllBackwardsWithGPipe) {
  EXPECT_EQ(text_of(kGPipe, {2, 3}, 0), "F0 F1 F2 B0 B1 B2");
  EXPECT_EQ(text_of(kGPipe, {2, 3}, 1), "F0 F1 F2 B0 B1 B2");
}

TEST(PipelineSchedule, AlternatesAfterAWarmUpWith1F1B) {
  EXPECT_EQ(text_of(k1F1B, {2, 3}, 0), "F0 F1 B0 F2 B1 B2");
  EXPECT_EQ(text_of(k1F1B, {2, 3}, 1), "F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(text_of(k1F1B, {4, 2}, 0), "F0 F1 B0 B1");
}

// The table of Megatron-LM's get_forward_backward_func for 2 ranks, 4 micro-batches, 2 chunks.
TEST(PipelineSchedule, PassesGroupsOfMicroBatchesThroughAllChunksWhenInterleaved) {
  EXPECT_EQ(text_of(kInterleaved1F1B, {2, 4, 2}, 0),
            "F0 F1 F0b F1b F2 B0b F3 B1b F2b B0 F3b B1 B2b B3b B2 B3");
  EXPECT_EQ(text_of(kInterleaved1F1B, {2, 4, 2}, 1),
            "F0 F1 F0b B0b F1b B1b F2 B0 F3 B1 F2b B2b F3b B3b B2 B3");
}

TEST(PipelineSchedule, HasTheBubbleOfTheory) {
  for (const auto schedule : {kGPipe, k1F1B, kInterleaved1F1B}) {
    for (const auto& shape : shapes_of(schedule)) {
      EXPECT_NEAR(simulate_pipeline(schedule, shape).bubble(), theoretical_bubble(shape), 1e-12)
          << schedule << " " << shape.ranks << " " << shape.micro_batches << " " << shape.chunks;
    }
  }
}

TEST(PipelineSchedule, LastsAsLongAsTheFormulaOfGPipe) {
  // (micro-batches + ranks - 1) times a forward and a backward.
  EXPECT_EQ(simulate_pipeline(kGPipe, {4, 8}).length, (8 + 3) * 3);
  EXPECT_EQ(simulate_pipeline(k1F1B, {4, 8}).length, (8 + 3) * 3);
}

TEST(PipelineSchedule, KeepsActivationsOfAsManyMicroBatchesAsStagesFollowWith1F1B) {
  const auto one = simulate_pipeline(k1F1B, {4, 8});
  const auto all = simulate_pipeline(kGPipe, {4, 8});
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(one.live_activations(rank), 4 - rank);
    EXPECT_EQ(all.live_activations(rank), 8);
  }
}

TEST(PipelineSchedule, DoesEachPieceOfWorkOnce) {
  for (const auto schedule : {kGPipe, k1F1B, kInterleaved1F1B}) {
    for (const auto& shape : shapes_of(schedule)) {
      for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
        const auto actions = pipeline_actions(schedule, shape, rank);
        EXPECT_EQ(static_cast<std::int64_t>(actions.size()),
                  2 * shape.micro_batches * shape.chunks);
        for (const auto& one : actions) EXPECT_EQ(std::ranges::count(actions, one), 1);
      }
    }
  }
}

TEST(PipelineSchedule, IsDrawnAsTextWithOneLinePerRank) {
  EXPECT_EQ(to_picture(simulate_pipeline(k1F1B, {2, 3})),
            "rank 0 | F0 F1 .  .  B0 == F2 B1 == .  B2 ==\n"
            "rank 1 | .  F0 B0 == F1 B1 == F2 B2 == .  .\n");
}

TEST(PipelineSchedule, IsDrawnWithABoxPerAction) {
  const auto svg = to_svg(simulate_pipeline(kInterleaved1F1B, {2, 2, 2}));
  std::size_t boxes = 0;
  for (auto at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) {
    ++boxes;
  }
  EXPECT_EQ(boxes, 2U * 2U * 2U * 2U);
  EXPECT_NE(svg.find(">B1b<"), std::string::npos);
}

TEST(PipelineSchedule, RefusesShapesThatItCannotHave) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)pipeline_actions(k1F1B, {2, 4, 2}, 0); }),
            "The schedule 1f1b has one stage per rank, but there are 2 chunks. Use "
            "interleaved_1f1b.");
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)pipeline_actions(kInterleaved1F1B, {2, 3, 2}, 0); }),
      "The schedule interleaved_1f1b needs a multiple of the ranks of the pipeline (2) as "
      "number of micro-batches, not 3.");
  EXPECT_THROW((void)pipeline_actions(kGPipe, {0, 1}, 0), ArgumentError);
  EXPECT_THROW((void)pipeline_actions(kGPipe, {2, 1}, 2), ArgumentError);
}

TEST(PipelineSchedule, HasSpellings) {
  EXPECT_EQ(to_string(k1F1B), "1f1b");
  EXPECT_EQ(from_string<PipelineSchedule>("GPipe"), kGPipe);
}

}  // namespace
}  // namespace accelerate
