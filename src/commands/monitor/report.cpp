#include "commands/monitor/report.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <tuple>
#include <utility>

#include "core/json.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kRunsAtFirst = 5;
constexpr std::size_t kMostMetricCharts = 60;
// Curves of more processes cannot be told apart; the table has all of them.
constexpr std::size_t kMostRankCurves = 16;

/// A list of numbers: curves have too many of them for a tree of values.
std::string numbers_of(const std::vector<Bucket>& curve, double Bucket::* member) {
  const int precision = member == &Bucket::x ? 15 : 7;
  std::string text = "[";
  std::array<char, 32> digits{};
  for (const auto& bucket : curve) {
    const auto end = std::to_chars(digits.begin(), digits.end(), bucket.*member,
                                   std::chars_format::general, precision);
    text.append(text.size() > 1 ? "," : "").append(digits.data(), end.ptr);
  }
  return text + "]";
}

/// The object with more fields, which are JSON already.
std::string extended(const Value::Dict& object, const std::string& more) {
  auto text = json_dumps(object, {.replace_invalid = true});
  text.pop_back();  // the brace
  return str(text, ", ", more, "}");
}

class Report {
 public:
  Report(RunSet& runs, const ReportOptions& options, double now)
      : runs_(runs), options_(options), now_(now) {
    for (const auto* run : runs.runs()) {
      const bool shown = options.runs
                             ? std::ranges::find(*options.runs, run->id) != options.runs->end()
                             : shown_.size() < kRunsAtFirst;
      if (shown) shown_.push_back(run);
      if (options.focus == run->id) focus_ = run;
    }
    if (focus_ == nullptr && !shown_.empty()) focus_ = shown_.front();
  }

  std::string write() {
    const auto known = static_cast<double>(runs_.bytes_known());
    const auto folder = std::filesystem::absolute(runs_.folder()).lexically_normal().string();
    Value::List all;
    for (const auto* run : runs_.runs()) all.emplace_back(facts_of(*run));
    Value::List logs;
    for (const auto& log : runs_.logs()) {
      logs.emplace_back(log.lexically_relative(runs_.folder()).generic_string());
    }
    Value::Dict report{{"version", report_version(runs_, now_)},
                       {"folder", folder},
                       {"now", now_},
                       {"read", known > 0 ? static_cast<double>(runs_.bytes_read()) / known : 1.0},
                       {"runs", std::move(all)},
                       {"logs", std::move(logs)}};
    add_focus(report);
    write_metrics();
    write_common_charts();
    if (focus_ != nullptr) write_rank_charts();
    return extended(report, str("\"charts\": [", join(charts_, ","), "]"));
  }

 private:
  [[nodiscard]] Value::Dict facts_of(const Run& run) const {
    return {{"id", run.id},
            {"name", run.name()},
            {"state", to_string(run.state(now_))},
            {"started", run.started},
            {"updated", run.updated()},
            {"steps", run.steps()},
            {"rate", run.throughput.mean_since(run.updated() - kTableSeconds)},
            {"unit", run.counts_samples ? "samples/s" : "steps/s"},
            {"shown", std::ranges::find(shown_, &run) != shown_.end()}};
  }

  using Line = std::tuple<const Run*, std::string, const Series*>;

  [[nodiscard]] std::string written(const Line& line) const {
    const auto& [run, label, series] = line;
    auto view = options_.view;
    view.time_zero = run->started;
    const auto curve = curve_of(series->points, view);
    const Value::Dict facts{{"run", run->id},
                            {"label", label},
                            {"last", series->last()},
                            {"not_finite", series->not_finite},
                            {"first_not_finite", series->first_not_finite}};
    auto numbers = str("\"x\": ", numbers_of(curve, &Bucket::x),
                       ", \"mean\": ", numbers_of(curve, &Bucket::mean));
    // Without several points in a column both are the mean.
    if (curve.size() < series->points.size()) {
      numbers += str(", \"low\": ", numbers_of(curve, &Bucket::low),
                     ", \"high\": ", numbers_of(curve, &Bucket::high));
    }
    return extended(facts, numbers);
  }

  void add_chart(const std::string& title, const char* group, const char* unit,
                 const std::vector<Line>& lines) {
    if (lines.empty()) return;
    std::vector<std::string> texts;
    for (const auto& line : lines) texts.push_back(written(line));
    charts_.push_back(extended({{"title", title}, {"group", group}, {"unit", unit}},
                               str("\"lines\": [", join(texts, ","), "]")));
  }

  void write_metrics() {
    // The loss first.
    std::set<std::pair<bool, std::string>> names;
    for (const auto* run : shown_) {
      for (const auto& [name, series] : run->metrics) {
        names.emplace(to_lower(name).find("loss") == std::string::npos, name);
      }
    }
    for (const auto& [later, name] : names) {
      if (charts_.size() == kMostMetricCharts) return;
      std::vector<Line> lines;
      for (const auto* run : shown_) {
        const auto found = run->metrics.find(name);
        if (found != run->metrics.end()) lines.emplace_back(run, run->name(), &found->second);
      }
      add_chart(name, "metric", "", lines);
    }
  }

  void write_common_charts() {
    std::vector<Line> rates;
    std::vector<Line> samples;
    std::vector<Line> steps;
    for (const auto* run : shown_) {
      if (!run->learning_rate.points.empty()) {
        rates.emplace_back(run, run->name(), &run->learning_rate);
      }
      if (run->throughput.points.empty()) continue;
      (run->counts_samples ? samples : steps).emplace_back(run, run->name(), &run->throughput);
    }
    add_chart("Learning rate", "speed", "", rates);
    add_chart("Throughput", "speed", "samples/s", samples);
    add_chart("Throughput", "speed", "steps/s", steps);
  }

  void write_rank_charts() {
    const auto late = focus_->straggler();
    const auto chart = [&](const char* title, const char* unit, Series RankRecord::* member) {
      std::vector<Line> lines;
      for (const auto& [rank, record] : focus_->ranks) {
        const bool named = late && late->rank == rank;
        if ((record.*member).points.empty()) continue;
        if (lines.size() >= kMostRankCurves && !named) continue;
        lines.emplace_back(focus_, str("rank ", rank), &(record.*member));
      }
      add_chart(title, "rank", unit, lines);
    };
    chart("Step time", "ms", &RankRecord::step_time);
    chart("Waiting in collectives", "ms", &RankRecord::wait);
    chart("Host memory", "bytes", &RankRecord::memory);
    chart("GPU memory", "bytes", &RankRecord::gpu_memory);
    chart("GPU utilisation", "%", &RankRecord::gpu_busy);
  }

  void add_focus(Value::Dict& report) {
    Value::List ranks;
    Value::List config;
    Value::List checkpoints;
    if (focus_ != nullptr) {
      for (const auto& [rank, record] : focus_->ranks) ranks.emplace_back(facts_of(rank, record));
      for (const auto& [name, value] : focus_->config)
        config.emplace_back(Value::List{name, value});
      for (const auto& each : runs_.checkpoints(*focus_).checkpoints) {
        checkpoints.emplace_back(Value::Dict{{"name", each.path.filename().string()},
                                             {"saved_at", each.saved_at},
                                             {"files", each.files},
                                             {"bytes", each.bytes},
                                             {"state", each.state()}});
      }
      report.set("focus", focus_->id);
      report.set("notice", focus_->straggler_text());
    }
    report.set("ranks", std::move(ranks));
    report.set("config", std::move(config));
    report.set("checkpoints", std::move(checkpoints));
  }

  static Value::Dict facts_of(int rank, const RankRecord& record) {
    const double since = record.updated - kTableSeconds;
    return {{"rank", rank},
            {"host", record.host},
            {"device", record.device},
            {"steps", record.steps},
            {"step_ms", record.step_time.mean_since(since)},
            {"wait_ms", record.wait.mean_since(since)},
            {"memory", record.memory.last()},
            {"gpu_memory", record.gpu_memory.last()},
            {"gpu_total", record.gpu_total},
            {"gpu_busy", record.gpu_busy.last()}};
  }

  RunSet& runs_;
  const ReportOptions& options_;
  double now_;
  std::vector<const Run*> shown_;
  const Run* focus_ = nullptr;
  std::vector<std::string> charts_;
};

}  // namespace

std::string report_version(RunSet& runs, double now) {
  std::string states;
  std::size_t checkpoints = 0;
  for (const auto* run : runs.runs()) {
    states += to_string(run->state(now)).substr(0, 1);
    for (const auto& each : runs.checkpoints(*run).checkpoints) {
      checkpoints = checkpoints * 31 + static_cast<std::size_t>(each.bytes) + each.state().size();
    }
  }
  return str(runs.bytes_read(), "-", runs.bytes_known(), "-", runs.logs().size(), "-", states, "-",
             checkpoints);
}

std::string write_report(RunSet& runs, const ReportOptions& options, double now) {
  return Report(runs, options, now).write();
}

}  // namespace accelerate::detail::commands
