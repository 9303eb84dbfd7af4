// accelerate/precision/autocast.h - a scope that computes in a lower precision where that is
// safe.
//
//     const AutocastScope scope(at::kCPU, at::kBFloat16);
//     auto out = net->forward(x);  // matrix products in bfloat16, sums in float32
//
// Works like `torch.autocast`: for the current thread only; the backward pass needs no scope.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "accelerate/api.h"
#include "accelerate/kwargs.h"

namespace accelerate {

/// Enables autocast until the end of the scope and restores the previous settings. Scopes nest.
class [[nodiscard]] AutocastScope {
 public:
  /// A scope without effect.
  AutocastScope() noexcept = default;

  /// `kwargs.enabled = false` computes in full precision inside an outer scope. The cache of
  /// converted weights is cleared when the outermost scope ends. Throws `ArgumentError` for a
  /// device type without autocast and for a type that autocast does not support there.
  ACCELERATE_API AutocastScope(c10::DeviceType device_type, at::ScalarType dtype,
                               const AutocastKwargs& kwargs = {});
  ACCELERATE_API ~AutocastScope();

  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  bool active_ = false;
  c10::DeviceType device_type_ = c10::DeviceType::CPU;
  bool was_enabled_ = false;
  bool cache_was_enabled_ = false;
  at::ScalarType dtype_was_ = at::ScalarType::Undefined;
};

}  // namespace accelerate
