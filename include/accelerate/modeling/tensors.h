// accelerate/modeling/tensors.h - the tensors of a model: by name, moved, tied.
//
// Included by accelerate/modeling.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

/// Which storage a tensor lives in. Tensors with equal ids share memory, or are on the meta device.
struct TensorStorageId {
  c10::Device device = c10::kCPU;
  const void* data = nullptr;
  std::int64_t bytes = 0;  ///< of the whole storage

  bool operator==(const TensorStorageId&) const = default;
};
[[nodiscard]] ACCELERATE_API TensorStorageId id_tensor_storage(const at::Tensor& tensor);

struct ModuleTensorsOptions {
  bool include_buffers = true;
  /// Those of all modules below, too.
  bool recurse = false;
  bool remove_non_persistent = false;
};
/// Parameters, then buffers, each tensor once.
[[nodiscard]] ACCELERATE_API std::vector<std::pair<std::string, at::Tensor>> named_module_tensors(
    const torch::nn::Module& module, const ModuleTensorsOptions& options = {});

/// Leaves a buffer out of state dictionaries, as `register_buffer(..., persistent=False)` of Python
/// does. The mark stays with the tensor: a clone of the module needs its own.
///
///     mask = register_buffer("mask", torch::ones({8, 8}));
///     accelerate::mark_non_persistent(*this, "mask");
ACCELERATE_API void mark_non_persistent(torch::nn::Module& module, std::string_view buffer_name);
/// The names of such buffers; of all modules below, if `recurse`. Local names, or with `fqns` those
/// from `module` on.
[[nodiscard]] ACCELERATE_API std::set<std::string> get_non_persistent_buffers(
    const torch::nn::Module& module, bool recurse = false, bool fqns = false);

struct SetModuleTensorOptions {
  /// What it becomes. Needed for a tensor that is on the meta device and leaves it.
  std::optional<at::Tensor> value = std::nullopt;
  /// For `value`, unless that is an integer; else for a floating point tensor that goes to the meta
  /// device. Unset: as the module has it.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  bool non_blocking = false;
};
/// Puts a parameter or buffer on a device. The tensor object stays, with all who hold it; only what
/// it refers to is another.
///
/// Throws `ArgumentError` for an unknown name, a value of another shape, and a tensor that leaves
/// the meta device without a value; `StateError` for a meta tensor that a graph was recorded on.
ACCELERATE_API void set_module_tensor_to_device(torch::nn::Module& module,
                                                std::string_view tensor_name,
                                                const c10::Device& device,
                                                const SetModuleTensorOptions& options = {});

/// The names of each parameter that has several, sorted; parameters in the order of the model. The
/// same tensor counts, and two that have all elements in common.
[[nodiscard]] ACCELERATE_API std::vector<std::vector<std::string>> find_tied_parameters(
    const torch::nn::Module& model);

/// How parameters are the same.
enum class TieKind : std::uint8_t {
  kIdentity,  ///< one tensor with one gradient
  kStorage    ///< tensors with one memory and a gradient each
};
/// Makes the parameters with these names one: the first. The members of LibTorch's own layers
/// follow. The class of another module keeps its tensor in a member that cannot be reached: that
/// tensor gets the memory of the first one, and its gradient stays apart.
///
///     tie_parameters(*net, {"embed.weight", "head.weight"});
ACCELERATE_API TieKind tie_parameters(torch::nn::Module& model,
                                      const std::vector<std::string>& names);
/// Ties what `find_tied_parameters` found before, to the first of each group that is not on the
/// meta device.
ACCELERATE_API void retie_parameters(torch::nn::Module& model,
                                     const std::vector<std::vector<std::string>>& tied_parameters);

}  // namespace accelerate

/// So that ids can be keys.
template <>
struct std::hash<accelerate::TensorStorageId> {
  std::size_t operator()(const accelerate::TensorStorageId& id) const noexcept {
    return std::hash<const void*>()(id.data) ^ std::hash<std::int64_t>()(id.bytes);
  }
};
