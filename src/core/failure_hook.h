// src/core/failure_hook.h - tells the rest of the library that an exception ends this process.
#pragma once

#include <atomic>
#include <string>

namespace accelerate::detail::inline core {

/// Called by `record` with the text of the exception, before the process ends. May be nullptr.
inline std::atomic<void (*)(const std::string& text) noexcept> failure_hook = nullptr;

}  // namespace accelerate::detail::inline core
