#include "core/progress_line.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

struct Range {
  char32_t first;
  char32_t last;
};

// East Asian Width W and F of Unicode 14; gaps that are not assigned are bridged.
constexpr Range kWide[] = {
    {0x1100, 0x115f},   {0x231a, 0x231b},   {0x2329, 0x232a},   {0x23e9, 0x23ec},
    {0x23f0, 0x23f0},   {0x23f3, 0x23f3},   {0x25fd, 0x25fe},   {0x2614, 0x2615},
    {0x2648, 0x2653},   {0x267f, 0x267f},   {0x2693, 0x2693},   {0x26a1, 0x26a1},
    {0x26aa, 0x26ab},   {0x26bd, 0x26be},   {0x26c4, 0x26c5},   {0x26ce, 0x26ce},
    {0x26d4, 0x26d4},   {0x26ea, 0x26ea},   {0x26f2, 0x26f3},   {0x26f5, 0x26f5},
    {0x26fa, 0x26fa},   {0x26fd, 0x26fd},   {0x2705, 0x2705},   {0x270a, 0x270b},
    {0x2728, 0x2728},   {0x274c, 0x274c},   {0x274e, 0x274e},   {0x2753, 0x2755},
    {0x2757, 0x2757},   {0x2795, 0x2797},   {0x27b0, 0x27b0},   {0x27bf, 0x27bf},
    {0x2b1b, 0x2b1c},   {0x2b50, 0x2b50},   {0x2b55, 0x2b55},   {0x2e80, 0x303e},
    {0x3041, 0x3247},   {0x3250, 0x4dbf},   {0x4e00, 0xa4c6},   {0xa960, 0xa97c},
    {0xac00, 0xd7a3},   {0xf900, 0xfad9},   {0xfe10, 0xfe19},   {0xfe30, 0xfe6b},
    {0xff01, 0xff60},   {0xffe0, 0xffe6},   {0x16fe0, 0x1b2fb}, {0x1f004, 0x1f004},
    {0x1f0cf, 0x1f0cf}, {0x1f18e, 0x1f18e}, {0x1f191, 0x1f19a}, {0x1f200, 0x1f320},
    {0x1f32d, 0x1f335}, {0x1f337, 0x1f37c}, {0x1f37e, 0x1f393}, {0x1f3a0, 0x1f3ca},
    {0x1f3cf, 0x1f3d3}, {0x1f3e0, 0x1f3f0}, {0x1f3f4, 0x1f3f4}, {0x1f3f8, 0x1f43e},
    {0x1f440, 0x1f440}, {0x1f442, 0x1f4fc}, {0x1f4ff, 0x1f53d}, {0x1f54b, 0x1f54e},
    {0x1f550, 0x1f567}, {0x1f57a, 0x1f57a}, {0x1f595, 0x1f596}, {0x1f5a4, 0x1f5a4},
    {0x1f5fb, 0x1f64f}, {0x1f680, 0x1f6c5}, {0x1f6cc, 0x1f6cc}, {0x1f6d0, 0x1f6d2},
    {0x1f6d5, 0x1f6df}, {0x1f6eb, 0x1f6ec}, {0x1f6f4, 0x1f6fc}, {0x1f7e0, 0x1f7f0},
    {0x1f90c, 0x1f93a}, {0x1f93c, 0x1f945}, {0x1f947, 0x1f9ff}, {0x1fa70, 0x1faf6},
    {0x20000, 0x3134a}};

bool is_wide(char32_t point) {
  const auto* after =
      std::upper_bound(std::begin(kWide), std::end(kWide), point,
                       [](char32_t p, const Range& range) { return p < range.first; });
  return after != std::begin(kWide) && point <= std::prev(after)->last;
}

template <class... Args>
std::string print(const char* format, Args... args) {
  std::array<char, 400> buffer;
  const int length = std::snprintf(buffer.data(), buffer.size(), format, args...);
  return {buffer.data(),
          std::min(static_cast<std::size_t>(std::max(length, 0)), buffer.size() - 1)};
}

// The length of a colour or cursor sequence that begins at `at`, or 0.
std::size_t escape_length(std::string_view text, std::size_t at) {
  if (text.substr(at, 2) != "\x1b[") return 0;
  const auto end = text.find_first_not_of("0123456789;", at + 2);
  if (end == std::string_view::npos || std::isalpha(static_cast<unsigned char>(text[end])) == 0) {
    return 0;
  }
  return end - at + 1;
}

// Calls `visit(start, length, columns)` for each thing that a terminal shows or obeys.
template <class Visit>
void walk(std::string_view text, Visit visit) {
  for (std::size_t at = 0; at < text.size();) {
    if (const auto escape = escape_length(text, at); escape != 0) {
      visit(at, escape, 0);
      at += escape;
      continue;
    }
    const CodePoint point = next_code_point(text, at);
    visit(at, point.length, point.valid && is_wide(point.value) ? 2 : 1);
    at += point.length;
  }
}

std::string bar_of(double fraction, int columns, bool ascii) {
  static const std::vector<std::string> kBlocks = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"};
  static const std::vector<std::string> kAscii = {" ", "1", "2", "3", "4", "5",
                                                  "6", "7", "8", "9", "#"};
  const auto& symbols = ascii ? kAscii : kBlocks;
  const auto steps = static_cast<long long>(symbols.size()) - 1;
  const auto filled =
      static_cast<long long>(std::clamp(fraction, 0.0, 1.0) * columns * static_cast<double>(steps));
  std::string bar;
  for (long long i = 0; i < columns; ++i) {
    bar += symbols[static_cast<std::size_t>(std::clamp(filled - i * steps, 0LL, steps))];
  }
  return bar;
}

std::string count_text(const Meter& meter, std::int64_t count) {
  if (meter.unit_scale) return format_sizeof(static_cast<double>(count), meter.unit_divisor);
  return str(count);
}

std::string rate_text(const Meter& meter, std::optional<double> rate) {
  if (!rate) return str("?", meter.unit, "/s");
  // Slow steps read better the other way round.
  const double inverse = 1 / *rate;
  const bool slow = inverse > 1;
  const double shown = slow ? inverse : *rate;
  const std::string number = meter.unit_scale ? format_sizeof(shown) : print("%5.2f", shown);
  return slow ? str(number, "s/", meter.unit) : str(number, meter.unit, "/s");
}

}  // namespace

std::string format_meter(const Meter& meter) {
  // More steps than promised, or a promise of none: there is no telling how many will come.
  const std::int64_t promised = meter.total.value_or(0);
  const std::int64_t total = meter.n > promised ? 0 : promised;

  auto rate = meter.rate;
  if (!rate && meter.elapsed_seconds != 0) {
    rate = static_cast<double>(meter.n - meter.initial) / meter.elapsed_seconds;
  }
  if (rate && *rate == 0) rate.reset();

  const std::string elapsed = format_interval(meter.elapsed_seconds);
  const std::string speed =
      str(rate_text(meter, rate), meter.postfix.empty() ? "" : ", ", meter.postfix);
  const auto trimmed = [&](std::string line) {
    return meter.ncols.value_or(0) > 0 ? display_trim(std::move(line), *meter.ncols) : line;
  };
  if (total == 0) {
    return trimmed(str(meter.prefix, meter.prefix.empty() ? "" : ": ", count_text(meter, meter.n),
                       meter.unit, " [", elapsed, ", ", speed, "]"));
  }

  const std::string remaining =
      rate ? format_interval(static_cast<double>(total - meter.n) / *rate) : "?";
  const double fraction = static_cast<double>(meter.n) / static_cast<double>(total);
  const bool needs_colon = !meter.prefix.empty() && !meter.prefix.ends_with(": ");
  const std::string left =
      str(meter.prefix, needs_colon ? ": " : "", print("%3.0f%%", fraction * 100));
  const std::string right = str(" ", count_text(meter, meter.n), "/", count_text(meter, total),
                                " [", elapsed, "<", remaining, ", ", speed, "]");
  if (meter.ncols == 0) return left + right;
  const int frame = display_width(left) + display_width(right) + 2;
  const int columns = meter.ncols ? std::max(1, *meter.ncols - frame) : 10;
  return trimmed(str(left, "|", bar_of(fraction, columns, meter.ascii), "|", right));
}

std::string format_interval(double seconds) {
  const auto whole = static_cast<long long>(seconds);
  const long long size = std::llabs(whole);
  const char* sign = seconds < 0 ? "-" : "";
  if (size < 3600) return print("%s%02lld:%02lld", sign, size / 60, size % 60);
  return print("%s%lld:%02lld:%02lld", sign, size / 3600, size / 60 % 60, size % 60);
}

std::string format_sizeof(double number, double divisor) {
  for (const char* unit : {"", "k", "M", "G", "T", "P", "E", "Z"}) {
    const double size = std::abs(number);
    if (size < 9.995) return print("%1.2f%s", number, unit);
    if (size < 99.95) return print("%2.1f%s", number, unit);
    if (size < 999.5) return print("%3.0f%s", number, unit);
    number /= divisor;
  }
  return print("%3.1fY", number);
}

std::string format_number(const PostfixValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return std::string(trim(*text));
  const bool integer = std::holds_alternative<std::int64_t>(value);
  const double number =
      integer ? static_cast<double>(std::get<std::int64_t>(value)) : std::get<double>(value);
  std::string full = integer ? str(std::get<std::int64_t>(value)) : python_repr(number);
  std::string brief = print("%.3g", number);
  // "1e-05" is one digit longer than it has to be.
  for (const std::string_view exponent : {"e+0", "e-0"}) {
    if (const auto at = brief.find(exponent); at != std::string::npos) brief.erase(at + 2, 1);
  }
  return brief.size() < full.size() ? brief : full;
}

std::string format_postfix(const std::vector<std::pair<std::string, PostfixValue>>& values) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : values) parts.push_back(str(name, "=", format_number(value)));
  return join(parts);
}

int display_width(std::string_view text) {
  int width = 0;
  walk(text, [&](std::size_t, std::size_t, int columns) { width += columns; });
  return width;
}

std::string display_trim(std::string text, int columns) {
  int width = 0;
  std::size_t keep = 0;
  bool coloured = false;
  walk(text, [&](std::size_t start, std::size_t length, int own) {
    width += own;
    if (width > columns) return;
    keep = start + length;
    coloured = coloured || own == 0;
  });
  if (keep == text.size()) return text;
  text.resize(keep);
  constexpr std::string_view kReset = "\x1b[0m";
  if (coloured && !text.ends_with(kReset)) text += kReset;
  return text;
}

void MovingAverage::add(double value) {
  last_ = smoothing_ * value + (1 - smoothing_) * last_;
  weight_of_nothing_ *= 1 - smoothing_;
}

double MovingAverage::value() const {
  return weight_of_nothing_ < 1 ? last_ / (1 - weight_of_nothing_) : 0;
}

}  // namespace accelerate::detail::inline core
