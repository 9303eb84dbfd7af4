// src/core/failure_hook.h - how the rest of the library learns that this process ends by an
// exception that somebody below it caught.
#pragma once

#include <atomic>
#include <string>

namespace accelerate::detail {

/// Called by `record` with the text of the exception, before the process ends. nullptr: nobody
/// wants to know.
inline std::atomic<void (*)(const std::string& text) noexcept> failure_hook = nullptr;

}  // namespace accelerate::detail
