// What is known of one run.
#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "commands/monitor/runs.h"
#include "core/json.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kMostPoints = 4'000'000;  // of a series
constexpr std::size_t kMostMetrics = 500;       // of a run
constexpr std::size_t kMostSettings = 100;
constexpr std::size_t kLongestText = 200;  // of a name or a setting
// Seconds. The recorder writes every other second.
constexpr double kSilence = 15;
constexpr double kRecent = 30;
// Ranks always differ a little.
constexpr double kNamedShare = 0.1;

/// Neither NaN nor so large that differences overflow.
bool can_be_drawn(double value) { return std::abs(value) < 1e300; }

/// Numbers that are not finite are words in JSON.
std::optional<double> number_of(const Value& value) {
  if (value.is_bool()) return value.as_bool() ? 1.0 : 0.0;
  if (value.is_int() || value.is_double()) return value.as_double();
  if (!value.is_string()) return std::nullopt;
  if (value.as_string() == "NaN") return NAN;
  if (value.as_string() == "Infinity") return INFINITY;
  if (value.as_string() == "-Infinity") return -INFINITY;
  return std::nullopt;
}

std::optional<double> number_in(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  const auto number = value != nullptr ? number_of(*value) : std::nullopt;
  return number && can_be_drawn(*number) ? number : std::nullopt;
}

const Value::Dict* dict_in(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  return value != nullptr && value->is_dict() ? &value->as_dict() : nullptr;
}

std::string text_in(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  return value != nullptr && value->is_string() ? value->as_string().substr(0, kLongestText) : "";
}

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
  if (!can_be_drawn(point.value)) {
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

std::optional<double> Series::last() const {
  return points.empty() ? std::nullopt : std::optional(points.back().value);
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
  if (!given_name.empty() && !path_name.ends_with(given_name)) parts.push_back(given_name);
  if (parts.empty() && !program.empty()) parts.push_back(program);
  if (!started_text.empty()) parts.push_back(started_text);
  return parts.empty() ? folder.filename().string() : join(parts, " ");
}

double Run::greatest(double RankRecord::* member) const {
  double most = 0;
  for (const auto& [rank, record] : ranks) most = std::max(most, record.*member);
  return most;
}

RunState Run::state(double now) const {
  const auto ended = [](const auto& each) { return each.second.failed.has_value(); };
  const auto failed = [](const auto& each) { return each.second.failed.value_or(false); };
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

void Run::add_line(int rank, std::string_view text) {
  const auto line = text.size() <= kLongestLine ? json_object(text) : std::nullopt;
  const auto time = line ? number_in(*line, "time") : std::nullopt;
  if (!time) return;
  auto& record = ranks[rank];
  if (started == 0 || *time < started) started = *time;
  record.updated = std::max(record.updated, *time);
  if (const auto* values = dict_in(*line, "values")) {
    // Those of `log_table` are no numbers of a step.
    if (line->get("table") == nullptr) add_values("", *values, number_in(*line, "step"), *time);
  } else if (const auto steps = number_in(*line, "steps")) {
    record.steps = *steps;
    add_steps(rank, *line, *time);
  } else if (const auto memory = number_in(*line, "memory")) {
    const auto add = [&](Series& series, std::optional<double> value) {
      if (value) series.add({.step = record.steps, .time = *time, .value = *value});
    };
    add(record.memory, memory);
    if (const auto* gpu = dict_in(*line, "gpu")) {
      add(record.gpu_memory, number_in(*gpu, "used"));
      add(record.gpu_busy, number_in(*gpu, "busy"));
      record.gpu_total = number_in(*gpu, "total").value_or(0);
    }
  } else if (const auto* start = dict_in(*line, "start")) {
    record.host = text_in(*start, "host");
    record.device = text_in(*start, "device");
    program = text_in(*start, "program");
  } else if (line->get("end") != nullptr) {
    record.failed = text_in(*line, "end") == "failed";
  } else {
    if (line->get("name") != nullptr) given_name = text_in(*line, "name");
    if (const auto* settings = dict_in(*line, "config")) set_config(*settings);
  }
}

void Run::add_values(const std::string& prefix, const Value::Dict& values,
                     std::optional<double> step, double time) {
  for (const auto& [key, value] : values) {
    const auto name = (prefix + key.to_string()).substr(0, kLongestText);
    if (value.is_dict()) {
      add_values(name + "/", value.as_dict(), step, time);
    } else if (const auto number = number_of(value)) {
      if (metrics.size() >= kMostMetrics && !metrics.contains(name)) continue;
      auto& series = metrics[name];
      const auto next = static_cast<double>(series.points.size());
      series.add({.step = step.value_or(next), .time = time, .value = *number});
    }
  }
}

void Run::add_steps(int rank, const Value::Dict& line, double time) {
  auto& record = ranks[rank];
  const auto add = [&](Series& series, std::optional<double> value) {
    if (value) series.add({.step = record.steps, .time = time, .value = *value});
  };
  const auto milliseconds = number_in(line, "ms");
  add(record.step_time, milliseconds);
  add(record.wait, number_in(line, "wait"));
  // These are the same on all ranks.
  if (rank != ranks.begin()->first || !milliseconds || *milliseconds <= 0) return;
  add(learning_rate, number_in(line, "lr"));
  const auto samples = number_in(line, "samples");
  counts_samples = counts_samples || samples;
  if (samples || !counts_samples) add(throughput, samples.value_or(1) * 1000 / *milliseconds);
}

void Run::set_config(const Value::Dict& settings) {
  config.clear();
  for (const auto& [key, value] : settings) {
    if (config.size() == kMostSettings) break;
    const auto text = value.is_string() ? value.as_string() : value.repr();
    config.emplace_back(key.to_string().substr(0, kLongestText), text.substr(0, kLongestText));
  }
}

}  // namespace accelerate::detail::commands
