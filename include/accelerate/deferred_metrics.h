// accelerate/deferred_metrics.h - losses and metrics that nobody waits for until they are read.
//
//     DeferredMetrics metrics;
//     for (auto& [x, y] : loader) {
//       ...
//       metrics.add("loss", loss);                         // stays on the GPU
//       metrics.add("accuracy", hits.mean(), x.size(0));   // weighted by the size of the batch
//       if (step % 100 == 0) accelerator.print(metrics.reduce().at("loss").as_double());
//     }
//
// `loss.item()` in every step makes the program wait for the GPU, which then waits for the program.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <source_location>
#include <string_view>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

/// Weighted means of values by name, in the order in which names came. Not for several threads at
/// once.
class ACCELERATE_API DeferredMetrics {
 public:
  DeferredMetrics();
  DeferredMetrics(DeferredMetrics&&) noexcept;
  DeferredMetrics& operator=(DeferredMetrics&&) noexcept;
  ~DeferredMetrics();

  /// Counts one value of any real type and device; gradients do not flow. Sums are of float64, of
  /// float32 where the device has none. Does not wait: a kernel on the tensor's device at most.
  /// Throws `ArgumentError` for a tensor of more or less than one element, and for a weight that is
  /// negative, infinite or NaN.
  void add(std::string_view name, const at::Tensor& value, double weight = 1);

  /// The means since the last `read` or `reduce`, `read().at("loss").as_double()`, say, and begins
  /// anew. One copy per device, which is waited for. Names without a value since then are left out;
  /// NaN where all weights were 0.
  Value::Dict read();
  /// The same and goes on.
  [[nodiscard]] Value::Dict peek() const;

  /// Collective. As `read`, over the values of all processes, which may have seen different numbers
  /// of them, in the order of process 0; the same on each. One message while names and sums fit
  /// into 4 KB. Every process must have added to each name at some time, with weight 0 if need be:
  /// else all throw `CommError`, which says which process lacks which name, and nothing is
  /// forgotten.
  Value::Dict reduce(std::source_location where = std::source_location::current());

 private:
  class Sums;
  std::unique_ptr<Sums> sums_;
};

}  // namespace accelerate
