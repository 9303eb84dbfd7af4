// accelerate/detail/core/refuse_empty.h - the error of a prepared object that holds nothing.
#pragma once

#include <string>

#include "accelerate/errors.h"

namespace accelerate::detail::inline core {

/// Throws `StateError`. `what` is "model", "optimizer" or "scheduler".
[[noreturn]] inline void refuse_empty(const std::string& what) {
  throw StateError("This prepared " + what +
                   " is empty: it was never assigned, or free_memory has reset it.");
}

}  // namespace accelerate::detail::inline core
