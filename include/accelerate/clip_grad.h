// accelerate/clip_grad.h - gradients kept small, with PyTorch's numbers and no wait for the device.
//
// The work behind `Accelerator::clip_grad_norm_` and `clip_grad_value_`, which also divide by the
// factor of float16 first.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

#include "accelerate/api.h"

namespace accelerate::detail {

class Engine;

/// The norm of all `tensors` taken as one vector: no dimension, on the device of the first of them.
/// 0 on the CPU when there are none. `norm_type` may be infinite, negative or 0. Waits for the
/// device with `error_if_nonfinite` only, which throws `StateError` for a norm that is infinite or
/// NaN. Throws `ArgumentError` for tensors that are sparse or integers, and for a NaN `norm_type`.
[[nodiscard]] ACCELERATE_API at::Tensor get_total_norm(std::span<const at::Tensor> tensors,
                                                       double norm_type = 2.0,
                                                       bool error_if_nonfinite = false);

/// Collective if one of `engines` shards gradients. Multiplies the gradients of `parameters` by
/// min(1, max_norm / (norm + 1e-6)), in place, and returns the norm that they had, over all
/// processes. Parameters without gradient are left out. Throws as `get_total_norm`, and
/// `ArgumentError` for a `max_norm` that is negative or NaN; nothing has changed then.
ACCELERATE_API at::Tensor clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                                          double norm_type = 2.0, bool error_if_nonfinite = false,
                                          std::span<const std::shared_ptr<Engine>> engines = {});

/// Puts the elements of the gradients of `parameters` between -clip_value and clip_value, in place.
/// Throws `ArgumentError` for a `clip_value` that is negative or NaN, and for gradients that are
/// sparse or complex; nothing has changed then.
ACCELERATE_API void clip_grad_value_(std::span<const at::Tensor> parameters, double clip_value,
                                     std::span<const std::shared_ptr<Engine>> engines = {});

}  // namespace accelerate::detail
