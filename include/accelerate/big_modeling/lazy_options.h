// accelerate/big_modeling/lazy_options.h - how weights that are not on their device come and go.
//
// ACCELERATE_OFFLOAD_TIMEOUT is how many seconds an operator waits for weights on disk (600).
//
// Part of accelerate/big_modeling.h.
#pragma once

#include <cstdint>
#include <optional>

#include "accelerate/modeling/device_map.h"

namespace accelerate {

struct LazyOptions {
  /// How many groups of weights are brought ahead of their use.
  std::int64_t prefetch_depth = 1;
  /// A group is released when as many other groups have been used after it.
  std::int64_t keep = 1;
  /// The most that groups on the device may take; fewer are brought ahead then. One group always
  /// fits. Unset: (prefetch_depth + keep) times the largest group.
  std::optional<MemorySize> max_resident_bytes = std::nullopt;
  /// How much host memory may be pinned; the rest is slower. Unset: all.
  std::optional<MemorySize> pinned_bytes = std::nullopt;
  /// Weights on disk may be changed in place, and are written to their files. Off: an operator
  /// that writes to one throws `StateError`.
  bool writable = false;
  /// Take the weights that the offload folder already has, as Python does. Off: other values than
  /// the model's are an error, and so are other dtypes.
  bool reuse = false;
  /// Also on the CPU, where weights in host memory need not move: shows on a machine without a GPU
  /// what a program does there.
  bool manage_on_cpu = false;

  bool operator==(const LazyOptions&) const = default;
};

/// What has happened to the weights of a model so far.
struct LazyStats {
  std::int64_t managed_bytes = 0;
  /// On the device now, in use or brought ahead.
  std::int64_t resident_bytes = 0;
  std::int64_t peak_resident_bytes = 0;
  /// Groups that were brought.
  std::int64_t fills = 0;
  /// Operators that found their weights on the device.
  std::int64_t hits = 0;
  /// Groups that had been brought ahead when they were used.
  std::int64_t prefetch_hits = 0;
  /// Groups that were changed and copied back.
  std::int64_t writebacks = 0;
  std::int64_t bytes_read = 0;

  bool operator==(const LazyStats&) const = default;
};

}  // namespace accelerate
