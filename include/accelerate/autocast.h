// accelerate/autocast.h - a part of a program that computes in a smaller type where that is safe.
//
//     const AutocastScope scope(at::kCPU, at::kBFloat16);
//     auto out = net->forward(x);  // matrix products in bfloat16, sums in float32
//
// As `torch.autocast`. It holds for one thread; the backward pass needs no scope.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "accelerate/api.h"
#include "accelerate/kwargs.h"

namespace accelerate {

/// Autocast from here to the end of the scope; then all is as it was found. Scopes nest.
class [[nodiscard]] AutocastScope {
 public:
  /// Does nothing.
  AutocastScope() noexcept = default;

  /// `kwargs.enabled = false` makes an island of full precision in an outer scope. Weights that
  /// were converted are forgotten when the outermost scope ends. Throws `ArgumentError` for a
  /// device type that has no autocast, and for a type that autocast does not compute in there.
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
