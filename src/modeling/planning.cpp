// Sizes, budgets and device maps of models.
#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/state_dict.h"
#include "core/log.h"
#include "core/python_text.h"
#include "core/system.h"
#include "core/text.h"
#include "modeling/outline.h"
#include "state/accelerator_backend.h"

namespace accelerate {
namespace {

using detail::join;
using detail::PartKind;
using detail::str;
using detail::modeling::outline_of;
using torch::nn::Module;

/// "336", or "12.125" where bits are left.
std::string shown(double bytes) {
  if (bytes == std::floor(bytes)) return str(static_cast<std::int64_t>(bytes));
  return detail::python_repr(bytes);
}

/// The module that each part is in; 0 for the root itself.
std::vector<std::size_t> parents_of(const detail::ModelOutline& outline) {
  std::vector<std::size_t> parents(outline.parts.size());
  for (std::size_t module = 0; module < parents.size(); ++module) {
    const auto end = outline.parts[module].end;
    for (auto part = module + 1; part < end; part = outline.parts[part].end) {
      parents[part] = module;
    }
  }
  return parents;
}

/// The largest of the classes, each measured on its first module in the order of `ModuleSizes`:
/// modules with parameters first.
std::int64_t largest_block(const detail::modeling::ModuleOutline& model,
                           const std::vector<std::string>& classes) {
  const auto& parts = model.outline.parts;
  std::set<std::string> left(classes.begin(), classes.end());
  std::int64_t bits = 0;
  for (const bool with_parameters : {true, false}) {
    for (std::size_t part = 1; part < parts.size() && !left.empty(); ++part) {
      if (model.modules[part] == nullptr) continue;
      const auto counts = [&](PartKind kind) {
        return std::any_of(parts.begin() + static_cast<std::ptrdiff_t>(part),
                           parts.begin() + static_cast<std::ptrdiff_t>(parts[part].end),
                           [&](const auto& one) { return one.kind == kind && !one.alias; });
      };
      if (with_parameters ? !counts(PartKind::kParameter) : !counts(PartKind::kBuffer)) continue;
      std::erase_if(left, [&](const std::string& name) {
        if (!detail::modeling::has_class(*model.modules[part], {name})) return false;
        bits = std::max(bits, parts[part].bits);
        return true;
      });
    }
  }
  return bits;
}

int gpu_count() {
  const auto* const backend = detail::state::accelerator_backend();
  return backend == nullptr ? 0 : backend->device_count();
}

MaxMemory free_memory() {
  MaxMemory memory;
  for (int gpu = 0; gpu < gpu_count(); ++gpu) {
    try {
      memory.set(gpu, detail::state::accelerator_backend()->free_bytes(gpu));
    } catch (const std::exception& error) {
      detail::info(
          str("Device ", gpu,
              " seems unavailable, Proceeding to check subsequent devices: ", error.what()));
    }
  }
  memory.set(at::hasMPS() ? "mps" : "cpu", detail::available_memory());
  return memory;
}

void warn_if_untied(const Module& model, bool has_ties) {
  if (has_ties || !check_tied_parameters_in_config(model)) return;
  detail::warn(
      "The model weights are not tied. Please use the `tie_weights` method (here: "
      "`tie_parameters`) before using the `infer_auto_device` function.");
}

void report(const detail::DevicePlan& plan) {
  if (plan.homeless_buffer_bytes) {
    detail::warn(str("Current model requires ", shown(*plan.homeless_buffer_bytes),
                     " bytes of buffer for offloaded layers, which seems does not fit any GPU's "
                     "remaining memory. If you are experiencing a OOM later, please consider using "
                     "offload_buffers=True."));
  }
  if (plan.required_bytes.empty()) return;
  std::string lines;
  for (const auto& [device, bytes] : plan.required_bytes) {
    lines += str("  - ", device, ": ", shown(bytes), " bytes required\n");
  }
  detail::info(str(
      "Based on the current allocation process, no modules could be assigned to the following "
      "devices due to insufficient memory:\n",
      lines,
      "These minimum requirements are specific to this allocation attempt and may vary. Consider "
      "increasing the available memory for these devices to at least the specified minimum, or "
      "adjusting the model config."));
}

/// The maps of dispatched models.
class DeviceMaps {
 public:
  // Never destroyed: a handle of static duration takes its map away when the program ends.
  static DeviceMaps& instance() {
    static auto& maps = *new DeviceMaps;
    return maps;
  }
  void set(const std::shared_ptr<const Module>& model, const std::optional<DeviceMap>& map,
           const void* owner) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(maps_, [](const auto& entry) { return entry.first.expired(); });
    const auto found = maps_.find(model);
    if (map) {
      maps_.insert_or_assign(model, Owned{*map, owner});
    } else if (found != maps_.end() && found->second.owner == owner) {
      maps_.erase(found);
    }
  }
  [[nodiscard]] std::optional<DeviceMap> of(const Module& model) {
    const std::scoped_lock lock(mutex_);
    const auto found = maps_.find(model.weak_from_this());
    return found == maps_.end() ? std::nullopt : std::optional(found->second.map);
  }

 private:
  struct Owned {
    DeviceMap map;
    const void* owner = nullptr;
  };
  std::mutex mutex_;
  std::map<std::weak_ptr<const Module>, Owned, std::owner_less<>> maps_;
};

}  // namespace

NoSplitModules::~NoSplitModules() = default;
TiedWeights::~TiedWeights() = default;

ModuleSizes compute_module_sizes(const Module& model, const ModuleSizesOptions& options) {
  const auto outline =
      outline_of(model, {.dtype = options.dtype, .special_dtypes = options.special_dtypes}).outline;
  const auto parents = parents_of(outline);
  ModuleSizes sizes;
  std::vector<bool> listed(parents.size());
  // Python's order: that in which tensors, parameters before buffers, come to their modules.
  const std::function<void(std::size_t)> list = [&](std::size_t part) {
    if (listed[part]) return;
    listed[part] = true;
    if (part != 0) list(parents[part]);
    const auto& [name, bits, buffer_bits] = std::tie(
        outline.parts[part].name, outline.parts[part].bits, outline.parts[part].buffer_bits);
    sizes.set(name, static_cast<double>(options.buffers_only ? buffer_bits : bits) / 8);
  };
  for (const auto kind : {PartKind::kParameter, PartKind::kBuffer}) {
    if (kind == PartKind::kParameter && options.buffers_only) continue;
    for (std::size_t part = 0; part < parents.size(); ++part) {
      if (outline.parts[part].kind == kind && !outline.parts[part].alias) list(part);
    }
  }
  return sizes;
}

double compute_module_total_buffer_size(const Module& model, const ModuleSizesOptions& options) {
  auto buffers = options;
  buffers.buffers_only = true;
  return compute_module_sizes(model, buffers).get("", 0.0);
}

LayerSize get_max_layer_size(const std::vector<std::pair<std::string, const Module*>>& modules,
                             const ModuleSizes& module_sizes,
                             const std::vector<std::string>& no_split_module_classes) {
  LayerSize largest;
  for (const auto& [name, module] : modules) {
    LayerSize layer{.size = module_sizes.get(name, 0.0), .names = {name}};
    if (module != nullptr && !module->children().empty() &&
        !detail::modeling::has_class(*module, no_split_module_classes)) {
      std::vector<std::pair<std::string, const Module*>> inside;
      for (const auto& child : module->named_children()) {
        inside.emplace_back(str(name, ".", child.key()), child.value().get());
      }
      layer = get_max_layer_size(inside, module_sizes, no_split_module_classes);
    }
    if (layer.size > largest.size) largest = {.size = layer.size};
    if (layer.size == largest.size) {
      largest.names.insert(largest.names.end(), layer.names.begin(), layer.names.end());
    }
  }
  return largest;
}

MaximumSizes calculate_maximum_sizes(const Module& model) {
  const auto sizes = compute_module_sizes(model);
  const auto* const own = dynamic_cast<const NoSplitModules*>(&model);
  std::vector<std::pair<std::string, const Module*>> modules;
  for (const auto& entry : model.named_parameters(/*recurse=*/false)) {
    modules.emplace_back(entry.key(), nullptr);
  }
  for (const auto& entry : model.named_children()) {
    modules.emplace_back(entry.key(), entry.value().get());
  }
  for (const auto& entry : model.named_buffers(/*recurse=*/false)) {
    modules.emplace_back(entry.key(), nullptr);
  }
  return {
      .total = sizes.get("", 0.0),
      .largest_layer = get_max_layer_size(
          modules, sizes, own != nullptr ? own->no_split_modules() : std::vector<std::string>())};
}

MaxMemory get_max_memory(const std::optional<MaxMemory>& max_memory) {
  if (!max_memory) return free_memory();
  auto ordered = detail::in_planning_order(*max_memory);
  std::vector<int> there(static_cast<std::size_t>(gpu_count()));
  for (std::size_t i = 0; i < there.size(); ++i) there[i] = static_cast<int>(i);
  for (const auto& [device, bytes] : ordered) {
    if (!device.is_gpu() || std::ranges::count(there, device.index()) > 0) continue;
    detail::warn(
        str("Device ", device, " is not available, available devices are [", join(there), "]"));
  }
  return ordered;
}

MaxMemory get_balanced_memory(const Module& model, const BalancedMemoryOptions& options) {
  const auto outline =
      outline_of(model, {.dtype = options.dtype, .special_dtypes = options.special_dtypes});
  return detail::balanced_memory(
      outline.outline, get_max_memory(options.max_memory),
      {.low_zero = options.low_zero,
       .leave_reserve = !options.max_memory,
       .block_bits = largest_block(outline, options.no_split_module_classes)});
}

DeviceMap infer_auto_device_map(const Module& model, const InferAutoDeviceMapOptions& options) {
  const auto outline =
      outline_of(model, {.dtype = options.dtype,
                         .special_dtypes = options.special_dtypes,
                         .no_split_module_classes = options.no_split_module_classes})
          .outline;
  warn_if_untied(model, !outline.ties.empty());
  auto plan = detail::plan_device_map(outline, get_max_memory(options.max_memory),
                                      {.offload_buffers = options.offload_buffers,
                                       .fallback_allocation = options.fallback_allocation,
                                       .verbose = options.verbose});
  report(plan);
  return options.clean_result ? clean_device_map(plan.map) : std::move(plan.map);
}

void check_device_map(const Module& model, const DeviceMap& device_map) {
  const auto outline = outline_of(model, {}).outline;
  std::set<std::string_view> names;
  for (const auto& part : outline.parts) names.insert(part.name);
  std::vector<std::string> unknown;
  for (const auto& [name, device] : device_map) {
    if (!names.contains(name)) unknown.push_back(detail::python_repr(std::string_view(name)));
  }
  if (!unknown.empty()) {
    detail::warn(str("The following device_map keys do not match any submodules in the model: [",
                     join(unknown), "]"));
  }
  std::vector<std::string> uncovered;
  for (const auto& entry : state_dict(model)) {
    if (find_in_device_map(device_map, entry.key()) == nullptr) uncovered.push_back(entry.key());
  }
  if (uncovered.empty()) return;
  throw ArgumentError(
      str("The device_map provided does not give any device for the following parameters: ",
          join(uncovered), ". Add them, or a module that they are in."));
}

void check_tied_parameters_on_same_device(
    const std::vector<std::vector<std::string>>& tied_parameters, const DeviceMap& device_map) {
  for (const auto& names : tied_parameters) {
    std::vector<std::string> places;
    std::set<MapDevice> devices;
    for (const auto& name : names) {
      const auto* const device = find_in_device_map(device_map, name);
      if (device == nullptr) {
        throw ArgumentError(str("The `device_map` does not contain the module ", name, "."));
      }
      devices.insert(*device);
      places.push_back(str(detail::python_repr(std::string_view(name)), ": ", *device));
    }
    if (devices.size() < 2) continue;
    detail::warn(str("Tied parameters are on different devices: {", join(places),
                     "}. Please modify your custom device map or set `device_map='auto'`. "));
  }
}

std::vector<std::vector<std::string>> find_tied_parameters(const Module& model) {
  const auto outline = outline_of(model, {}).outline;
  std::vector<std::vector<std::string>> groups;
  for (const auto& tied : outline.ties) {
    auto& names = groups.emplace_back();
    for (const auto part : tied) names.push_back(outline.parts[part].name);
  }
  return groups;
}

bool check_tied_parameters_in_config(const Module& model) {
  const auto* const tied = dynamic_cast<const TiedWeights*>(&model);
  return tied != nullptr && tied->expects_tied_weights();
}

std::optional<DeviceMap> hf_device_map(const Module& model) {
  return DeviceMaps::instance().of(model);
}

void detail::modeling::set_device_map(const std::shared_ptr<const Module>& model,
                                      const std::optional<DeviceMap>& device_map,
                                      const void* owner) {
  DeviceMaps::instance().set(model, device_map, owner);
}

}  // namespace accelerate
