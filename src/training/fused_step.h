// src/training/fused_step.h - a step of the user's own torch::optim object, with fused kernels.
#pragma once

#include <torch/optim/optimizer.h>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate::detail {

/// Performs one step of `optimizer` and returns true, where it is exactly one of
/// torch::optim::AdamW, Adam, SGD, Adagrad and RMSprop, or one of accelerate/optim.h. Parameters,
/// state and numbers are those of `optimizer.step()`, but for rounding: the two can be mixed.
///
/// Returns false, and has done nothing, for another optimizer and for gradients that the kernels do
/// not take (sparse, complex, of another type than their parameter): call `optimizer.step()`.
///
/// `grad_scale`, where defined, is what the loss was multiplied with: gradients are divided by it,
/// in place. Where `found_inf` is 1 there is no step. LibTorch's Adam, AdamW, Adagrad and RMSprop
/// count their steps on the host, so that a `found_inf` on a GPU has to be waited for.
ACCELERATE_API bool fused_step(torch::optim::Optimizer& optimizer, const at::Tensor& grad_scale,
                               const at::Tensor& found_inf);
ACCELERATE_API bool fused_step(torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail
