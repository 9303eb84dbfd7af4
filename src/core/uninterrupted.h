// src/core/uninterrupted.h - system calls in spite of signals.
#pragma once

#include <cerrno>

namespace accelerate::detail::inline core {

/// Makes a system call again as long as a signal interrupts it; returns its result.
template <class Call>
auto uninterrupted(const Call& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace accelerate::detail::inline core
