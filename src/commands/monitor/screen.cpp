#include "commands/monitor/screen.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
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

/// Four digits, and large numbers whole.
std::string short_number(double value) {
  std::array<char, 32> text{};
  const double size = std::abs(value);
  std::snprintf(text.data(), text.size(), size >= 1000 && size < 1e9 ? "%.0f" : "%.4g", value);
  return text.data();
}

std::string in_unit(double value, const std::string& unit) {
  if (unit == "B") return format_sizeof(value) + "B";
  return str(short_number(value), unit.empty() ? "" : " ", unit);
}

/// Blanks before, up to `width`.
std::string right(const std::string& text, std::size_t width) {
  const auto own = static_cast<std::size_t>(display_width(text));
  return std::string(width - std::min(own, width), ' ') + text;
}

const char* color_of(RunState state) {
  constexpr std::array kColors{kGreen, kBold, kRed, kYellow};  // as `RunState` lists them
  return kColors.at(static_cast<std::size_t>(state));
}

/// The part of the plane that a picture shows.
struct Frame {
  double from = INFINITY;
  double to = -INFINITY;
  double low = INFINITY;
  double high = -INFINITY;
  bool log = false;

  [[nodiscard]] std::size_t x_of(double x, const DotPicture& picture) const {
    const double part = to > from ? (x - from) / (to - from) : 0;
    return static_cast<std::size_t>(std::lround(part * static_cast<double>(picture.width() - 1)));
  }
  [[nodiscard]] std::size_t y_of(double value, const DotPicture& picture) const {
    const auto scaled = [&](double y) { return log ? std::log10(y) : y; };
    const double span = scaled(high) - scaled(low);
    const double part = span > 0 ? (scaled(high) - scaled(value)) / span : 0.5;
    return static_cast<std::size_t>(std::lround(part * static_cast<double>(picture.height() - 1)));
  }
};

void draw_curve(DotPicture& picture, const Frame& frame, const std::vector<Bucket>& curve,
                const char* color) {
  for (std::size_t i = 0; i < curve.size(); ++i) {
    const auto x = frame.x_of(curve[i].x, picture);
    picture.bar(x, frame.y_of(curve[i].low, picture), frame.y_of(curve[i].high, picture), color);
    if (i + 1 == curve.size()) return;
    // Columns without a point are crossed by a line.
    const auto end = frame.x_of(curve[i + 1].x, picture);
    const double rise = curve[i + 1].mean - curve[i].mean;
    for (auto at = x + 1; at < end; ++at) {
      const double part = static_cast<double>(at - x) / static_cast<double>(end - x);
      picture.set(at, frame.y_of(curve[i].mean + part * rise, picture), color);
    }
  }
}

}  // namespace

// ---- dots ---------------------------------------------------------------------------------------

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

// ---- what is shown ------------------------------------------------------------------------------

/// A chart to choose.
struct MonitorScreen::Curve {
  std::string title;
  std::string unit;
  std::vector<std::pair<std::string, const Series*>> lines;
};

std::vector<MonitorScreen::Curve> MonitorScreen::curves_of(const Run& run) const {
  std::vector<Curve> curves;
  for (const bool loss : {true, false}) {  // the loss first
    for (const auto& [name, series] : run.metrics) {
      const bool is_loss = to_lower(name).find("loss") != std::string::npos;
      if (is_loss == loss) curves.push_back({name, "", {{"", &series}}});
    }
  }
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
  if (press.key == Key::kUp) move(-1);
  if (press.key == Key::kDown) move(1);
  if (press.key == Key::kLeft) curve_ = (curve_ + count - 1) % count;
  if (press.key == Key::kRight || press.character == '\t') curve_ = (curve_ + 1) % count;
  if (press.character == 'l') log_scale_ = !log_scale_;
  if (press.character == 'x') axis_ = axis_ == Axis::kStep ? Axis::kTime : Axis::kStep;
  return press.key != Key::kEnd && press.character != 'q';
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
    const auto rate = run->throughput.mean_since(run->updated() - kTableSeconds);
    const auto place = std::ranges::find(runs, run) - runs.begin() + 1;
    lines.push_back(str(
        colored(kBold, launch::printable_line(run->name())), "  ",
        colored(color_of(state), std::string(to_string(state))), "  step ",
        std::llround(run->steps()),
        rate ? str("  ", short_number(*rate), run->counts_samples ? " samples/s" : " steps/s") : "",
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
  Frame frame;
  for (const auto& [label, series] : curve.lines) {
    const auto range = x_range(series->points, view).value_or(std::pair(INFINITY, -INFINITY));
    frame.from = std::min(frame.from, range.first);
    frame.to = std::max(frame.to, range.second);
  }
  view.from = frame.from;
  view.to = frame.to;
  std::vector<std::vector<Bucket>> shown;
  for (const auto& [label, series] : curve.lines) {
    for (const auto& bucket : shown.emplace_back(curve_of(series->points, view))) {
      frame.low = std::min(frame.low, bucket.low);
      frame.high = std::max(frame.high, bucket.high);
    }
  }
  frame.log = log_scale_ && frame.low > 0;
  std::string title = colored(kBold, launch::printable_line(curve.title));
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const auto& [label, series] = curve.lines[i];
    const auto* color = kLineColors.at(i % kLineColors.size());
    draw_curve(picture, frame, shown[i], color);
    if (series->points.empty()) continue;
    const auto last = in_unit(series->points.back().value, curve.unit);
    title += str("  ", colored(color, str(label, label.empty() ? "" : " ", last)));
    if (series->not_finite > 0) title += colored(kRed, "  not finite at times");
  }
  lines.push_back(title);
  const std::string unit = curve.unit == "B" ? "B" : "";
  for (std::size_t row = 0; row < rows; ++row) {
    const auto label = row == 0          ? in_unit(frame.high, unit)
                       : row + 1 == rows ? in_unit(frame.low, unit)
                                         : "";
    lines.push_back(
        str(colored(kFaint, right(label, kLabelWidth)), " ", picture.row(row, !style_.color)));
  }
  const auto x_text = [&](double x) {
    return axis_ == Axis::kTime ? format_interval(x) : short_number(x);
  };
  const auto start = x_text(frame.from);
  const auto end = right(x_text(frame.to), columns - std::min(columns, start.size()));
  lines.push_back(colored(kFaint, str(std::string(kLabelWidth + 1, ' '), start, end)));
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
  std::size_t count = 0;
  for (const auto& [rank, record] : run.ranks) {
    if (++count == most) break;
    const double since = record.updated - kTableSeconds;
    const auto line =
        str(right(str(rank), 7), cell(record.step_time.mean_since(since), 13, ""),
            cell(record.wait.mean_since(since), 13, ""), cell(record.memory.last(), 13, "B"),
            cell(record.gpu_memory.last(), 13, "B"), cell(record.gpu_busy.last(), 7, ""), "  ",
            launch::printable_line(record.host));
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
