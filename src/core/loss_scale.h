// src/core/loss_scale.h - DeepSpeed's rule for the factor on the loss in float16.
#pragma once

#include <cstdint>

#include "accelerate/api.h"
#include "core/deepspeed_settings.h"

namespace accelerate::detail::inline core {

/// Halves the factor after gradients that overflow `hysteresis` times, and doubles it after
/// `window` iterations without. A static factor (`loss_scale` of the settings) never changes.
class ACCELERATE_API DeepSpeedLossScale {
 public:
  explicit DeepSpeedLossScale(const DeepSpeedSettings& settings);

  [[nodiscard]] double value() const noexcept { return scale_; }
  /// An iteration has ended. Returns the factor of the next one. Throws `StateError` if the factor
  /// would have to go below its minimum.
  double update(bool overflow);

  /// cur_scale, cur_hysteresis, clean_iterations.
  [[nodiscard]] Value::Dict state_dict() const;
  /// Throws `ArgumentError` if an entry is missing.
  void load_state_dict(const Value& state);

 private:
  double scale_;
  double minimum_;
  std::int64_t window_;
  std::int64_t full_hysteresis_;
  std::int64_t hysteresis_;
  bool refill_always_;
  bool dynamic_;
  /// Iterations without overflow since the last one with it.
  std::int64_t clean_ = 0;
};

}  // namespace accelerate::detail::inline core
