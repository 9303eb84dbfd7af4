#include "commands/monitor/report.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <system_error>
#include <utility>

#include "core/json.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kRunsAtFirst = 5;
constexpr std::size_t kMostMetricCharts = 60;
// Curves of more processes cannot be told apart; the table has all of them.
constexpr std::size_t kMostRankCurves = 16;
constexpr double kRecent = 10;  // seconds, of the numbers in tables

/// Writes JSON piece by piece: curves have too many numbers for a tree of values.
class JsonText {
 public:
  JsonText& open(char bracket) {
    separate();
    text_ += bracket;
    first_ = true;
    return *this;
  }
  JsonText& close(char bracket) {
    text_ += bracket;
    first_ = false;
    return *this;
  }
  JsonText& key(std::string_view name) {
    separate();
    text_ += str('"', name, "\":");
    first_ = true;
    return *this;
  }
  JsonText& text(const std::string& value) {
    separate();
    text_ += json_dumps(value, {.replace_invalid = true});
    return *this;
  }
  JsonText& number(std::optional<double> value) {
    separate();
    std::array<char, 32> digits{};
    if (value && std::isfinite(*value)) {
      // Times need ten digits; curves are drawn from fewer.
      const auto end = std::to_chars(digits.begin(), digits.end(), *value,
                                     std::chars_format::general, std::abs(*value) > 1e8 ? 14 : 7);
      text_.append(digits.data(), end.ptr);
    } else {
      text_ += "null";
    }
    return *this;
  }
  JsonText& texts(std::string_view name, const std::string& value) { return key(name).text(value); }
  JsonText& numbers(std::string_view name, std::optional<double> value) {
    return key(name).number(value);
  }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  void separate() {
    if (!first_) text_ += ',';
    first_ = false;
  }

  std::string text_;
  bool first_ = true;
};

std::optional<double> last_of(const Series& series) {
  if (series.points.empty()) return std::nullopt;
  return series.points.back().value;
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
    json_.open('{').texts("version", report_version(runs_, now_));
    json_.texts("folder", std::filesystem::absolute(runs_.folder()).lexically_normal().string());
    json_.numbers("now", now_);
    const auto known = static_cast<double>(runs_.bytes_known());
    const auto read = static_cast<double>(runs_.bytes_read());
    json_.numbers("read", known > 0 ? read / known : 1);
    json_.key("runs").open('[');
    for (const auto* run : runs_.runs()) write_run(*run);
    json_.close(']').key("charts").open('[');
    write_metrics();
    write_common_charts();
    if (focus_ != nullptr) write_rank_charts();
    json_.close(']');
    write_focus();
    json_.key("logs").open('[');
    for (const auto& log : runs_.logs()) {
      json_.text(log.lexically_relative(runs_.folder()).generic_string());
    }
    return json_.close(']').close('}').take();
  }

 private:
  void write_run(const Run& run) {
    json_.open('{').numbers("id", run.id).texts("name", run.name());
    json_.texts("state", std::string(to_string(run.state(now_))));
    json_.numbers("started", run.started).numbers("updated", run.updated());
    json_.numbers("steps", run.steps());
    json_.numbers("rate", run.throughput.mean_since(run.updated() - kRecent));
    json_.texts("unit", run.counts_samples ? "samples/s" : "steps/s");
    json_.numbers("shown", std::ranges::find(shown_, &run) != shown_.end() ? 1 : 0);
    json_.close('}');
  }

  void write_line(const Run& run, const std::string& label, const Series& series) {
    auto view = options_.view;
    view.time_zero = run.started;
    const auto curve = curve_of(series.points, view);
    json_.open('{').numbers("run", run.id).texts("label", label);
    if (series.not_finite > 0) {
      json_.numbers("not_finite", static_cast<double>(series.not_finite));
      json_.numbers("first_not_finite", series.first_not_finite);
    }
    const auto values = [&](std::string_view name, auto member) {
      json_.key(name).open('[');
      for (const auto& bucket : curve) json_.number(bucket.*member);
      json_.close(']');
    };
    values("x", &Bucket::x);
    values("mean", &Bucket::mean);
    // Without several points in a column both are the mean.
    if (curve.size() < series.points.size()) {
      values("low", &Bucket::low);
      values("high", &Bucket::high);
    }
    json_.numbers("last", last_of(series));
    json_.close('}');
  }

  void open_chart(const std::string& title, std::string_view group, std::string_view unit) {
    json_.open('{').texts("title", title).texts("group", std::string(group));
    json_.texts("unit", std::string(unit)).key("lines").open('[');
  }
  void close_chart() { json_.close(']').close('}'); }

  void write_metrics() {
    // The loss first.
    std::set<std::pair<bool, std::string>> names;
    for (const auto* run : shown_) {
      for (const auto& [name, series] : run->metrics) {
        names.emplace(to_lower(name).find("loss") == std::string::npos, name);
      }
    }
    std::size_t count = 0;
    for (const auto& [later, name] : names) {
      if (++count > kMostMetricCharts) break;
      open_chart(name, "metric", "");
      for (const auto* run : shown_) {
        const auto found = run->metrics.find(name);
        if (found != run->metrics.end()) write_line(*run, run->name(), found->second);
      }
      close_chart();
    }
  }

  void write_common_charts() {
    const auto chart = [&](const char* title, const char* unit, auto member, auto chosen) {
      if (std::ranges::none_of(shown_, chosen)) return;
      open_chart(title, "speed", unit);
      for (const auto* run : shown_) {
        if (chosen(run)) write_line(*run, run->name(), run->*member);
      }
      close_chart();
    };
    chart("Learning rate", "", &Run::learning_rate,
          [](const Run* run) { return !run->learning_rate.points.empty(); });
    const auto throughput_in = [&](bool samples) {
      return [samples](const Run* run) {
        return !run->throughput.points.empty() && run->counts_samples == samples;
      };
    };
    chart("Throughput", "samples/s", &Run::throughput, throughput_in(true));
    chart("Throughput", "steps/s", &Run::throughput, throughput_in(false));
  }

  void write_rank_charts() {
    const auto late = focus_->straggler();
    const auto chart = [&](const char* title, const char* unit, Series RankRecord::* member) {
      std::vector<std::pair<int, const Series*>> curves;
      for (const auto& [rank, record] : focus_->ranks) {
        const bool named = late && late->rank == rank;
        if ((record.*member).points.empty()) continue;
        if (curves.size() < kMostRankCurves || named) curves.emplace_back(rank, &(record.*member));
      }
      if (curves.empty()) return;
      open_chart(title, "rank", unit);
      for (const auto& [rank, series] : curves) write_line(*focus_, str("rank ", rank), *series);
      close_chart();
    };
    chart("Step time", "ms", &RankRecord::step_time);
    chart("Waiting in collectives", "ms", &RankRecord::wait);
    chart("Host memory", "bytes", &RankRecord::memory);
    chart("GPU memory", "bytes", &RankRecord::gpu_memory);
    chart("GPU utilisation", "%", &RankRecord::gpu_busy);
  }

  void write_focus() {
    json_.numbers("focus", focus_ ? std::optional<double>(focus_->id) : std::nullopt);
    json_.texts("notice", focus_ ? focus_->straggler_text() : "");
    json_.key("ranks").open('[');
    if (focus_ != nullptr) {
      for (const auto& [rank, record] : focus_->ranks) write_rank(rank, record);
    }
    json_.close(']').key("config").open('[');
    if (focus_ != nullptr) {
      for (const auto& [name, value] : focus_->described.config) {
        json_.open('[').text(name).text(value).close(']');
      }
    }
    json_.close(']').key("checkpoints").open('[');
    if (focus_ != nullptr) write_checkpoints();
    json_.close(']');
  }

  void write_rank(int rank, const RankRecord& record) {
    const double since = record.updated - kRecent;
    json_.open('{').numbers("rank", rank).texts("host", record.start.host);
    json_.texts("device", record.start.device);
    json_.numbers("steps", record.steps);
    json_.numbers("step_ms", record.step_time.mean_since(since));
    json_.numbers("wait_ms", record.wait.mean_since(since));
    json_.numbers("memory", last_of(record.memory));
    json_.numbers("gpu_memory", last_of(record.gpu_memory)).numbers("gpu_total", record.gpu_total);
    json_.numbers("gpu_busy", last_of(record.gpu_busy));
    json_.close('}');
  }

  void write_checkpoints() {
    const auto& list = runs_.checkpoints(*focus_);
    for (const auto& checkpoint : list.checkpoints) {
      json_.open('{').texts("name", checkpoint.path.filename().string());
      json_.numbers("saved_at", checkpoint.saved_at);
      json_.numbers("files", static_cast<double>(checkpoint.files));
      json_.numbers("bytes", static_cast<double>(checkpoint.bytes));
      json_.texts("state", checkpoint.state()).close('}');
    }
  }

  RunSet& runs_;
  const ReportOptions& options_;
  double now_;
  std::vector<const Run*> shown_;
  const Run* focus_ = nullptr;
  JsonText json_;
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
