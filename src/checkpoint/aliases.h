// src/checkpoint/aliases.h - tensors that a model has under several names.
#pragma once

#include <string>
#include <vector>

#include "accelerate/state_dict.h"

namespace accelerate::detail::checkpoint {

/// The names of each tensor, in the order of `state`: names of the same elements (one storage,
/// offset, dtype, sizes, strides) are together. Tensors on the meta device and those without
/// elements have one name each.
[[nodiscard]] std::vector<std::vector<std::string>> same_elements(const StateDict& state);

}  // namespace accelerate::detail::checkpoint
