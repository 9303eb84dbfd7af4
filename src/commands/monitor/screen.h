// src/commands/monitor/screen.h - `accelerate monitor --tui` as a state machine: keys in, lines
// out.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "commands/menu.h"
#include "commands/monitor/runs.h"
#include "commands/terminal.h"

namespace accelerate::detail::commands {

class MonitorScreen {
 public:
  /// `runs` must outlive it.
  MonitorScreen(RunSet& runs, TerminalStyle style) : runs_(runs), style_(style) {}

  /// False if the key ends the program.
  bool press(const KeyPress& press);
  /// What to show: no line is wider than the screen, and there are as many as it has rows.
  [[nodiscard]] std::vector<std::string> lines(const ScreenSize& size, double now);

 private:
  struct Curve;
  [[nodiscard]] std::vector<Curve> curves_of(const Run& run) const;
  [[nodiscard]] const Run* chosen() const;
  void add_chart(std::vector<std::string>& lines, const Curve& curve, const ScreenSize& size,
                 double time_zero) const;
  void add_ranks(std::vector<std::string>& lines, const Run& run, std::size_t most) const;
  void add_files(std::vector<std::string>& lines, const Run& run, std::size_t most);
  [[nodiscard]] std::string colored(const char* color, const std::string& text) const;

  RunSet& runs_;
  TerminalStyle style_;
  int run_ = -1;  ///< its id; the latest run if there is none of it
  std::size_t curve_ = 0;
  Axis axis_ = Axis::kStep;
  bool log_scale_ = false;
};

/// A picture of dots, two columns and four rows in each character.
class DotPicture {
 public:
  DotPicture(std::size_t columns, std::size_t rows, bool utf8);

  [[nodiscard]] std::size_t width() const { return columns_ * 2; }
  [[nodiscard]] std::size_t height() const { return rows_ * 4; }
  /// From the top left. The character takes `color`.
  void set(std::size_t x, std::size_t y, const char* color);
  /// The dots from `y0` to `y1` of a column.
  void bar(std::size_t x, std::size_t y0, std::size_t y1, const char* color);
  /// A row of characters; with their colours unless `plain`.
  [[nodiscard]] std::string row(std::size_t row, bool plain) const;

 private:
  struct Cell {
    unsigned dots = 0;
    const char* color = "";
  };
  std::size_t columns_;
  std::size_t rows_;
  bool utf8_;
  std::vector<Cell> cells_;
};

}  // namespace accelerate::detail::commands
