// src/launch/signals.h - signals that are read from a queue.
#pragma once

#include <csignal>
#include <optional>
#include <vector>

#include "core/descriptor.h"

namespace accelerate::detail::launch {

/// Blocks the given signals, SIGTSTP, SIGCONT, SIGWINCH and SIGUSR1 in this process during its
/// lifetime and returns them one by one. Ignores SIGPIPE. A SIGHUP that was ignored before
/// (`nohup`) stays ignored.
class SignalQueue {
 public:
  explicit SignalQueue(const std::vector<int>& signals);
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  /// Readable if a signal is pending.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] std::optional<int> next();

 private:
  sigset_t before_{};
  void (*pipe_before_)(int) = nullptr;
  Descriptor fd_;
};

}  // namespace accelerate::detail::launch
