// src/comm/collective_totals.h - what collectives move and how long they take, while it is counted.
//
// Internal, without Torch. For the profiler: nothing is counted otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::detail::comm {

/// The collectives of one kind on this process.
struct CollectiveTotal {
  std::string kind = {};  ///< as the program called it: "gather", "all_reduce", "barrier"
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  ///< that this process gave to them
  /// From the call to its end, with the time in which it waited for other processes. Calls may
  /// overlap.
  std::chrono::nanoseconds under_way = {};
};

/// Starts to count from 0, or ends it.
void count_collectives(bool on);
/// In the order of their first call.
[[nodiscard]] std::vector<CollectiveTotal> collective_totals();

extern std::atomic<bool> collectives_counted;
/// Adds a call that has ended, if calls are counted.
void add_collective(const char* kind, std::int64_t bytes, std::chrono::nanoseconds under_way);

}  // namespace accelerate::detail::comm
