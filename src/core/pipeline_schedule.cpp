// The order of forwards and backwards in a pipeline, and what it costs.
#include "accelerate/parallel/pipeline_schedule.h"

#include <algorithm>
#include <optional>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {

using detail::str;

namespace {

void check(PipelineSchedule schedule, const PipelineShape& shape) {
  if (shape.ranks < 1 || shape.micro_batches < 1 || shape.chunks < 1) {
    throw ArgumentError(
        str("A pipeline has at least one rank, micro-batch and chunk, but this one "
            "has ",
            shape.ranks, ", ", shape.micro_batches, " and ", shape.chunks, "."));
  }
  if (schedule != PipelineSchedule::kInterleaved1F1B) {
    if (shape.chunks == 1) return;
    throw ArgumentError(str("The schedule ", schedule, " has one stage per rank, but there are ",
                            shape.chunks, " chunks. Use ", PipelineSchedule::kInterleaved1F1B,
                            "."));
  }
  if (shape.micro_batches % shape.ranks != 0) {
    throw ArgumentError(str("The schedule ", schedule,
                            " needs a multiple of the ranks of the pipeline (", shape.ranks,
                            ") as number of micro-batches, not ", shape.micro_batches, "."));
  }
}

/// Work number `k` of a rank in one direction: groups of as many micro-batches as there are ranks
/// pass through all chunks before the next group comes.
PipelineAction action(const PipelineShape& shape, std::int64_t k, bool is_forward) {
  const auto group = shape.ranks * shape.chunks;
  const auto in_group = k % group;
  const auto chunk = in_group / shape.ranks;
  return {.is_forward = is_forward,
          .micro_batch = k / group * shape.ranks + in_group % shape.ranks,
          .chunk = is_forward ? chunk : shape.chunks - 1 - chunk};
}

/// How many forwards a rank does before its first backward.
std::int64_t warm_up(PipelineSchedule schedule, const PipelineShape& shape, std::int64_t rank) {
  const auto all = shape.micro_batches * shape.chunks;
  if (schedule == PipelineSchedule::kGPipe) return all;
  const auto behind = shape.ranks - rank - 1;
  if (schedule == PipelineSchedule::k1F1B || shape.chunks == 1) return std::min(behind, all);
  return std::min(2 * behind + (shape.chunks - 1) * shape.ranks, all);
}

/// Carries the actions of all ranks out.
class Simulation {
 public:
  Simulation(PipelineSchedule schedule, const PipelineShape& shape, const PipelineCosts& costs)
      : costs_(costs), done_(static_cast<std::size_t>(2 * shape.stages() * shape.micro_batches)) {
    timeline_.shape = shape;
    timeline_.ranks.resize(static_cast<std::size_t>(shape.ranks));
    for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
      actions_.push_back(pipeline_actions(schedule, shape, rank));
    }
  }

  PipelineTimeline run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (std::int64_t rank = 0; rank < timeline_.shape.ranks; ++rank) {
        while (next(rank)) moved = true;
      }
    }
    for (std::size_t rank = 0; rank < actions_.size(); ++rank) {
      if (timeline_.ranks[rank].size() == actions_[rank].size()) continue;
      throw StateError(str("Rank ", rank, " of the pipeline waits forever in ",
                           actions_[rank][timeline_.ranks[rank].size()], "."));
    }
    return std::move(timeline_);
  }

 private:
  /// The time at which a stage is through with a micro-batch; nullopt before.
  std::optional<std::int64_t>& done(bool forward, std::int64_t stage, std::int64_t micro_batch) {
    const auto& shape = timeline_.shape;
    return done_[static_cast<std::size_t>(
        ((forward ? 0 : shape.stages()) + stage) * shape.micro_batches + micro_batch)];
  }

  /// Returns false if the next action of the rank has to wait, or there is none.
  bool next(std::int64_t rank) {
    auto& entries = timeline_.ranks[static_cast<std::size_t>(rank)];
    const auto& actions = actions_[static_cast<std::size_t>(rank)];
    if (entries.size() == actions.size()) return false;
    const auto& action = actions[entries.size()];
    const auto& shape = timeline_.shape;
    const auto stage = action.chunk * shape.ranks + rank;
    std::optional<std::int64_t> ready = 0;
    if (action.is_forward) {
      if (stage > 0) ready = done(true, stage - 1, action.micro_batch);
    } else {
      const bool is_last = stage == shape.stages() - 1;
      ready = done(is_last, is_last ? stage : stage + 1, action.micro_batch);
    }
    if (!ready) return false;
    const auto begin = std::max(*ready, entries.empty() ? 0 : entries.back().end);
    const auto end = begin + (action.is_forward ? costs_.forward : costs_.backward);
    entries.push_back({action, begin, end});
    done(action.is_forward, stage, action.micro_batch) = end;
    timeline_.length = std::max(timeline_.length, end);
    return true;
  }

  PipelineCosts costs_;
  PipelineTimeline timeline_ = {};
  std::vector<std::vector<PipelineAction>> actions_ = {};
  std::vector<std::optional<std::int64_t>> done_;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const PipelineAction& action) {
  out << (action.is_forward ? 'F' : 'B') << action.micro_batch;
  if (action.chunk > 0) out << static_cast<char>('a' + action.chunk % 26);
  return out;
}

std::vector<PipelineAction> pipeline_actions(PipelineSchedule schedule, const PipelineShape& shape,
                                             std::int64_t rank) {
  check(schedule, shape);
  if (rank < 0 || rank >= shape.ranks) {
    throw ArgumentError(str("Rank ", rank, " is not in a pipeline of ", shape.ranks, " ranks."));
  }
  const auto all = shape.micro_batches * shape.chunks;
  const auto ahead = warm_up(schedule, shape, rank);
  std::vector<PipelineAction> actions;
  for (std::int64_t k = 0; k < all + ahead; ++k) {
    if (k < all) actions.push_back(action(shape, k, /*is_forward=*/true));
    if (k >= ahead) actions.push_back(action(shape, k - ahead, /*is_forward=*/false));
  }
  return actions;
}

double theoretical_bubble(const PipelineShape& shape) {
  const auto idle = static_cast<double>(shape.ranks - 1);
  return idle / (static_cast<double>(shape.chunks * shape.micro_batches) + idle);
}

double PipelineTimeline::bubble() const {
  std::int64_t busy = 0;
  for (const auto& entries : ranks) {
    for (const auto& entry : entries) busy += entry.end - entry.begin;
  }
  return 1.0 - static_cast<double>(busy) / static_cast<double>(length * shape.ranks);
}

std::int64_t PipelineTimeline::live_activations(std::int64_t rank) const {
  std::int64_t live = 0;
  std::int64_t most = 0;
  for (const auto& entry : ranks.at(static_cast<std::size_t>(rank))) {
    live += entry.action.is_forward ? 1 : -1;
    most = std::max(most, live);
  }
  return most;
}

PipelineTimeline simulate_pipeline(PipelineSchedule schedule, const PipelineShape& shape,
                                   const PipelineCosts& costs) {
  if (costs.forward < 1 || costs.backward < 1) {
    throw ArgumentError(str("The costs of a pipeline are at least 1, not ", costs.forward,
                            " for a forward and ", costs.backward, " for a backward."));
  }
  return Simulation(schedule, shape, costs).run();
}

std::string to_picture(const PipelineTimeline& timeline) {
  std::size_t width = 2;
  for (const auto& entries : timeline.ranks) {
    for (const auto& entry : entries) width = std::max(width, str(entry.action).size());
  }
  std::string picture;
  for (std::size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    std::vector<std::string> cells(static_cast<std::size_t>(timeline.length), ".");
    for (const auto& entry : timeline.ranks[rank]) {
      for (auto time = entry.begin; time < entry.end; ++time) {
        cells[static_cast<std::size_t>(time)] =
            time == entry.begin ? str(entry.action) : std::string(width, '=');
      }
    }
    picture += str("rank ", rank, " |");
    for (auto& cell : cells) {
      cell.resize(width, ' ');
      picture += " " + cell;
    }
    picture.erase(picture.find_last_not_of(' ') + 1);
    picture += "\n";
  }
  return picture;
}

std::string to_svg(const PipelineTimeline& timeline) {
  constexpr std::int64_t kUnit = 26;
  constexpr std::int64_t kLine = 24;
  std::string svg =
      str("<svg xmlns=\"http://www.w3.org/2000/svg\" font-family=\"sans-serif\" font-size=\"11\" "
          "viewBox=\"0 0 ",
          timeline.length * kUnit, " ", timeline.shape.ranks * kLine, "\">\n");
  for (std::size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    const auto y = static_cast<std::int64_t>(rank) * kLine;
    for (const auto& entry : timeline.ranks[rank]) {
      const auto x = entry.begin * kUnit;
      svg += str("<rect x=\"", x, "\" y=\"", y, "\" width=\"",
                 (entry.end - entry.begin) * kUnit - 1, "\" height=\"", kLine - 2, "\" fill=\"",
                 entry.action.is_forward ? "#9ecae1" : "#a1d99b", "\"/><text x=\"", x + 4,
                 "\" y=\"", y + 15, "\">", entry.action, "</text>\n");
    }
  }
  return svg + "</svg>\n";
}

}  // namespace accelerate
