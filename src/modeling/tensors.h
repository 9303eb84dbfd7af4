// src/modeling/tensors.h - tensors as places in memory: which are the same, and how they move.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "accelerate/modeling/device_map.h"
#include "accelerate/state_dict.h"

namespace accelerate::detail::modeling {

/// Where the elements of a tensor are: equal for tensors that share memory. On the meta device and
/// for tensors without elements: its storage object.
[[nodiscard]] const void* memory_of(const at::Tensor& tensor);
/// Tensors of equal `memory_of` are the same elements: offset, dtype, sizes and strides agree.
[[nodiscard]] bool same_view(const at::Tensor& a, const at::Tensor& b);

/// The names of each tensor, in the order of `state`: names of the same elements are together.
/// Tensors without elements have one name each.
[[nodiscard]] std::vector<std::vector<std::string>> same_elements(const StateDict& state);

/// Throws `StateDictMismatch` as `load_state_dict` of a module whose state is `own`.
void check_fits(const StateDict& own, const StateDict& state, bool strict);

/// Makes `tensor` refer to the data of another one of the same shape, on any device and of any
/// dtype. Unlike `set_data` it also crosses to and from the meta device. Throws `StateError` with
/// `name` for a tensor on the meta device that a graph was recorded on.
void replace_data(const at::Tensor& tensor, const at::Tensor& data, const std::string& name);

/// The device of an entry of a device map that is not "disk". Throws `ArgumentError` for a text
/// that names none and a GPU beyond the last one, `UnsupportedError` for what this machine does not
/// have.
[[nodiscard]] c10::Device torch_device(const MapDevice& device);

/// A buffer that `mark_non_persistent` was called for.
[[nodiscard]] bool is_non_persistent(const at::Tensor& buffer);

/// The parameters of a module itself, without copies of names. Some may be undefined.
[[nodiscard]] const torch::OrderedDict<std::string, at::Tensor>& own_parameters(
    const torch::nn::Module& module);

}  // namespace accelerate::detail::modeling
