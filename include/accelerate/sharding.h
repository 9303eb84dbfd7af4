// accelerate/sharding.h - models whose weights, gradients and optimizer states are spread over
// processes.
//
// Which of them is said by a plugin (accelerate/kwargs.h) or a ParallelismConfig; `prepare` does
// the rest. Here is what programs use beside.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include "accelerate/api.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/sharding/deepspeed.h"            // IWYU pragma: export
#include "accelerate/sharding/gathered_parameters.h"  // IWYU pragma: export

namespace accelerate {

/// For `param_init_fn` of an FSDP plugin: calls `param_init_fn` and makes the parameters of `model`
/// that are tied now one again where it has given each memory of its own. Throws `ArgumentError`
/// for a tied parameter that it has put on another device than `device`. `model` must outlive what
/// is returned.
///
///     plugin.param_init_fn = ensure_weights_retied(init, *net, accelerator.device());
[[nodiscard]] ACCELERATE_API Callback<void(torch::nn::Module&)> ensure_weights_retied(
    Callback<void(torch::nn::Module&)> param_init_fn, torch::nn::Module& model,
    const c10::Device& device);

}  // namespace accelerate
