// src/profiler/event_tree.h - from recorded events to rows by operator, by the rules of
// torch.profiler. No Torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accelerate/accelerator/profiler.h"

namespace accelerate::detail::profiler {

struct ProfileEvent {
  std::string name = {};
  std::uint64_t thread = 0;
  std::int64_t start = 0;  ///< nanoseconds
  std::int64_t end = 0;
  bool on_device = false;
  /// Began on one thread and ended on another.
  bool async = false;
  std::uint64_t id = 0;
  /// The id of the event on the host that has launched this one; 0 for none.
  std::uint64_t launched_by = 0;
  std::vector<std::vector<std::int64_t>> shapes = {};
  std::int64_t flops = 0;
  std::vector<std::string> stack = {};
};

/// Memory allocated (positive) or freed.
struct MemoryEvent {
  std::uint64_t thread = 0;
  std::int64_t time = 0;  ///< nanoseconds
  std::int64_t bytes = 0;
  bool on_device = false;
};

/// Rows in the order in which their first events began.
[[nodiscard]] std::vector<KeyAverage> average_events(std::vector<ProfileEvent> events,
                                                     std::vector<MemoryEvent> memory,
                                                     bool group_by_input_shape);

}  // namespace accelerate::detail::profiler
