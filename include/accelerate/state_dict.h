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

/// Python's `module.state_dict()`: of each module parameters, buffers (`mark_non_persistent` leaves
/// one out), children. A tensor that is registered twice has both names. They are the module's own.
[[nodiscard]] ACCELERATE_API StateDict state_dict(const torch::nn::Module& module);

/// Python's `module.load_state_dict(state, strict)`: copies the tensors into those of the module.
/// Throws `StateDictMismatch` that names tensors of another shape and, if `strict`, names that are
/// missing in `state` or unknown to the module; the module has not changed then.
ACCELERATE_API void load_state_dict(torch::nn::Module& module, const StateDict& state,
                                    bool strict = true);

}  // namespace accelerate
