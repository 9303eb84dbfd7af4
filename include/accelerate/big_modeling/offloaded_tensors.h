// accelerate/big_modeling/offloaded_tensors.h - look at weights that may be away.
//
// Part of accelerate/big_modeling.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"

namespace accelerate {

/// The bytes of the tensor come and go; outside of operators they may be absent. `device()` and
/// `dtype()` are those it computes with.
[[nodiscard]] ACCELERATE_API bool is_offloaded(const at::Tensor& tensor);
/// The dtype in which the values are kept; see `attach_layerwise_casting_hooks`.
[[nodiscard]] ACCELERATE_API c10::ScalarType storage_dtype(const at::Tensor& tensor);
/// A parameter or buffer of the module itself, not of its children, is offloaded.
[[nodiscard]] ACCELERATE_API bool has_offloaded_params(const torch::nn::Module& module);

/// The state dict of a model in host memory, with the values of offloaded tensors in the dtypes in
/// which they are kept. Tied tensors share memory there, too. A tensor on the meta device is left
/// out with a warning.
[[nodiscard]] ACCELERATE_API StateDict
get_state_dict_offloaded_model(const torch::nn::Module& model);
/// Gives the entries that `state_dict` has for the tensors of `module` their values, and returns
/// it; `module_name` is the full name of one of them. Those of a module without offloaded tensors
/// stay where they are.
ACCELERATE_API StateDict& get_state_dict_from_offload(
    torch::nn::Module& module, std::string_view module_name, StateDict& state_dict,
    c10::Device device_to_put_offload = c10::kCPU);

/// While it lives, the tensors of a module itself are in memory, so that raw pointers work.
class ACCELERATE_API AlignedModule {
 public:
  [[nodiscard]] AlignedModule(torch::nn::Module& module, std::optional<c10::Device> device);
  ~AlignedModule();
  AlignedModule(const AlignedModule&) = delete;
  AlignedModule& operator=(const AlignedModule&) = delete;

 private:
  struct Held;
  std::vector<Held> held_;
};
/// Brings the tensors of an offloaded module, to `device` if one is given, where changes to them
/// are lost at the end. Parameters of an ordinary module move to `device` and back; from the meta
/// device they come back as they were. Unset: where they compute.
///
/// Throws `ArgumentError` for a tensor on the meta device that would have to leave it. What cannot
/// be moved back at the end, because memory is short, stays on `device` with a warning.
///
///     auto aligned = align_module_device(*net->layer);
///     write(net->layer->weight.data_ptr<float>());
[[nodiscard]] inline AlignedModule align_module_device(
    torch::nn::Module& module, std::optional<c10::Device> execution_device = std::nullopt) {
  return {module, execution_device};
}

}  // namespace accelerate
