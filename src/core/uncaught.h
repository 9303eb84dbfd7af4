// src/core/uncaught.h - how a process of a group ends by an uncaught exception.
#pragma once

#include <atomic>
#include <string>

#include "accelerate/errors.h"

namespace accelerate::detail::inline core {

/// Called with the text of an exception that ends this process, so that the rest of the library
/// tells the other ranks. May be nullptr.
inline std::atomic<void (*)(const std::string& text) noexcept> failure_hook = nullptr;

/// Writes the error to stderr and ends the process with the exit code of a `CommError`.
[[noreturn]] void end_with_error(const CommError& error);

/// From now on an uncaught `CommError` ends this process by `end_with_error`. For other exceptions
/// the `failure_hook` is called first.
void handle_uncaught_exceptions();

}  // namespace accelerate::detail::inline core
