// accelerate/optimizer_state.h - what any optimizer knows of one parameter, under Python's names.
//
//     for (const auto& [name, tensor] : optimizer_state_of(adamw, weight)) ...  // step, exp_avg,
//     ...
//
// For the optimizers of accelerate/optim.h and exactly AdamW, Adam, SGD, Adagrad and RMSprop of
// torch::optim. For all others, LBFGS and classes derived from these five among them, each function
// throws `UnsupportedError` that names the class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include "accelerate/api.h"
#include "accelerate/optim.h"

namespace accelerate::detail {

/// The state of a parameter in Python's order, empty where there is none. The tensors are those of
/// the optimizer, but for `step` of LibTorch's: a new float32 of no dimension on the CPU.
[[nodiscard]] ACCELERATE_API NamedTensors optimizer_state_of(torch::optim::Optimizer& optimizer,
                                                             const at::Tensor& parameter);

/// Puts copies of `tensors` in place of the state of a parameter, with its device and type; no
/// tensors: as `drop_optimizer_state_of`. Throws `ArgumentError` for a parameter that is in no
/// group, a name that is unknown or missing, and a shape that does not fit; nothing has changed
/// then.
ACCELERATE_API void set_optimizer_state_of(torch::optim::Optimizer& optimizer,
                                           const at::Tensor& parameter,
                                           const NamedTensors& tensors);

/// Forgets the state of a parameter: it is as before the first step.
ACCELERATE_API void drop_optimizer_state_of(torch::optim::Optimizer& optimizer,
                                            const at::Tensor& parameter);

/// Moves all states to `device`, after the parameters have gone there, say. Step counts stay where
/// the optimizer reads them. Does nothing while there is no state, whatever the optimizer.
ACCELERATE_API void move_optimizer_state(torch::optim::Optimizer& optimizer, c10::Device device);

}  // namespace accelerate::detail
