// src/optim/fused_step.h - a step of any optimizer with fused kernels.
#pragma once

#include <torch/optim/optimizer.h>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate::detail::optim {

/// Performs one step of `optimizer` with fused kernels and returns true, if it is an optimizer of
/// accelerate/optim.h or exactly one of the classes in optim/torch_optimizers.h. The results
/// equal those of `optimizer.step()` up to rounding, so both can be mixed.
///
/// Returns false without any change for other optimizers and for gradients that the kernels do not
/// accept (sparse, complex, of another type than their parameter): call `optimizer.step()` then.
///
/// `grad_scale`, if defined, is the factor of the loss: gradients are divided by it, in place.
/// There is no step if `found_inf` is 1. LibTorch's Adam, AdamW, Adagrad and RMSprop count their
/// steps on the host, so a `found_inf` on a GPU is waited for.
ACCELERATE_API bool fused_step(torch::optim::Optimizer& optimizer, const at::Tensor& grad_scale,
                               const at::Tensor& found_inf);
ACCELERATE_API bool fused_step(torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail::optim
