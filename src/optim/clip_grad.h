// src/optim/clip_grad.h - gradient clipping with PyTorch's numbers, without waiting for a GPU.
//
// Used by `Accelerator::clip_grad_norm_` and `clip_grad_value_`, which unscale float16 gradients
// first.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

#include "accelerate/api.h"

namespace accelerate::detail::parallel {
class Engine;
}  // namespace accelerate::detail::parallel

namespace accelerate::detail::optim {

/// The norm of all `tensors` as one vector: a tensor without dimensions on the device of the first
/// one; 0 on the CPU if there are none. `norm_type` may be infinite, negative or 0. Waits for the
/// device only with `error_if_nonfinite`, which throws `StateError` if the norm is infinite or NaN.
/// Throws `ArgumentError` for sparse or integer tensors and for a NaN `norm_type`.
[[nodiscard]] ACCELERATE_API at::Tensor get_total_norm(std::span<const at::Tensor> tensors,
                                                       double norm_type = 2.0,
                                                       bool error_if_nonfinite = false);

/// Collective if one of `engines` shards gradients. Multiplies the gradients of `parameters` by
/// min(1, max_norm / (norm + 1e-6)) in place and returns their norm before, over all processes.
/// Ignores parameters without gradient. Throws like `get_total_norm`, and `ArgumentError` for a
/// `max_norm` that is negative or NaN; nothing has changed then.
ACCELERATE_API at::Tensor clip_grad_norm_(
    std::span<const at::Tensor> parameters, double max_norm, double norm_type = 2.0,
    bool error_if_nonfinite = false,
    std::span<const std::shared_ptr<parallel::Engine>> engines = {});

/// Clamps the gradients of `parameters` to [-clip_value, clip_value] in place. Throws
/// `ArgumentError` for a `clip_value` that is negative or NaN and for sparse or complex gradients;
/// nothing has changed then.
ACCELERATE_API void clip_grad_value_(
    std::span<const at::Tensor> parameters, double clip_value,
    std::span<const std::shared_ptr<parallel::Engine>> engines = {});

}  // namespace accelerate::detail::optim
