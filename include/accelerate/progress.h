// accelerate/progress.h - progress bars that one process per host shows.
//
//     for (auto& [x, y] : accelerate::tqdm(loader, {.desc = "epoch 1"})) { ... }
//
//     accelerate::ProgressBar bar({.total = bytes, .unit = "B", .unit_scale = true});
//     while (auto count = read_some()) bar.update(count);
//
// The line reads as Python's tqdm writes it. On a terminal it is redrawn in place and follows its
// width. Elsewhere (a log file) whole lines are written instead: at most one in ten seconds, and
// one at the end. No thread runs behind a bar. With ACCELERATE_PROGRESS=0 no bar is shown at all.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

struct TqdmOptions {
  /// Show the bar on the first process of each host only.
  bool main_process_only = true;
  /// Show nothing at all, whatever the other options say.
  bool disable = false;
  /// Stands before the bar.
  std::string desc = {};
  /// How many steps there will be. Unset: the size of the range if it has one, else no bar but a
  /// count and a rate.
  std::optional<std::int64_t> total = std::nullopt;
  /// Keep the last line when the bar is closed; off removes it.
  bool leave = true;
  /// Seconds between two drawings.
  double mininterval = 0.1;
  /// The width of the line. Unset: that of the terminal, a bar of ten elsewhere. 0: no bar.
  std::optional<int> ncols = std::nullopt;
  /// Draw with # and digits instead of blocks. Unset: where the locale is not UTF-8.
  std::optional<bool> ascii = std::nullopt;
  /// What one step is called.
  std::string unit = "it";
  /// Write 12.3k for 12300.
  bool unit_scale = false;
  /// How much the newest steps count in the rate: 0 the average since the start, 1 only the last.
  double smoothing = 0.3;
  /// Steps done before the bar began, when a run is resumed.
  std::int64_t initial = 0;
  /// Stands behind the rate.
  std::string postfix = {};
  /// What makes a k when `unit_scale` is on: 1000, or 1024 for bytes.
  double unit_divisor = 1000;
  /// Takes what a terminal would get. Unset: stderr.
  std::function<void(std::string_view bytes)> sink = {};
};

/// A value of `ProgressBar::set_postfix`: numbers are shortened as Python's tqdm does.
using PostfixValue = std::variant<std::int64_t, double, std::string>;

/// A progress bar that is moved by hand. Closed by `close` or at the end of its scope.
class ACCELERATE_API ProgressBar {
 public:
  explicit ProgressBar(TqdmOptions options = {});
  explicit ProgressBar(bool) = delete;
  ~ProgressBar();
  ProgressBar(ProgressBar&& other) noexcept;
  ProgressBar& operator=(ProgressBar&& other) noexcept;

  /// Counts `steps`, and draws when it is time.
  void update(std::int64_t steps = 1) {
    n_ += steps;
    if (impl_) draw_if_due();
  }

  void set_description(const std::string& desc);
  /// "loss=0.25, lr=1e-5" behind the rate, with the next drawing that is due.
  void set_postfix(const std::vector<std::pair<std::string, PostfixValue>>& values);
  void set_postfix_str(const std::string& text);
  /// Draws now.
  void refresh();
  /// Counts from 0 again, with a new total if one is given.
  void reset(std::optional<std::int64_t> total = std::nullopt);
  /// Draws a last time and moves to the next line, or removes the line unless `leave` is set.
  void close() noexcept;

  [[nodiscard]] std::int64_t n() const noexcept { return n_; }
  [[nodiscard]] std::optional<std::int64_t> total() const noexcept;
  /// Whether nothing is shown: disabled, not the process that shows it, or closed.
  [[nodiscard]] bool disabled() const noexcept { return impl_ == nullptr; }

 private:
  void draw_if_due();

  struct Impl;
  std::int64_t n_ = 0;
  std::optional<std::int64_t> total_ = std::nullopt;
  std::unique_ptr<Impl> impl_;
};

/// What `tqdm` returns: the range, and a bar that moves along.
template <class Range>
class TqdmRange {
 public:
  template <class Base>
  class Iterator {
   public:
    Iterator(Base base, ProgressBar& bar) : base_(std::move(base)), bar_(&bar) {}
    decltype(auto) operator*() const { return *base_; }
    Iterator& operator++() {
      bar_->update();
      ++base_;
      return *this;
    }
    template <class Sentinel>
    bool operator==(const Sentinel& sentinel) const {
      return !(base_ != sentinel);
    }
    template <class Sentinel>
    bool operator!=(const Sentinel& sentinel) const {
      return base_ != sentinel;
    }

   private:
    mutable Base base_;
    ProgressBar* bar_;
  };

  TqdmRange(Range&& range, TqdmOptions options)
      : range_(std::forward<Range>(range)), bar_(std::move(options)) {}

  auto begin() {
    using Base = std::decay_t<decltype(std::begin(range_))>;
    return Iterator<Base>(std::begin(range_), bar_);
  }
  auto end() { return std::end(range_); }

  [[nodiscard]] ProgressBar& bar() noexcept { return bar_; }

 private:
  Range range_;  // a reference for lvalues
  ProgressBar bar_;
};

/// The range with a progress bar. A named range is referred to and must outlive the loop; a
/// temporary is kept. The bar is closed when the loop is left, by an exception too.
template <class Range>
  requires(!std::is_same_v<std::remove_cvref_t<Range>, bool>)
[[nodiscard]] TqdmRange<Range> tqdm(Range&& range, TqdmOptions options = {}) {
  if constexpr (requires { std::size(range); }) {
    if (!options.total) options.total = static_cast<std::int64_t>(std::size(range));
  }
  return TqdmRange<Range>(std::forward<Range>(range), std::move(options));
}

/// The range comes first; say `{.main_process_only = ...}` for the other.
template <class Bool>
  requires std::is_same_v<Bool, bool>
void tqdm(Bool, TqdmOptions = {}) = delete;

}  // namespace accelerate
