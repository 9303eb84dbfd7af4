// cpu_offload, disk_offload, dispatch_model and load_checkpoint_and_dispatch: from a device map to
// places for all tensors.
#include "accelerate/big_modeling/dispatch.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <limits>
#include <set>

#include "accelerate/big_modeling/offloaded_tensors.h"
#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "checkpoint/offload.h"
#include "core/descriptor.h"
#include "core/first_names.h"
#include "core/folders.h"
#include "core/log.h"
#include "core/text.h"
#include "lazy/released_storage.h"
#include "lazy/trigger.h"
#include "modeling/outline.h"
#include "modeling/stand_in.h"
#include "modeling/tensors.h"
#include "offload/file_ranges.h"
#include "offload/lazy_params.h"
#include "offload/placement.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::offload {
namespace {

using torch::nn::Module;

constexpr std::array<std::string_view, 4> kComputedMaps{"auto", "balanced", "balanced_low_0",
                                                        "sequential"};

void check_model(const ModulePtr& model) {
  if (model == nullptr) throw ArgumentError("There is no model to dispatch: the holder is empty.");
  // Also what packed weights are kept in.
  for (const auto& item : accelerate::state_dict(*model)) {
    if (lazy::find_managed(item.value()) != nullptr) {
      throw StateError(
          "The weights of this model are dispatched or offloaded already. Call remove_hooks() of "
          "what the first "
          "call returned.");
    }
  }
}

c10::Device first_device(const Module& model) {
  for (const auto& parameter : model.parameters()) {
    if (parameter.defined() && !parameter.is_meta()) return parameter.device();
  }
  return c10::Device(c10::kCPU);
}

/// The tensors that the map puts on disk.
StateDict on_disk(const StateDict& all, const DeviceMap& map) {
  StateDict part;
  for (const auto& item : all) {
    const auto* device = find_in_device_map(map, item.key());
    if (device != nullptr && device->is_disk()) part.insert(item.key(), item.value());
  }
  return part;
}

/// The part of `wanted` that the index must have: no buffers that stay resident, and of tied
/// parameters one name.
StateDict must_be_there(const Module& model, const StateDict& wanted, const OffloadIndex& index,
                        bool offload_buffers) {
  std::set<std::string> spared;
  if (!offload_buffers) {
    for (const auto& item : model.named_buffers()) spared.insert(item.key());
  }
  for (const auto& names : find_tied_parameters(model)) {
    const auto is_there = [&](const std::string& name) { return index.contains(name); };
    if (!std::ranges::any_of(names, is_there)) continue;
    std::ranges::copy_if(names, std::inserter(spared, spared.end()), std::not_fn(is_there));
  }
  StateDict part;
  for (const auto& item : wanted) {
    if (!spared.contains(item.key())) part.insert(item.key(), item.value());
  }
  return part;
}

/// Running statistics stay resident: gives them the values that the folder has.
void take_statistics(Module& model, const StateDict& wanted, const OffloadIndex& index,
                     const std::filesystem::path& folder) {
  const OffloadedWeightsLoader weights({.save_folder = folder, .index = index});
  for (const auto& item : wanted) {
    if (!is_running_statistic(item.key()) || !index.contains(item.key())) continue;
    set_module_tensor_to_device(model, item.key(), c10::kCPU,
                                {.value = weights.at(item.key()).clone()});
  }
}

/// False for what is on the meta device, or came from there and was on disk until its handle ended.
bool has_value(const at::Tensor& tensor) {
  if (tensor.is_meta()) return false;
  return !tensor.has_storage() || !lazy::is_forbidden(*tensor.storage().unsafeGetStorageImpl());
}

/// Whether the weights were just written there.
enum class Folder : std::uint8_t { kAsGiven, kJustLoaded };

/// What has to be written into the folder: all values if it has no index. Throws if the folder is
/// of another model, or has other values.
StateDict lacking(const Module& model, const StateDict& values, const DispatchOptions& options,
                  Folder state) {
  const auto& folder = *options.offload_dir;
  if (!std::filesystem::exists(folder / "index.json")) return values;
  if (options.lazy.reuse || state == Folder::kJustLoaded) return StateDict();
  const auto index = read_offload_index(folder);
  const auto needed = must_be_there(model, values, index, options.offload_buffers);
  checkpoint::check_offloaded(needed, index, folder);
  StateDict known;
  for (const auto& item : needed) {
    if (has_value(item.value())) known.insert(item.key(), item.value());
  }
  const auto others = checkpoint::differing(known, index, folder);
  if (others.empty()) return StateDict();
  throw CheckpointError(
      str("The offload folder '", folder.string(), "' has other values of ", first_names(others),
          " than the model. Set LazyOptions::reuse to take those of the folder, name another "
          "folder, or remove this one."),
      folder);
}

/// Writes what the folder lacks of the tensors that belong on disk; returns where they are. The
/// folder is locked for `core`.
FileRanges prepare_folder(Module& model, const DeviceMap& map, const DispatchOptions& options,
                          Folder state, DispatchedCore& core) {
  const auto wanted = on_disk(accelerate::state_dict(model), map);
  if (wanted.is_empty()) return {};
  if (!options.offload_dir && !options.offload_index) {
    std::set<std::string> modules;
    for (const auto& [name, device] : map) {
      if (device.is_disk()) modules.insert(name.empty() ? "the whole model" : name);
    }
    throw ArgumentError(str("The device map puts ", join(modules),
                            " on disk, and there is no folder for it. Set offload_dir (the "
                            "offload_folder of load_checkpoint_and_dispatch)."));
  }
  const auto folder = options.offload_dir.value_or("");
  const bool statistics_stay = options.offload_buffers && !options.lazy.writable;
  const auto kind = options.lazy.writable ? LockKind::kExclusive : LockKind::kShared;
  const auto hold = [&](const std::function<StateDict()>& lacks) {
    core.folder_lock = std::make_shared<Descriptor>(checkpoint::hold_folder(folder, kind, lacks));
  };
  if (options.offload_index) {
    if (std::filesystem::is_directory(folder)) hold([] { return StateDict(); });
    if (statistics_stay) take_statistics(model, wanted, *options.offload_index, folder);
    return file_ranges(*options.offload_index, folder);
  }
  StateDict values;
  for (const auto& item : wanted) {
    const auto* value = options.state_dict ? options.state_dict->find(item.key()) : nullptr;
    values.insert(item.key(), value != nullptr ? *value : item.value());
  }
  hold([&] { return lacking(model, values, options, state); });
  const auto index = read_offload_index(folder);
  if (statistics_stay) take_statistics(model, wanted, index, folder);
  return file_ranges(index, folder);
}

Place place_in(const DeviceMap& map, const std::string& name, c10::Device main_device,
               bool manage_on_cpu) {
  const auto* device = find_in_device_map(map, name);
  if (device == nullptr) throw ArgumentError(str("'", name, "' doesn't have any device set."));
  if (device->is_disk()) return {Keep::kOnDisk, main_device};
  // Weights in host memory that compute on the CPU need not move.
  if (device->is_cpu() && (!main_device.is_cpu() || manage_on_cpu)) {
    return {Keep::kInHostMemory, main_device};
  }
  return {Keep::kResident, modeling::torch_device(*device)};
}

/// Copies values into a model whose weights stay on the CPU. Tied weights stay tied.
void take_values(Module& model, const StateDict& values, bool buffers_too) {
  const auto tied = find_tied_parameters(model);
  const auto take = [&](const auto& tensors) {
    for (const auto& item : tensors) {
      const auto* value = values.find(item.key());
      if (value == nullptr || modeling::find_stand_in(item.value()) != nullptr) continue;
      if (value->is_meta()) {
        throw StateError(str("The state dict has no value for '", item.key(),
                             "': it is on the meta device. Leave it out, or load its weights."));
      }
      set_module_tensor_to_device(model, item.key(), c10::kCPU, {.value = value->detach().clone()});
    }
  };
  take(model.named_parameters());
  if (buffers_too) take(model.named_buffers());
  retie_parameters(model, tied);
}

CorePtr make_core(const ModulePtr& model, const DeviceMap& map, c10::Device main_device,
                  const DispatchOptions& options, Folder folder = Folder::kAsGiven) {
  auto core = std::make_shared<DispatchedCore>(model, map, main_device);
  core->send_options.skip_keys = options.skip_keys;
  core->lazy = std::make_unique<LazyParams>(options.lazy);
  std::set<std::string> gpus;
  std::set<std::string> offloaded;
  for (const auto& [name, device] : map) {
    if (device.is_gpu()) gpus.insert(device.to_string());
    if (device.is_disk() || (device.is_cpu() && !main_device.is_cpu())) {
      offloaded.insert(device.to_string());
    }
  }
  core->several_devices = gpus.size() > 1;
  place_model(*model,
              {.place_of =
                   [&](const std::string& name) {
                     return place_in(map, name, main_device, options.lazy.manage_on_cpu);
                   },
               .offload_buffers = options.offload_buffers,
               .preload_module_classes = options.preload_module_classes,
               .values = options.state_dict ? &*options.state_dict : nullptr,
               .ranges = prepare_folder(*model, map, options, folder, *core),
               .writable = options.lazy.writable,
               .several_devices = core->several_devices,
               .pinned = &core->lazy->pinned_budget()},
              *core->lazy);
  // As in Python, a model that only had to move stays there.
  if (core->lazy->is_empty() && !core->several_devices) core->lazy->keep_moves();
  modeling::set_device_map(model, map, core.get());
  if (!offloaded.empty()) {
    info(str("Some parameters are offloaded to ", join(offloaded, " and "),
             ": they come to the device when they are used."));
  }
  return core;
}

DeviceMap computed_map(const Module& model, const std::string& kind,
                       const LoadDispatchOptions& options) {
  if (std::ranges::find(kComputedMaps, kind) == kComputedMaps.end()) {
    throw ArgumentError(
        str("device_map is '", kind, "'. Give a map, or one of: ", join(kComputedMaps), "."));
  }
  std::optional<DtypeLike> dtype;
  if (options.dtype) dtype = *options.dtype;
  auto max_memory = options.max_memory;
  if (kind != "sequential") {
    max_memory =
        get_balanced_memory(model, {.max_memory = max_memory,
                                    .no_split_module_classes = options.no_split_module_classes,
                                    .dtype = dtype,
                                    .low_zero = kind == "balanced_low_0"});
  }
  return infer_auto_device_map(model, {.max_memory = max_memory,
                                       .no_split_module_classes = options.no_split_module_classes,
                                       .dtype = dtype,
                                       .offload_buffers = options.offload_buffers});
}

}  // namespace

// -- what a handle does ---------------------------------------------------------------------------

DispatchedCore::DispatchedCore(ModulePtr model, DeviceMap map, c10::Device device)
    : module(std::move(model)), device_map(std::move(map)), main_device(device) {}

DispatchedCore::~DispatchedCore() { modeling::set_device_map(module, std::nullopt, this); }

std::shared_ptr<void> DispatchedCore::enter_forward() const {
  if (lazy) lazy->check_not_moved();
  if (!several_devices) return nullptr;
  return std::make_shared<lazy::OneDevicePerOperator>();
}

StateDict DispatchedCore::state_dict() const { return get_state_dict_offloaded_model(*module); }
LazyStats DispatchedCore::stats() const { return lazy ? lazy->stats() : LazyStats{}; }
void DispatchedCore::prefetch(std::int64_t depth) const {
  if (lazy) lazy->prefetch(depth);
}
void DispatchedCore::offload_now() const {
  if (lazy) lazy->offload_now();
}
void DispatchedCore::reset() const {
  if (lazy) lazy->reset();
}
void DispatchedCore::remove_hooks() {
  if (lazy) lazy->restore();
  folder_lock.reset();
  several_devices = false;
  modeling::set_device_map(module, std::nullopt, this);
  note_device();
}

void DispatchedCore::note_device() { main_device = first_device(*module); }

const LoadCheckpointReport& DispatchedCore::load_report() const {
  static const LoadCheckpointReport none;
  return loaded != nullptr ? *loaded : none;
}

void DispatchedCore::check_movable() const {
  if (!several_devices && (lazy == nullptr || lazy->is_empty())) return;
  throw StateError(
      "You can't move a model that has some modules offloaded to cpu or disk, or is spread over "
      "devices. Call remove_hooks() first.");
}

// -- the functions --------------------------------------------------------------------------------

CorePtr cpu_offload(const ModulePtr& model, const CpuOffloadOptions& options) {
  check_model(model);
  const auto device = with_index(options.execution_device.value_or(first_device(*model)));
  if (options.state_dict && device.is_cpu() && !options.lazy.manage_on_cpu) {
    take_values(*model, *options.state_dict, options.offload_buffers);
  }
  return make_core(model, {{"", "cpu"}}, device,
                   {.state_dict = options.state_dict,
                    .offload_buffers = options.offload_buffers,
                    .preload_module_classes = options.preload_module_classes,
                    .lazy = options.lazy});
}

CorePtr disk_offload(const ModulePtr& model, const std::filesystem::path& offload_dir,
                     const DiskOffloadOptions& options) {
  check_model(model);
  const auto device = with_index(options.execution_device.value_or(first_device(*model)));
  return make_core(model, {{"", "disk"}}, device,
                   {.offload_dir = offload_dir,
                    .offload_buffers = options.offload_buffers,
                    .preload_module_classes = options.preload_module_classes,
                    .lazy = options.lazy});
}

CorePtr cpu_offload_with_hook(const ModulePtr& model, const CpuOffloadWithHookOptions& options) {
  check_model(model);
  const auto fallback = state::accelerator_backend() != nullptr ? c10::kCUDA : c10::kCPU;
  const auto device = with_index(options.execution_device.value_or(c10::Device(fallback)));
  auto lazy = options.lazy;
  lazy.prefetch_depth = 0;
  lazy.keep = std::numeric_limits<std::int32_t>::max();  // until offload() is called
  auto core = std::make_shared<DispatchedCore>(model, DeviceMap{{"", "cpu"}}, device);
  core->lazy = std::make_unique<LazyParams>(lazy);
  if (options.prev_module_hook) {
    core->lazy->before_fill([previous = *options.prev_module_hook] { previous.offload(); });
  }
  if (device.is_cpu() && !lazy.manage_on_cpu) return core;
  place_model(*model,
              {.place_of = [&](const std::string&) { return Place{Keep::kInHostMemory, device}; },
               .offload_buffers = true,
               .preload_module_classes = {model->name()},  // all of it is one group
               .pinned = &core->lazy->pinned_budget()},
              *core->lazy);
  return core;
}

namespace {

CorePtr dispatch(const ModulePtr& model, const DeviceMap& device_map,
                 const DispatchOptions& options, Folder folder) {
  check_device_map(*model, device_map);
  std::set<MapDevice> devices;
  auto main_device = options.main_device;
  for (const auto& [name, device] : device_map) {
    devices.insert(device);
    if (device.is_disk()) continue;
    const auto here = modeling::torch_device(device);  // nothing has changed if there is none
    if (!main_device && !device.is_cpu()) main_device = here;
  }
  const auto computes_on = with_index(main_device.value_or(c10::Device(c10::kCPU)));
  const auto& only = *devices.begin();
  if (devices.size() == 1 && !only.is_disk() && !options.force_hooks &&
      !options.lazy.manage_on_cpu) {
    // No part of it is offloaded: it only has to move.
    return make_core(model, device_map, modeling::torch_device(only), options, folder);
  }
  return make_core(model, device_map, computes_on, options, folder);
}

/// Tensors that the checkpoint did not have keep the values of the model. Those on disk are written
/// to the folder, which may have others from before.
void keep_missing(const Module& model, const std::filesystem::path& checkpoint,
                  const LoadCheckpointReport& report, const std::optional<DeviceMap>& map,
                  const LoadDispatchOptions& options) {
  const auto own = accelerate::state_dict(model);
  const auto buffers = model.named_buffers();
  std::vector<std::string> absent;
  std::vector<std::string> kept;
  StateDict values;
  for (const auto& name : report.missing_keys) {
    const auto* tensor = own.find(name);
    if (tensor == nullptr) continue;  // a packed weight: its parts throw by name
    (has_value(*tensor) || tensor->numel() == 0 ? kept : absent).push_back(name);
    const auto* place = map ? find_in_device_map(*map, name) : nullptr;
    if (place == nullptr || !place->is_disk()) continue;
    if (options.offload_buffers || !buffers.contains(name)) values.insert(name, *tensor);
  }
  if (!absent.empty()) {
    throw StateError(str("The checkpoint '", checkpoint.string(), "' has no ", join(absent),
                         ", and the model no values for them: they are on the meta device. Give a "
                         "KeyMapping if they have other names there, or a model with values."));
  }
  if (!kept.empty()) {
    warn(str("The checkpoint '", checkpoint.string(), "' has no ", join(kept),
             ": they keep the values that the model had."));
  }
  if (!values.is_empty()) offload_state_dict(*options.offload_folder, values);
}

}  // namespace

CorePtr dispatch_model(const ModulePtr& model, const DeviceMap& device_map,
                       const DispatchOptions& options) {
  check_model(model);
  return dispatch(model, device_map, options, Folder::kAsGiven);
}

CorePtr load_checkpoint_and_dispatch(const ModulePtr& model,
                                     const std::filesystem::path& checkpoint,
                                     const LoadDispatchOptions& options) {
  check_model(model);
  std::optional<DeviceMap> map;
  if (const auto* kind = std::get_if<std::string>(&options.device_map)) {
    map = computed_map(*model, *kind, options);
  } else if (const auto* given = std::get_if<DeviceMap>(&options.device_map)) {
    map = *given;
  }
  const bool uses_disk =
      map && std::ranges::any_of(*map, [](const auto& entry) { return entry.second.is_disk(); });
  auto report = std::make_shared<const LoadCheckpointReport>(load_checkpoint_in_model(
      *model, checkpoint,
      {.device_map = map.value_or(DeviceMap()),
       .offload_folder = options.offload_folder,
       .dtype = options.dtype,
       .offload_state_dict = options.offload_state_dict.value_or(uses_disk),
       .offload_buffers = options.offload_buffers,
       .strict = options.strict,
       .broadcast_from_rank0 = options.broadcast_from_rank0,
       .key_mapping = options.key_mapping,
       .progress = options.progress}));
  keep_missing(*model, checkpoint, *report, map, options);
  CorePtr core;
  if (map) {
    core = dispatch(model, *map,
                    {.offload_dir = options.offload_folder,
                     .offload_buffers = options.offload_buffers,
                     .skip_keys = options.skip_keys,
                     .preload_module_classes = options.preload_module_classes,
                     .force_hooks = options.force_hooks,
                     .lazy = options.lazy},
                    Folder::kJustLoaded);
  } else {
    core = std::make_shared<DispatchedCore>(model, DeviceMap(), first_device(*model));
  }
  core->loaded = std::move(report);
  return core;
}

}  // namespace accelerate::detail::offload
