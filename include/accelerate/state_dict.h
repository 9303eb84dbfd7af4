// accelerate/state_dict.h - the parameters and buffers of a model by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <string>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

/// Tensors by name, in the order in which they were put in.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// Python's `module.state_dict()`: of each module its parameters, then its buffers, then its
/// children. A tensor that is registered twice has both names. The tensors are the module's own.
[[nodiscard]] ACCELERATE_API StateDict state_dict(const torch::nn::Module& module);

}  // namespace accelerate
