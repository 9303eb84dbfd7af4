// src/core/progress_line.h - the text of a progress bar, as Python's tqdm writes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/progress.h"

namespace accelerate::detail::inline core {

/// What a progress bar shows at one moment.
struct Meter {
  std::int64_t n = 0;
  std::optional<std::int64_t> total = std::nullopt;
  double elapsed_seconds = 0;
  /// Columns of the whole line. Unset: a bar of ten and no limit. 0: no bar.
  std::optional<int> ncols = std::nullopt;
  std::string prefix = {};
  bool ascii = false;
  std::string unit = "it";
  bool unit_scale = false;
  /// Steps per second. Unset: the average.
  std::optional<double> rate = std::nullopt;
  std::string postfix = {};
  double unit_divisor = 1000;
  std::int64_t initial = 0;
};

[[nodiscard]] std::string format_meter(const Meter& meter);

/// "1:02:03" or "02:03".
[[nodiscard]] std::string format_interval(double seconds);
/// Three digits and a prefix: "12.3k", "1.23M".
[[nodiscard]] std::string format_sizeof(double number, double divisor = 1000);
/// A number for a postfix, in whichever form is shorter: "0.25", "1e-5", "123456".
[[nodiscard]] std::string format_number(const PostfixValue& value);
/// "loss=0.25, lr=1e-5".
[[nodiscard]] std::string format_postfix(
    const std::vector<std::pair<std::string, PostfixValue>>& values);

/// Columns that a UTF-8 text takes on a terminal: wide characters two, colours none.
[[nodiscard]] int display_width(std::string_view text);
/// The text cut to at most `columns`.
[[nodiscard]] std::string display_trim(std::string text, int columns);

/// An average in which older values count less and less.
class MovingAverage {
 public:
  explicit MovingAverage(double smoothing) : smoothing_(smoothing) {}
  void add(double value);
  [[nodiscard]] double value() const;

 private:
  double smoothing_;
  double last_ = 0;
  double weight_of_nothing_ = 1;  // how much the initial zero still counts
};

}  // namespace accelerate::detail::inline core
