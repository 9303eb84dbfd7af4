// Which layers of a model are quantized, where they go, and where their weights come from.
#include "accelerate/quantization/load.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <set>
#include <unordered_set>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/modeling.h"
#include "accelerate/nn/lora_linear.h"
#include "core/log.h"
#include "core/text.h"
#include "modeling/tensors.h"
#include "offload/lazy_params.h"
#include "quantization/packed_weight.h"
#include "state/accelerator_backend.h"

namespace accelerate {
namespace detail::quantization {
namespace {

using torch::nn::LinearImpl;
using torch::nn::Module;
using Names = std::vector<std::string>;

bool contains_any(const std::string& name, const Names& parts) {
  return std::ranges::any_of(parts,
                             [&](const std::string& part) { return name.find(part) != name.npos; });
}

/// A layer is skipped by the name of its module alone, by its full name, or by a module above; also
/// by the end of such a name, as in Python: "attn" skips "cross_attn.q".
bool is_skipped(const std::string& child, const std::string& full, const Names& skipped) {
  return std::ranges::any_of(skipped, [&](const std::string& key) {
    return key == child || key == full || full.find(key + ".") != full.npos;
  });
}

struct Layer {
  std::string name;
  std::shared_ptr<LinearImpl> module;
};

/// The layers to quantize; reports those that are not.
class LayerFinder {
 public:
  LayerFinder(const Module& model, const Names& skipped) : skipped_(skipped) {
    for (const auto& names : find_tied_parameters(model)) tied_.insert(names.begin(), names.end());
    walk("", model);
    if (!left_out_.empty()) {
      info(str("Not quantized: ", join(left_out_),
               " (skip_modules, keep_in_fp32_modules, offloaded or tied)."));
    }
    if (!layers.empty()) return;
    warn(
        str("You are loading your model in 8bit or 4bit but no linear modules were found in your "
            "model, or all of them are skipped",
            left_out_.empty() ? "" : str(" (", join(left_out_), ")"),
            ". This can happen for architectures that use other layers than torch::nn::Linear."));
  }

  std::vector<Layer> layers;

 private:
  void walk(const std::string& prefix, const Module& module) {
    for (const auto& child : module.named_children()) {
      const auto full = prefix + child.key();
      if (auto linear = std::dynamic_pointer_cast<LinearImpl>(child.value())) {
        const bool known = find_packed(linear->weight) != nullptr;
        if (known || is_skipped(child.key(), full, skipped_) || tied_.contains(full + ".weight")) {
          left_out_.push_back(full);
        } else {
          layers.push_back({full, std::move(linear)});
        }
      }
      walk(full + ".", *child.value());
    }
  }

  const Names& skipped_;
  std::set<std::string> tied_;
  Names left_out_;
};

bool has_gpu(const DeviceMap& map) {
  return std::ranges::any_of(map, [](const auto& entry) { return entry.second.is_gpu(); });
}

/// On another device than where the model computes.
bool is_offloaded(const MapDevice& device, const DeviceMap& map) {
  return device.is_disk() || (device.is_cpu() && has_gpu(map));
}

DeviceMap computed_map(const Module& model, const std::string& kind,
                       const BnbQuantizationConfig& config, const Names& skipped,
                       const LoadAndQuantizeOptions& options) {
  constexpr std::array<std::string_view, 4> kKinds{"auto", "balanced", "balanced_low_0",
                                                   "sequential"};
  if (std::ranges::find(kKinds, kind) == kKinds.end()) {
    throw ArgumentError(
        str("device_map is '", kind, "'. Give a map, or one of: ", join(kKinds), "."));
  }
  DtypeLike dtype = at::kChar;
  if (config.load_in_4bit) dtype.emplace<CustomDtype>(CustomDtype::kInt4);
  std::map<std::string, DtypeLike> special;
  for (const auto& item : model.named_parameters()) {
    if (contains_any(item.key(), skipped)) special[item.key()] = scalar_type(*config.torch_dtype);
    if (contains_any(item.key(), *config.keep_in_fp32_modules)) special[item.key()] = at::kFloat;
  }
  auto budget = options.max_memory;
  if (kind != "sequential") {
    budget = get_balanced_memory(model, {.max_memory = budget,
                                         .no_split_module_classes = options.no_split_module_classes,
                                         .dtype = dtype,
                                         .special_dtypes = special,
                                         .low_zero = kind == "balanced_low_0"});
  }
  return infer_auto_device_map(model, {.max_memory = budget,
                                       .no_split_module_classes = options.no_split_module_classes,
                                       .dtype = dtype,
                                       .special_dtypes = special});
}

/// Where the model goes if nothing is said.
MapDevice current_device() {
  if (state::accelerator_backend() == nullptr) return "cpu";
  return static_cast<int>(offload::with_index(c10::Device(c10::kCUDA)).index());
}

DeviceMap device_map_of(const Module& model, const BnbQuantizationConfig& config,
                        const Names& skipped, const LoadAndQuantizeOptions& options) {
  DeviceMap map;
  if (const auto* given = std::get_if<DeviceMap>(&options.device_map)) {
    map = *given;
  } else if (const auto* kind = std::get_if<std::string>(&options.device_map)) {
    map = computed_map(model, *kind, config, skipped, options);
  } else {
    map.set("", current_device());
    info(str("No device_map was given: the whole model is put on ", current_device(), "."));
  }
  for (const auto& [name, device] : map) {
    if (!config.load_in_4bit || !is_offloaded(device, map)) continue;
    if (std::ranges::find(skipped, name) != skipped.end()) continue;
    throw ArgumentError(
        str("Some modules are dispatched on the CPU or the disk: '", name, "' is on ", device,
            ". Make sure that the device has enough memory for the quantized model. To dispatch "
            "modules there while keeping them in torch_dtype, give a device_map with their names. "
            "For 4-bit weights that travel, quantize the model first and then call cpu_offload, "
            "disk_offload or dispatch_model."));
  }
  return map;
}

/// All parameters that are not quantized, under all their names.
void cast_others(const Module& model, const BnbQuantizationConfig& config) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> in_float32;
  for (const auto& item : model.named_parameters()) {
    if (contains_any(item.key(), *config.keep_in_fp32_modules)) {
      in_float32.insert(item.value().unsafeGetTensorImpl());
    }
  }
  for (const auto& item : model.named_parameters()) {
    const auto& tensor = item.value();
    if (!tensor.is_floating_point() || find_packed(tensor) != nullptr) continue;
    const auto dtype = in_float32.contains(tensor.unsafeGetTensorImpl())
                           ? at::kFloat
                           : scalar_type(*config.torch_dtype);
    if (tensor.scalar_type() == dtype) continue;
    modeling::replace_data(tensor, tensor.detach().to(dtype), item.key());
  }
}

/// Adapters are trained: their updates would vanish in 16 bits.
Names names_of_adapters(const Module& model) {
  Names names;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (item.value()->as<nn::LoraFactorImpl>() != nullptr) names.push_back(item.key());
  }
  return names;
}

/// Options that are for models on the meta device.
void check_loaded_model(const LoadAndQuantizeOptions& options) {
  if (options.weights_location) {
    throw ArgumentError(
        str("weights_location is '", options.weights_location->string(),
            "', but the model has weights already, which would be quantized. Build it under "
            "init_empty_weights, so that the file is loaded, or leave weights_location out."));
  }
  Names ignored;
  if (options.device_map.index() != 0) ignored.emplace_back("device_map");
  if (options.max_memory) ignored.emplace_back("max_memory");
  if (!options.no_split_module_classes.empty()) ignored.emplace_back("no_split_module_classes");
  if (options.offload_folder) ignored.emplace_back("offload_folder");
  if (options.offload_state_dict) ignored.emplace_back("offload_state_dict");
  if (options.strict) ignored.emplace_back("strict");
  if (!options.key_mapping.empty()) ignored.emplace_back("key_mapping");
  if (ignored.empty()) return;
  warn(str("load_and_quantize_model: ", join(ignored),
           " of the options have no effect, because the model is loaded already: it is quantized "
           "where it is and moved to ",
           current_device(), ". Build it under init_empty_weights to use them."));
}

bool is_on_meta(const Module& model) {
  const auto parameters = model.parameters();
  return !parameters.empty() && parameters.front().is_meta();
}

void attach_all(const std::vector<Layer>& layers, const BnbQuantizationConfig& config) {
  const auto dtype = scalar_type(*config.torch_dtype);
  for (const auto& [name, module] : layers) {
    PackedWeight::attach(*module, name + ".weight", dtype, config);
  }
}

}  // namespace

std::shared_ptr<offload::DispatchedCore> load_and_quantize_model(
    const std::shared_ptr<Module>& model, const BnbQuantizationConfig& given,
    const LoadAndQuantizeOptions& options) {
  if (model == nullptr) throw ArgumentError("There is no model to quantize: the holder is empty.");
  auto config = resolved(given);
  if (!config.keep_in_fp32_modules) config.keep_in_fp32_modules.emplace();
  auto skipped = config.skip_modules.value_or(get_keys_to_not_convert(*model));
  const auto* map = std::get_if<DeviceMap>(&options.device_map);
  if (config.load_in_4bit && map != nullptr && map->size() > 1) {
    for (const auto& [name, device] : *map) {
      if (is_offloaded(device, *map)) skipped.push_back(name);
    }
  }
  std::ranges::copy(*config.keep_in_fp32_modules, std::back_inserter(skipped));
  std::ranges::copy(names_of_adapters(*model), std::back_inserter(*config.keep_in_fp32_modules));
  if (!is_on_meta(*model)) {
    check_loaded_model(options);
    warn_once(
        "It is not recommended to quantize a loaded model. The model should be instantiated under "
        "init_empty_weights.");
    attach_all(LayerFinder(*model, skipped).layers, config);
    cast_others(*model, config);
    return offload::dispatch_model(
        model, {{"", current_device()}},
        {.preload_module_classes = options.preload_module_classes, .lazy = options.lazy});
  }
  if (!options.weights_location) {
    throw ArgumentError(
        "`weights_location` needs to be the folder or file with the weights of the model, because "
        "the model is on the meta device.");
  }
  attach_all(LayerFinder(*model, skipped).layers, config);
  const auto places = device_map_of(*model, config, skipped, options);
  load_checkpoint_in_model(*model, *options.weights_location,
                           {.device_map = places,
                            .offload_folder = options.offload_folder,
                            .dtype = scalar_type(*config.torch_dtype),
                            .offload_state_dict = options.offload_state_dict,
                            .keep_in_fp32_modules = *config.keep_in_fp32_modules,
                            .strict = options.strict,
                            .key_mapping = options.key_mapping,
                            .progress = options.progress});
  return offload::dispatch_model(model, places,
                                 {.offload_dir = options.offload_folder,
                                  .preload_module_classes = options.preload_module_classes,
                                  .lazy = options.lazy});
}

}  // namespace detail::quantization

BaseModel::~BaseModel() = default;

std::vector<std::string> get_keys_to_not_convert(const torch::nn::Module& model) {
  std::vector<std::string> keys;
  for (const auto& names : find_tied_parameters(model)) {
    keys.insert(keys.end(), names.begin(), names.end());
  }
  const auto* base = dynamic_cast<const BaseModel*>(&model);
  if (keys.empty() && base != nullptr && base->is_base_model()) return {};
  const auto children = model.named_children();
  if (!children.is_empty()) {
    const auto last = children.keys().back();
    if (std::ranges::find(keys, last) == keys.end()) keys.push_back(last);
  }
  for (auto& key : keys) {
    for (const std::string_view end : {".weight", ".bias"}) {
      for (auto at = key.find(end); at != key.npos; at = key.find(end)) key.erase(at, end.size());
    }
  }
  return keys;
}

bool has_4bit_bnb_layers(const torch::nn::Module& model) {
  return std::ranges::any_of(model.parameters(), [](const at::Tensor& parameter) {
    const auto packed = detail::quantization::find_packed(parameter);
    return packed != nullptr && packed->is_4bit();
  });
}

}  // namespace accelerate
