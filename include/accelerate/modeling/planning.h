// accelerate/modeling/planning.h - how large a model is, and which part of it goes where.
//
//     auto budget = get_balanced_memory(*net, {.no_split_module_classes = {"Block"}});
//     auto map = infer_auto_device_map(*net, {.max_memory = budget,
//                                             .no_split_module_classes = {"Block"}});
//
// Only sizes and dtypes are looked at: the model may be on the meta device. Included by
// accelerate/modeling.h.
#pragma once

#include <c10/core/ScalarType.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/modeling/device_map.h"

namespace accelerate {

// ---- sizes --------------------------------------------------------------------------------------

/// A dtype, one of those that Torch does not have, or its name: "float16", "torch.float16", "int4".
using DtypeLike = std::variant<c10::ScalarType, CustomDtype, std::string>;

/// Bytes per element: 1/8 for bool, 1/2 for int4, 1/4 for int2. Throws `ArgumentError` for a name
/// that is no dtype.
[[nodiscard]] ACCELERATE_API double dtype_byte_size(const DtypeLike& dtype);

/// Bytes of each tensor, of each module with all inside, and of the model at "". A tensor that has
/// several names counts under the first alone.
using ModuleSizes = OrderedMap<std::string, double>;

struct ModuleSizesOptions {
  /// What floating point tensors that are wider will be converted to.
  std::optional<DtypeLike> dtype = std::nullopt;
  /// Other dtypes for single tensors, by name; integers too.
  std::map<std::string, DtypeLike> special_dtypes = {};
  bool buffers_only = false;
};
[[nodiscard]] ACCELERATE_API ModuleSizes
compute_module_sizes(const torch::nn::Module& model, const ModuleSizesOptions& options = {});
/// The sum over all buffers.
[[nodiscard]] ACCELERATE_API double compute_module_total_buffer_size(
    const torch::nn::Module& model, const ModuleSizesOptions& options = {});

struct LayerSize {
  double size = 0;
  /// All layers of that size, in order.
  std::vector<std::string> names = {};
  bool operator==(const LayerSize&) const = default;
};
/// The largest layer among modules and tensors (null stands for a tensor). A layer is a module
/// without modules, or one of a class in `no_split_module_classes`.
[[nodiscard]] ACCELERATE_API LayerSize get_max_layer_size(
    const std::vector<std::pair<std::string, const torch::nn::Module*>>& modules,
    const ModuleSizes& module_sizes, const std::vector<std::string>& no_split_module_classes);

/// A model that knows which of its classes must stay on one device, for example because of a
/// residual connection, derives from this beside `torch::nn::Module`.
class ACCELERATE_API NoSplitModules {
 public:
  virtual ~NoSplitModules();
  [[nodiscard]] virtual std::vector<std::string> no_split_modules() const = 0;
};

struct MaximumSizes {
  double total = 0;
  LayerSize largest_layer = {};
};
/// Of a model on the meta device too. A model that is `NoSplitModules` tells its own layers.
[[nodiscard]] ACCELERATE_API MaximumSizes calculate_maximum_sizes(const torch::nn::Module& model);

// ---- budgets ------------------------------------------------------------------------------------

/// The memory that is free on each GPU and on the CPU, within the limits of cgroups; or
/// `max_memory`, with GPUs by number first, then "mps", "cpu" and "disk". A GPU that is not there
/// is a warning, another name an `ArgumentError`.
[[nodiscard]] ACCELERATE_API MaxMemory
get_max_memory(const std::optional<MaxMemory>& max_memory = std::nullopt);

struct BalancedMemoryOptions {
  /// Unset: what is free. A tenth of an only GPU then stays free.
  std::optional<MaxMemory> max_memory = std::nullopt;
  /// Class names: "Block" stands for my::BlockImpl.
  std::vector<std::string> no_split_module_classes = {};
  std::optional<DtypeLike> dtype = std::nullopt;
  std::map<std::string, DtypeLike> special_dtypes = {};
  /// Put as little as possible on the first GPU.
  bool low_zero = false;
};
/// Budgets for `infer_auto_device_map` that use all GPUs alike.
[[nodiscard]] ACCELERATE_API MaxMemory
get_balanced_memory(const torch::nn::Module& model, const BalancedMemoryOptions& options = {});

// ---- device maps --------------------------------------------------------------------------------

struct InferAutoDeviceMapOptions {
  /// Unset: what is free.
  std::optional<MaxMemory> max_memory = std::nullopt;
  std::vector<std::string> no_split_module_classes = {};
  std::optional<DtypeLike> dtype = std::nullopt;
  std::map<std::string, DtypeLike> special_dtypes = {};
  /// Write each step to the log.
  bool verbose = false;
  /// Name a module instead of all its parts where they are on one device.
  bool clean_result = true;
  /// Buffers of offloaded modules are offloaded too: none has to fit on a GPU.
  bool offload_buffers = false;
  /// If the next part fits on no device, look for a later one that does.
  bool fallback_allocation = false;
};
/// Fills the devices one after the other: GPUs, then "cpu", then "disk". The first GPU and the CPU
/// keep room for the largest layer that is still to be placed. Tied parameters stay together.
[[nodiscard]] ACCELERATE_API DeviceMap infer_auto_device_map(
    const torch::nn::Module& model, const InferAutoDeviceMapOptions& options = {});

/// Throws `ArgumentError` that names the parameters and buffers without a place, and warns of names
/// that are not in the model.
ACCELERATE_API void check_device_map(const torch::nn::Module& model, const DeviceMap& device_map);

/// Warns of tied parameters that the map puts on different devices, which would untie them.
ACCELERATE_API void check_tied_parameters_on_same_device(
    const std::vector<std::vector<std::string>>& tied_parameters, const DeviceMap& device_map);

/// A model whose weights should be tied derives from this beside `torch::nn::Module`.
class ACCELERATE_API TiedWeights {
 public:
  virtual ~TiedWeights();
  [[nodiscard]] virtual bool expects_tied_weights() const { return true; }
};
/// Whether the model says that some of its weights should be tied.
[[nodiscard]] ACCELERATE_API bool check_tied_parameters_in_config(const torch::nn::Module& model);

/// The map that `dispatch_model` used for the model, if it did.
[[nodiscard]] ACCELERATE_API std::optional<DeviceMap> hf_device_map(const torch::nn::Module& model);

}  // namespace accelerate
