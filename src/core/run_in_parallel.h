// src/core/run_in_parallel.h - independent pieces of work on a few threads.
#pragma once

#include <cstddef>
#include <functional>

namespace accelerate::detail::inline core {

/// Calls `work(0)` to `work(count - 1)` on at most `threads` threads, this one among them. After
/// the first exception no further call begins, and it is thrown here.
void run_in_parallel(std::size_t count, std::size_t threads,
                     const std::function<void(std::size_t)>& work);

}  // namespace accelerate::detail::inline core
