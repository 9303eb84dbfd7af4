// accelerate/deferred_metrics.h - losses and metrics that stay on the device until they are read.
//
//     DeferredMetrics metrics;
//     for (auto& [x, y] : loader) {
//       ...
//       metrics.add("loss", loss);                         // stays on the GPU
//       metrics.add("accuracy", hits.mean(), x.size(0));   // weighted by the size of the batch
//       if (step % 100 == 0) accelerator.print(metrics.reduce().at("loss").as_double());
//     }
//
// `loss.item()` in every step stops the program until the GPU is idle.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <source_location>
#include <string_view>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

/// Weighted means of values by name, in the order of their first `add`. Not thread-safe.
class ACCELERATE_API DeferredMetrics {
 public:
  DeferredMetrics();
  DeferredMetrics(DeferredMetrics&&) noexcept;
  DeferredMetrics& operator=(DeferredMetrics&&) noexcept;
  ~DeferredMetrics();

  /// Adds one value of any real type and device, without gradient. Sums are float64, or float32 on
  /// devices without it. Starts at most one kernel on the tensor's device and does not wait.
  /// Throws `ArgumentError` for a tensor that has not exactly one element and for a weight that is
  /// negative, infinite or NaN.
  void add(std::string_view name, const at::Tensor& value, double weight = 1);

  /// Returns the means since the last `read` or `reduce` and resets them:
  /// `read().at("loss").as_double()`. Waits for one copy per device. Names without a new value are
  /// left out; a mean is NaN if all its weights were 0.
  Value::Dict read();
  /// Like `read`, without the reset.
  [[nodiscard]] Value::Dict peek() const;

  /// Collective. Like `read`, over the values of all processes; they may have added different
  /// numbers of values. The result is the same on each, in the order of process 0. Sends one
  /// message while names and sums fit into 4 KB. Every process must have added to each name at
  /// least once, with weight 0 if it has no value. Otherwise all throw `CommError` that says which
  /// process lacks which name, and nothing is reset.
  Value::Dict reduce(std::source_location where = std::source_location::current());

 private:
  class Sums;
  std::unique_ptr<Sums> sums_;
};

}  // namespace accelerate
