// src/launch/signals.h - signals as something to read, instead of something that interrupts.
#pragma once

#include <csignal>
#include <optional>
#include <vector>

#include "launch/channel.h"

namespace accelerate::detail {

/// Blocks the given signals, SIGTSTP, SIGCONT and SIGWINCH in this process as long as it lives, and
/// hands them out one by one. SIGPIPE is ignored meanwhile. A SIGHUP that was ignored before
/// (`nohup`) stays so.
class SignalQueue {
 public:
  explicit SignalQueue(const std::vector<int>& signals);
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  /// Readable when a signal waits.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] std::optional<int> next();

 private:
  sigset_t before_{};
  void (*pipe_before_)(int) = nullptr;
  Descriptor fd_;
};

}  // namespace accelerate::detail
