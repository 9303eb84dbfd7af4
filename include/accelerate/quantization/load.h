// accelerate/quantization/load.h - quantize the linear layers of a model.
//
//     auto model = accelerate::load_and_quantize_model(net, {.load_in_8bit = true});
//     accelerator.save_model(net, "eight_bits");
//
// The modules and their code stay as they are: the weight of a quantized layer keeps its shape, and
// operators on it compute from its codes. It needs no gradients and cannot be changed or moved;
// other operators that read it get its values. State dictionaries have the tensors of bitsandbytes
// in its place. docs/quantization.md says how.
//
// Part of accelerate/quantization.h.
#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/big_modeling/dispatch.h"
#include "accelerate/checkpoint/key_mapping.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/kwargs/plugins.h"

namespace accelerate {

struct LoadAndQuantizeOptions {
  /// A checkpoint, as for `load_checkpoint_in_model`, whose weights are quantized or not. Needed
  /// for a model on the meta device, refused for another one, which has its weights.
  std::optional<std::filesystem::path> weights_location = std::nullopt;
  /// For a model on the meta device, as all down to `offload_state_dict`; for another one they are
  /// ignored with a warning. Unset: all of it on the current GPU, or on the CPU if there is none.
  DeviceMapChoice device_map = {};
  /// For a map that is computed: classes that are not split over devices.
  std::vector<std::string> no_split_module_classes = {};
  /// For a map that is computed. Unset: what is free.
  std::optional<MaxMemory> max_memory = std::nullopt;
  /// For weights on "disk".
  std::optional<std::filesystem::path> offload_folder = std::nullopt;
  /// As in `LoadCheckpointOptions`; weights that are quantized stay in memory.
  bool offload_state_dict = false;
  /// Ours: as in `LoadDispatchOptions`.
  std::vector<std::string> preload_module_classes = {};
  /// Ours, for a model on the meta device: throw `StateDictMismatch` for names of the checkpoint
  /// that are missing or unexpected.
  bool strict = false;
  /// Ours, for a model on the meta device: from the names of the checkpoint to those of the model.
  KeyMapping key_mapping = {};
  /// Ours: a progress bar of the bytes that are loaded, quantized weights counted in `torch_dtype`.
  /// Unset: ACCELERATE_PROGRESS, else none.
  std::optional<bool> progress = std::nullopt;
  /// Ours: how offloaded weights come and go.
  LazyOptions lazy = {};
};

/// A model without a head derives from this beside `torch::nn::Module`: if no weights are tied,
/// all its layers are quantized.
class ACCELERATE_API BaseModel {
 public:
  virtual ~BaseModel();
  [[nodiscard]] virtual bool is_base_model() const { return true; }
};

namespace detail::quantization {

[[nodiscard]] ACCELERATE_API std::shared_ptr<offload::DispatchedCore> load_and_quantize_model(
    const std::shared_ptr<torch::nn::Module>& model, const BnbQuantizationConfig& config,
    const LoadAndQuantizeOptions& options);

}  // namespace detail::quantization

/// Quantizes the weights of all `torch::nn::Linear` layers but those of `skip_modules` (unset:
/// `get_keys_to_not_convert`) and `keep_in_fp32_modules`, and of layers with tied weights. Their
/// weights and biases need no gradients from now on. All other parameters become `torch_dtype`;
/// those of `keep_in_fp32_modules` and the adapters of `nn::LoraLinear` float32.
///
/// A model on the meta device is filled layer by layer from `weights_location`, each weight
/// quantized on its device, and dispatched by the map: modules of a 4-bit model that the map puts
/// on "disk", or on "cpu" beside a GPU, are not quantized; those of an 8-bit model are, and their
/// codes travel. A loaded model is quantized where it is and then moved to the GPU, if there is
/// one.
///
/// Throws `ConfigError` for a configuration that contradicts itself; `ArgumentError` for a model on
/// the meta device without `weights_location` and another one with it, a computed map that offloads
/// 4-bit weights, and weights that are infinite or NaN; `FormatError` for codes in the file of a
/// layer that is not quantized; otherwise as `load_checkpoint_and_dispatch`.
template <detail::modeling::ModelHolder M>
[[nodiscard]] Dispatched<M> load_and_quantize_model(M model, const BnbQuantizationConfig& config,
                                                    const LoadAndQuantizeOptions& options = {}) {
  auto core = detail::quantization::load_and_quantize_model(
      detail::modeling::ModuleOf<M>::pointer(model), config, options);
  return {std::move(model), std::move(core)};
}

/// The modules that stay as they are by default: those of tied weights, and the last one, which is
/// the head. None for a `BaseModel` without tied weights.
[[nodiscard]] ACCELERATE_API std::vector<std::string> get_keys_to_not_convert(
    const torch::nn::Module& model);

/// Returns true if a layer inside has a weight in 4 bits.
[[nodiscard]] ACCELERATE_API bool has_4bit_bnb_layers(const torch::nn::Module& model);

}  // namespace accelerate
