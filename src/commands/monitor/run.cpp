// What is known of one run.
#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "commands/monitor/runs.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kMostPoints = 4'000'000;  // of a series
constexpr std::size_t kMostMetrics = 500;       // of a run
// Seconds. The recorder writes every other second.
constexpr double kSilence = 15;
constexpr double kRecent = 30;
// Ranks always differ a little.
constexpr double kNamedShare = 0.1;

double x_of(const Point& point, const CurveView& view) {
  return view.axis == Axis::kStep ? point.step : point.time - view.time_zero;
}

}  // namespace

double now_in_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string_view to_string(RunState state) {
  constexpr std::array<std::string_view, 4> kNames{"running", "finished", "failed", "silent"};
  return kNames.at(static_cast<std::size_t>(state));
}

void Series::add(const Point& point) {
  if (!std::isfinite(point.value)) {
    if (not_finite++ == 0) first_not_finite = point.step;
    return;
  }
  if (points.size() == kMostPoints) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < points.size(); i += 2) points[kept++] = points[i];
    points.resize(kept);
  }
  points.push_back(point);
}

std::optional<double> Series::mean_since(double time) const {
  double sum = 0;
  std::int64_t count = 0;
  for (auto point = points.rbegin(); point != points.rend() && point->time >= time; ++point) {
    sum += point->value;
    ++count;
  }
  if (count == 0) return std::nullopt;
  return sum / static_cast<double>(count);
}

std::optional<std::pair<double, double>> x_range(const std::vector<Point>& points,
                                                 const CurveView& view) {
  const auto x = [&](const Point& point) { return x_of(point, view); };
  const auto [least, most] = std::ranges::minmax_element(points, {}, x);
  if (least == points.end()) return std::nullopt;
  return std::pair(x(*least), x(*most));
}

std::vector<Bucket> curve_of(const std::vector<Point>& points, const CurveView& view) {
  auto [from, to] = std::pair(view.from, view.to);
  if (!(from < to)) {
    const auto range = x_range(points, view);
    if (!range) return {};
    std::tie(from, to) = *range;
  }
  struct Sums {
    Bucket bucket;
    std::int64_t count = 0;
  };
  const auto columns = std::clamp<std::size_t>(view.columns, 1, 5000);
  std::vector<Sums> sums(columns);
  const double scale = to > from ? static_cast<double>(columns) / (to - from) : 0;
  for (const auto& point : points) {
    const double x = x_of(point, view);
    if (x < from || x > to) continue;
    auto& [bucket, count] =
        sums[std::min(static_cast<std::size_t>((x - from) * scale), columns - 1)];
    bucket.low = count == 0 ? point.value : std::min(bucket.low, point.value);
    bucket.high = count == 0 ? point.value : std::max(bucket.high, point.value);
    ++count;
    bucket.mean += (point.value - bucket.mean) / static_cast<double>(count);
    bucket.x = x;  // the last one: a live curve ends at its last point
  }
  std::vector<Bucket> curve;
  for (const auto& [bucket, count] : sums) {
    if (count > 0) curve.push_back(bucket);
  }
  return curve;
}

std::string Run::name() const {
  std::vector<std::string> parts;
  if (!path_name.empty()) parts.push_back(path_name);
  if (!described.name.empty() && !path_name.ends_with(described.name)) {
    parts.push_back(described.name);
  }
  if (parts.empty() && !ranks.empty() && !ranks.begin()->second.start.program.empty()) {
    parts.push_back(ranks.begin()->second.start.program);
  }
  if (!started_text.empty()) parts.push_back(started_text);
  return parts.empty() ? folder.filename().string() : join(parts, " ");
}

double Run::updated() const {
  double latest = 0;
  for (const auto& [rank, record] : ranks) latest = std::max(latest, record.updated);
  return latest;
}

double Run::steps() const {
  double most = 0;
  for (const auto& [rank, record] : ranks) most = std::max(most, record.steps);
  return most;
}

RunState Run::state(double now) const {
  const auto ended = [](const auto& each) { return each.second.end.has_value(); };
  const auto failed = [](const auto& each) { return each.second.end && each.second.end->failed; };
  if (std::ranges::any_of(ranks, failed)) return RunState::kFailed;
  if (!ranks.empty() && std::ranges::all_of(ranks, ended)) return RunState::kFinished;
  return now - updated() < kSilence ? RunState::kRunning : RunState::kSilent;
}

std::optional<Straggler> Run::straggler() const {
  const double since = updated() - kRecent;
  std::vector<std::pair<double, int>> waits;
  double step = 0;
  for (const auto& [rank, record] : ranks) {
    const auto wait = record.wait.mean_since(since);
    const auto time = record.step_time.mean_since(since);
    if (!wait || !time) return std::nullopt;
    waits.emplace_back(*wait, rank);
    step = std::max(step, *time);
  }
  if (waits.size() < 2 || step <= 0) return std::nullopt;
  std::ranges::sort(waits);
  // The others wait as long as the median of them.
  const double share = (waits[(waits.size() + 1) / 2].first - waits.front().first) / step;
  if (share < kNamedShare) return std::nullopt;
  return Straggler{.rank = waits.front().second, .share = std::min(share, 1.0)};
}

std::string Run::straggler_text() const {
  const auto late = straggler();
  if (!late) return "";
  return str("Rank ", late->rank, " is the straggler: the others wait for it ",
             std::lround(late->share * 100), " % of a step.");
}

void Run::add(int rank, FeedEntry entry) {
  auto& record = ranks[rank];
  const double time = entry.time;
  if (started == 0 || time < started) started = time;
  record.updated = std::max(record.updated, time);
  if (auto* start = std::get_if<FeedStart>(&entry.what)) {
    record.start = std::move(*start);
  } else if (auto* name = std::get_if<FeedName>(&entry.what)) {
    if (name->name.empty()) name->name = described.name;
    described = std::move(*name);
  } else if (const auto* values = std::get_if<FeedValues>(&entry.what)) {
    for (const auto& [key, value] : values->values) {
      if (metrics.size() >= kMostMetrics && !metrics.contains(key)) continue;
      auto& series = metrics[key];
      const auto next = static_cast<double>(series.points.size());
      series.add({.step = values->step.value_or(next), .time = time, .value = value});
    }
  } else if (const auto* steps = std::get_if<FeedSteps>(&entry.what)) {
    record.steps = steps->steps;
    record.step_time.add({.step = steps->steps, .time = time, .value = steps->time});
    if (steps->wait) record.wait.add({.step = steps->steps, .time = time, .value = *steps->wait});
    if (rank != ranks.begin()->first || steps->time <= 0) return;
    if (steps->learning_rate) {
      learning_rate.add({.step = steps->steps, .time = time, .value = *steps->learning_rate});
    }
    if (steps->samples) counts_samples = true;
    const double per_step = counts_samples ? steps->samples.value_or(0) : 1;
    if (per_step > 0) {
      throughput.add({.step = steps->steps, .time = time, .value = per_step * 1000 / steps->time});
    }
  } else if (const auto* system = std::get_if<FeedSystem>(&entry.what)) {
    const auto at = [&](double value) {
      return Point{.step = record.steps, .time = time, .value = value};
    };
    record.memory.add(at(system->memory));
    if (system->gpu_used) record.gpu_memory.add(at(*system->gpu_used));
    if (system->gpu_busy) record.gpu_busy.add(at(*system->gpu_busy));
    if (system->gpu_total) record.gpu_total = *system->gpu_total;
  } else {
    record.end = std::get<FeedEnd>(entry.what);
  }
}

}  // namespace accelerate::detail::commands
