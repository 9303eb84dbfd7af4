// src/state/countdown.h - a wait for other processes: when it ends, and when to log its progress.
//
// Internal, no Torch.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "core/text.h"

namespace accelerate::detail::state {

/// "1500 ms", "30 s".
[[nodiscard]] inline std::string in_words(std::chrono::milliseconds time) {
  if (time.count() % 1000 != 0) return str(time.count(), " ms");
  return str(time.count() / 1000, " s");
}

class Countdown {
 public:
  using Clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  explicit Countdown(milliseconds timeout, Clock::time_point since = Clock::now())
      : timeout_(std::min<milliseconds>(timeout, kLongest)), since_(since) {}

  [[nodiscard]] milliseconds timeout() const noexcept { return timeout_; }
  /// Never negative.
  [[nodiscard]] milliseconds left() const {
    const auto until = since_ + timeout_ - Clock::now();
    return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(until));
  }
  [[nodiscard]] bool over() const { return left() == milliseconds(0); }

  /// Whether to log now: after 5, 10, 30 and 60 seconds, then less and less often.
  [[nodiscard]] bool notice_is_due() {
    if (Clock::now() - since_ < next_notice_ || over()) return false;
    const auto factor = next_notice_ == std::chrono::seconds(10) ? 3 : 2;
    next_notice_ *= factor;
    return true;
  }
  /// "25 s left of 30 s".
  [[nodiscard]] std::string text() const {
    return str(std::chrono::round<std::chrono::seconds>(left()).count(), " s left of ",
               in_words(timeout_));
  }

 private:
  // Some programs ask for the longest duration there is, to which nothing can be added.
  static constexpr std::chrono::hours kLongest{24 * 365};

  milliseconds timeout_;
  Clock::time_point since_;
  std::chrono::seconds next_notice_{5};
};

}  // namespace accelerate::detail::state
