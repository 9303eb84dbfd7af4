// src/core/power_sgd_options.h - the content of `comm_state_option` for the PowerSGD hooks.
#pragma once

#include <cstdint>

#include "accelerate/value.h"

namespace accelerate::detail::inline core {

/// Python's `PowerSGDState`, with its defaults.
struct PowerSgdOptions {
  std::int64_t matrix_approximation_rank = 1;
  std::int64_t start_iter = 1000;
  double min_compression_rate = 2;
  bool use_error_feedback = true;
  bool warm_start = true;
  double orthogonalization_epsilon = 0;
  std::int64_t random_seed = 0;
  std::int64_t stats_logging_frequency = 10000;
  bool batch_tensors_with_same_shape = false;

  /// Reads `comm_state_option`. Throws `ConfigError` for an unknown key, a value of the wrong kind
  /// or out of range, and for options that contradict each other.
  [[nodiscard]] static PowerSgdOptions of(const Value::Dict& options);
};

}  // namespace accelerate::detail::inline core
