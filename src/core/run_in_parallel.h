// src/core/run_in_parallel.h - independent pieces of work on a few threads.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

namespace accelerate::detail::inline core {

/// Calls `work(0)` to `work(count - 1)` on at most `threads` threads, this one among them. After
/// the first exception no further call begins, and it is thrown here.
void run_in_parallel(std::size_t count, std::size_t threads,
                     const std::function<void(std::size_t)>& work);

/// How many threads a transfer between files and memory uses if there is enough to do.
[[nodiscard]] std::size_t transfer_threads();

/// Work on `length` bytes of an item, from `begin` on.
using ChunkWork = std::function<void(std::size_t item, std::size_t begin, std::size_t length)>;

/// Calls `work` for all bytes of all items, `sizes[i]` each, large ones cut into chunks, on up to
/// `transfer_threads()` threads. Exceptions as above.
void run_in_chunks(std::span<const std::size_t> sizes, const ChunkWork& work);

}  // namespace accelerate::detail::inline core
