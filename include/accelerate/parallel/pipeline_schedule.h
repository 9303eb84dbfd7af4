// accelerate/parallel/pipeline_schedule.h - in which order the ranks of a pipeline compute.
//
//     PipelineShape shape{.ranks = 2, .micro_batches = 3};
//     pipeline_actions(PipelineSchedule::k1F1B, shape, /*rank=*/0);    // F0 F1 B0 F2 B1 B2
//     auto timeline = simulate_pipeline(PipelineSchedule::k1F1B, shape);
//     std::cout << to_picture(timeline);
//     timeline.bubble();                                               // 0.25
//
// Pure arithmetic, without Torch. Part of accelerate/parallel.h.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"

namespace accelerate {

/// How forwards and backwards of micro-batches follow each other.
enum class PipelineSchedule : std::uint8_t {
  /// All forwards, then all backwards. Keeps the activations of all micro-batches.
  kGPipe,
  /// One forward, one backward: a rank keeps the activations of as many micro-batches as there are
  /// stages from it to the end.
  k1F1B,
  /// One forward, one backward, with several stages per rank: a smaller bubble, more messages.
  kInterleaved1F1B
};

namespace detail::inline core {
template <>
inline constexpr EnumTable kEnumTable<PipelineSchedule>{
    "PipelineSchedule", {"gpipe", "1f1b", "interleaved_1f1b"}, Spelling::kAnyCase};
}  // namespace detail::inline core

struct PipelineShape {
  std::int64_t ranks = 1;
  std::int64_t micro_batches = 1;
  /// Stages per rank. Chunk c of rank r is stage c * ranks + r.
  std::int64_t chunks = 1;

  [[nodiscard]] std::int64_t stages() const { return ranks * chunks; }
  bool operator==(const PipelineShape&) const = default;
};

/// One piece of work of a rank.
struct PipelineAction {
  bool is_forward = true;
  std::int64_t micro_batch = 0;
  std::int64_t chunk = 0;

  bool operator==(const PipelineAction&) const = default;
};
/// "F0", "B2"; of chunks after the first one "F0b".
ACCELERATE_API std::ostream& operator<<(std::ostream& out, const PipelineAction& action);

/// What a rank does in a training step, in order. Throws `ArgumentError` for a shape that the
/// schedule cannot have: sizes below 1, several chunks without `kInterleaved1F1B`, and with it a
/// number of micro-batches that is no multiple of the ranks.
[[nodiscard]] ACCELERATE_API std::vector<PipelineAction> pipeline_actions(
    PipelineSchedule schedule, const PipelineShape& shape, std::int64_t rank);

/// The part of a step in which a rank is idle, for stages that take equally long and messages that
/// take no time: (ranks - 1) / (chunks * micro_batches + ranks - 1).
[[nodiscard]] ACCELERATE_API double theoretical_bubble(const PipelineShape& shape);

/// How long a stage takes for a micro-batch, in any unit. With several chunks per rank each takes
/// its share of it.
struct PipelineCosts {
  std::int64_t forward = 1;
  std::int64_t backward = 2;
};

/// When each rank of a pipeline does what.
struct ACCELERATE_API PipelineTimeline {
  struct Entry {
    PipelineAction action;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool operator==(const Entry&) const = default;
  };
  PipelineShape shape = {};
  /// By rank, in order of time.
  std::vector<std::vector<Entry>> ranks = {};
  std::int64_t length = 0;

  /// The part of the time in which ranks are idle, over all ranks.
  [[nodiscard]] double bubble() const;
  /// For how many micro-batches, over its chunks, a rank keeps activations at the same time.
  [[nodiscard]] std::int64_t live_activations(std::int64_t rank) const;
};

/// Runs the schedule without a model: each action starts when its rank is free and what it needs
/// from the neighbouring stages is there. Throws `StateError` if ranks wait for each other forever.
[[nodiscard]] ACCELERATE_API PipelineTimeline simulate_pipeline(PipelineSchedule schedule,
                                                                const PipelineShape& shape,
                                                                const PipelineCosts& costs = {});

/// One line of text per rank, one cell per unit of time:
///
///     rank 0 | F0 F1 F2 .  .  B0 == B1 == B2 ==
///     rank 1 | .  F0 B0 == F1 B1 == F2 B2 == .
[[nodiscard]] ACCELERATE_API std::string to_picture(const PipelineTimeline& timeline);
/// The timeline as a drawing for web pages.
[[nodiscard]] ACCELERATE_API std::string to_svg(const PipelineTimeline& timeline);

}  // namespace accelerate
