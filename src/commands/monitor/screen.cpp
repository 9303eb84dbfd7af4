#include "commands/monitor/screen.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/progress_line.h"
#include "core/text.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::commands {
namespace {

constexpr const char* kBold = "\x1b[1m";
constexpr const char* kFaint = "\x1b[2m";
constexpr const char* kRed = "\x1b[31m";
constexpr const char* kGreen = "\x1b[32m";
constexpr const char* kYellow = "\x1b[33m";
constexpr const char* kReset = "\x1b[0m";
constexpr std::array kLineColors{"\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m",
                                 "\x1b[34m", "\x1b[31m", "\x1b[37m"};
constexpr std::size_t kLabelWidth = 9;
constexpr std::size_t kMostCurves = 7;  // in one chart, as many as there are colours
constexpr double kRecent = 10;          // seconds, of the numbers in the table

std::string in_unit(double value, const std::string& unit) {
  if (unit == "B") return format_sizeof(value) + "B";
  return str(format_number(value), unit.empty() ? "" : " ", unit);
}

/// Blanks before, up to `width`.
std::string right(const std::string& text, std::size_t width) {
  const auto own = static_cast<std::size_t>(display_width(text));
  return std::string(width - std::min(own, width), ' ') + text;
}

const char* color_of(RunState state) {
  switch (state) {
    case RunState::kRunning:
      return kGreen;
    case RunState::kFailed:
      return kRed;
    case RunState::kSilent:
      return kYellow;
    default:
      return kBold;
  }
}

}  // namespace

// ---- dots
// -----------------------------------------------------------------------------------------

DotPicture::DotPicture(std::size_t columns, std::size_t rows, bool utf8)
    : columns_(columns), rows_(rows), utf8_(utf8), cells_(columns * rows) {}

void DotPicture::set(std::size_t x, std::size_t y, const char* color) {
  if (x >= width() || y >= height()) return;
  // The bits of Unicode's braille patterns, by row and column of a dot.
  constexpr std::array<std::array<unsigned, 2>, 4> kBits{
      {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}}};
  auto& cell = cells_[y / 4 * columns_ + x / 2];
  cell.dots |= kBits.at(y % 4).at(x % 2);
  cell.color = color;
}

void DotPicture::bar(std::size_t x, std::size_t y0, std::size_t y1, const char* color) {
  for (auto y = std::min(y0, y1); y <= std::max(y0, y1); ++y) set(x, y, color);
}

std::string DotPicture::row(std::size_t row, bool plain) const {
  std::string text;
  std::string_view color;
  for (std::size_t column = 0; column < columns_; ++column) {
    const auto& cell = cells_[row * columns_ + column];
    if (!plain && cell.dots != 0 && color != cell.color) text += color = cell.color;
    if (cell.dots == 0 || !utf8_) {
      text += cell.dots == 0 ? ' ' : '*';
      continue;
    }
    text += '\xe2';  // U+2800 and the dots, in UTF-8
    text += static_cast<char>(0xa0 | (cell.dots >> 6));
    text += static_cast<char>(0x80 | (cell.dots & 0x3f));
  }
  return color.empty() ? text : text + kReset;
}

// ---- what is shown
// --------------------------------------------------------------------------------

/// A chart to choose.
struct MonitorScreen::Curve {
  std::string title;
  std::string unit;
  std::vector<std::pair<std::string, const Series*>> lines;
};

std::vector<MonitorScreen::Curve> MonitorScreen::curves_of(const Run& run) const {
  std::vector<Curve> curves;
  for (const auto& [name, series] : run.metrics) curves.push_back({name, "", {{"", &series}}});
  std::ranges::stable_partition(curves, [](const Curve& curve) {
    return to_lower(curve.title).find("loss") != std::string::npos;
  });
  curves.push_back({"learning rate", "", {{"", &run.learning_rate}}});
  curves.push_back(
      {"throughput", run.counts_samples ? "samples/s" : "steps/s", {{"", &run.throughput}}});
  const auto by_rank = [&](const char* title, const char* unit, Series RankRecord::* member) {
    Curve curve{title, unit, {}};
    for (const auto& [rank, record] : run.ranks) {
      if (curve.lines.size() == kMostCurves) break;
      curve.lines.emplace_back(str("rank ", rank), &(record.*member));
    }
    curves.push_back(std::move(curve));
  };
  by_rank("step time", "ms", &RankRecord::step_time);
  by_rank("waiting in collectives", "ms", &RankRecord::wait);
  by_rank("host memory", "B", &RankRecord::memory);
  by_rank("GPU memory", "B", &RankRecord::gpu_memory);
  by_rank("GPU utilisation", "%", &RankRecord::gpu_busy);
  std::erase_if(curves, [](const Curve& curve) {
    return std::ranges::all_of(curve.lines,
                               [](const auto& line) { return line.second->points.empty(); });
  });
  return curves;
}

const Run* MonitorScreen::chosen() const {
  const auto runs = runs_.runs();
  const auto found = std::ranges::find(runs, run_, &Run::id);
  if (found != runs.end()) return *found;
  return runs.empty() ? nullptr : runs.front();
}

bool MonitorScreen::press(const KeyPress& press) {
  const auto runs = runs_.runs();
  const auto* run = chosen();
  const auto move = [&](std::ptrdiff_t by) {
    if (run == nullptr) return;
    const auto at = std::ranges::find(runs, run) - runs.begin() + by;
    const auto count = static_cast<std::ptrdiff_t>(runs.size());
    run_ = runs[static_cast<std::size_t>((at + count) % count)]->id;
  };
  const auto count = run != nullptr ? std::max<std::size_t>(curves_of(*run).size(), 1) : 1;
  switch (press.key) {
    case Key::kUp:
      move(-1);
      break;
    case Key::kDown:
      move(1);
      break;
    case Key::kLeft:
      curve_ = (curve_ + count - 1) % count;
      break;
    case Key::kRight:
      curve_ = (curve_ + 1) % count;
      break;
    case Key::kEnd:
      return false;
    default:
      if (press.character == 'q') return false;
      if (press.character == '\t') curve_ = (curve_ + 1) % count;
      if (press.character == 'l') log_scale_ = !log_scale_;
      if (press.character == 'x') axis_ = axis_ == Axis::kStep ? Axis::kTime : Axis::kStep;
  }
  return true;
}

std::string MonitorScreen::colored(const char* color, const std::string& text) const {
  return style_.color ? str(color, text, kReset) : text;
}

std::vector<std::string> MonitorScreen::lines(const ScreenSize& size, double now) {
  std::vector<std::string> lines;
  const auto runs = runs_.runs();
  const auto* run = chosen();
  const auto rows = std::max<std::size_t>(size.rows, 2);
  if (run == nullptr) {
    lines = {colored(kBold, "accelerate monitor"), "",
             str("No runs in ", runs_.folder().string(), " yet."),
             "Start one with ACCELERATE_MONITOR=1, or with `accelerate launch --monitor`."};
  } else {
    const auto state = run->state(now);
    const auto rate = run->throughput.mean_since(run->updated() - kRecent);
    const auto place = std::ranges::find(runs, run) - runs.begin() + 1;
    lines.push_back(
        str(colored(kBold, launch::printable_line(run->name())), "  ",
            colored(color_of(state), std::string(to_string(state))), "  step ", run->steps(),
            rate ? str("  ", format_number(*rate), run->counts_samples ? " samples/s" : " steps/s")
                 : "",
            "  ", format_interval(run->updated() - run->started),
            runs.size() > 1 ? str("  run ", place, " of ", runs.size()) : ""));
    const auto notice = run->straggler_text();
    if (!notice.empty()) lines.push_back(colored(kYellow, notice));
    const auto curves = curves_of(*run);
    // Half of the rows for the chart, at least.
    const auto room = rows > 8 ? (rows - 3) / 2 : 0;
    std::vector<std::string> below;
    add_ranks(below, *run, room / 2);
    add_files(below, *run, room - std::min(room, below.size()));
    const auto left = rows - 1 - std::min(rows - 1, lines.size() + below.size());
    if (!curves.empty() && left > 3) {
      curve_ = std::min(curve_, curves.size() - 1);
      add_chart(lines, curves[curve_], {.columns = size.columns, .rows = left}, run->started);
    }
    for (auto& line : below) lines.push_back(std::move(line));
  }
  lines.resize(rows - 1);
  lines.push_back(
      colored(kFaint, "Tab or <- -> curve   up down run   x axis   l log scale   q quit"));
  for (auto& line : lines) line = display_trim(std::move(line), static_cast<int>(size.columns));
  return lines;
}

void MonitorScreen::add_chart(std::vector<std::string>& lines, const Curve& curve,
                              const ScreenSize& size, double time_zero) const {
  const auto columns = size.columns - std::min(size.columns - 1, kLabelWidth + 1);
  const auto rows = size.rows - 2;  // without title and axis
  DotPicture picture(columns, rows, style_.utf8);
  CurveView view{.axis = axis_, .time_zero = time_zero, .columns = picture.width()};
  double from = INFINITY;
  double to = -INFINITY;
  for (const auto& [label, series] : curve.lines) {
    for (const auto& bucket : curve_of(series->points, view)) {
      from = std::min(from, bucket.x);
      to = std::max(to, bucket.x);
    }
  }
  view.from = from;
  view.to = to;
  std::vector<std::vector<Bucket>> shown;
  double low = INFINITY;
  double high = -INFINITY;
  for (const auto& [label, series] : curve.lines) {
    shown.push_back(curve_of(series->points, view));
    for (const auto& bucket : shown.back()) {
      low = std::min(low, bucket.low);
      high = std::max(high, bucket.high);
    }
  }
  const bool log = log_scale_ && low > 0;
  const auto scaled = [&](double value) { return log ? std::log10(value) : value; };
  const double span = std::max(scaled(high) - scaled(low), 1e-300);
  const auto y_of = [&](double value) {
    const double part = (scaled(high) - scaled(value)) / span;
    return static_cast<std::size_t>(part * static_cast<double>(picture.height() - 1) + 0.5);
  };
  const auto x_of = [&](double x) {
    const double part = to > from ? (x - from) / (to - from) : 0;
    return static_cast<std::size_t>(part * static_cast<double>(picture.width() - 1) + 0.5);
  };
  std::string title = colored(kBold, launch::printable_line(curve.title));
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const auto* color = kLineColors.at(i % kLineColors.size());
    for (std::size_t k = 0; k < shown[i].size(); ++k) {
      const auto& bucket = shown[i][k];
      const auto x = x_of(bucket.x);
      picture.bar(x, y_of(bucket.low), y_of(bucket.high), color);
      // Columns without a point are crossed by a line.
      const auto& next = shown[i][std::min(k + 1, shown[i].size() - 1)];
      const auto end = x_of(next.x);
      for (auto at = x + 1; at < end; ++at) {
        const double part = static_cast<double>(at - x) / static_cast<double>(end - x);
        picture.set(at, y_of(bucket.mean + part * (next.mean - bucket.mean)), color);
      }
    }
    if (curve.lines[i].second->points.empty()) continue;
    const auto& last = curve.lines[i].second->points.back();
    title +=
        str("  ", colored(color, str(curve.lines[i].first, curve.lines[i].first.empty() ? "" : " ",
                                     in_unit(last.value, curve.unit))));
    if (curve.lines[i].second->not_finite > 0) title += colored(kRed, "  not finite at times");
  }
  lines.push_back(title);
  for (std::size_t row = 0; row < rows; ++row) {
    std::string label;
    if (row == 0) label = in_unit(high, curve.unit == "B" ? "B" : "");
    if (row + 1 == rows) label = in_unit(low, curve.unit == "B" ? "B" : "");
    lines.push_back(
        str(colored(kFaint, right(label, kLabelWidth)), " ", picture.row(row, !style_.color)));
  }
  const auto x_text = [&](double x) {
    return axis_ == Axis::kTime ? format_interval(x) : format_number(x);
  };
  const auto end = x_text(to);
  lines.push_back(
      colored(kFaint, str(std::string(kLabelWidth + 1, ' '), x_text(from),
                          right(end, columns - std::min(columns, x_text(from).size())))));
}

void MonitorScreen::add_ranks(std::vector<std::string>& lines, const Run& run,
                              std::size_t most) const {
  if (most < 2 || run.steps() == 0) return;
  lines.push_back(
      colored(kFaint, "   rank      step ms      wait ms       memory   GPU memory  GPU %  host"));
  const auto late = run.straggler();
  const auto cell = [](std::optional<double> value, std::size_t width, const char* unit) {
    return right(value ? in_unit(*value, unit) : "-", width);
  };
  const auto last = [](const Series& series) {
    return series.points.empty() ? std::nullopt : std::optional(series.points.back().value);
  };
  std::size_t count = 0;
  for (const auto& [rank, record] : run.ranks) {
    if (++count == most) break;
    const double since = record.updated - kRecent;
    const auto line =
        str(right(str(rank), 7), cell(record.step_time.mean_since(since), 13, ""),
            cell(record.wait.mean_since(since), 13, ""), cell(last(record.memory), 13, "B"),
            cell(last(record.gpu_memory), 13, "B"), cell(last(record.gpu_busy), 7, ""), "  ",
            launch::printable_line(record.start.host));
    lines.push_back(late && late->rank == rank ? colored(kYellow, line) : line);
  }
}

void MonitorScreen::add_files(std::vector<std::string>& lines, const Run& run, std::size_t most) {
  if (most < 2) return;
  const auto& checkpoints = runs_.checkpoints(run).checkpoints;
  if (!checkpoints.empty()) {
    const auto& last = checkpoints.back();
    const auto name = launch::printable_line(last.path.filename().string());
    lines.push_back(str(colored(kFaint, str(checkpoints.size(), " checkpoints, the last one: ")),
                        name, " ", in_unit(static_cast<double>(last.bytes), "B"), " ",
                        colored(last.problem.empty() ? kGreen : kRed, last.state())));
    --most;
  }
  if (runs_.logs().empty() || most < 2) return;
  const auto& log = runs_.logs().front();
  lines.push_back(colored(
      kFaint, launch::printable_line(log.lexically_relative(runs_.folder()).generic_string())));
  for (auto& line : RunSet::tail(log, most - 1)) lines.push_back(std::move(line));
}

}  // namespace accelerate::detail::commands
