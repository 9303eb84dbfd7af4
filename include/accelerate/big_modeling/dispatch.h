// accelerate/big_modeling/dispatch.h - put the weights of a model where there is room for them.
//
//     auto net = accelerate::init_empty_weights([&] { return Net(config); });
//     auto model = accelerate::load_checkpoint_and_dispatch(
//         net, "checkpoint", {.device_map = "auto", .offload_folder = "spill"});
//     auto y = model(x);
//
// Weights in host memory or on disk are brought to the device just before the first operator that
// uses them, by prefetching most of the time, and leave it after the last one. No change to the
// module's code is needed, results are those of the resident model bit by bit, and training works.
// docs/big_models.md says how.
//
// Part of accelerate/big_modeling.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/big_modeling/dispatched.h"
#include "accelerate/big_modeling/lazy_options.h"
#include "accelerate/checkpoint/key_mapping.h"
#include "accelerate/checkpoint/offload_index.h"
#include "accelerate/modeling/device_map.h"
#include "accelerate/state_dict.h"

namespace accelerate {

struct CpuOffloadOptions {
  /// Unset: that of the first parameter.
  std::optional<c10::Device> execution_device = std::nullopt;
  /// Buffers too. Off: they stay on the execution device.
  bool offload_buffers = false;
  /// The values, by name; copied. Unset: those of the model.
  std::optional<StateDict> state_dict = std::nullopt;
  /// Classes whose modules come and go as a whole. Others do so layer by layer.
  std::vector<std::string> preload_module_classes = {};
  LazyOptions lazy = {};
};

struct DiskOffloadOptions {
  std::optional<c10::Device> execution_device = std::nullopt;
  bool offload_buffers = false;
  std::vector<std::string> preload_module_classes = {};
  LazyOptions lazy = {};
};

struct DispatchOptions {
  /// Where weights on "cpu" and "disk" are computed with. Unset: the first GPU of the map, else the
  /// CPU.
  std::optional<c10::Device> main_device = std::nullopt;
  /// Values of offloaded weights. Unset: those of the model.
  std::optional<StateDict> state_dict = std::nullopt;
  /// For weights on "disk". What it has is compared with the model: see `LazyOptions::reuse`.
  std::optional<std::filesystem::path> offload_dir = std::nullopt;
  /// Where weights on "disk" are. Unset: the index of `offload_dir`.
  std::optional<OffloadIndex> offload_index = std::nullopt;
  bool offload_buffers = false;
  /// Entries of mappings among the inputs that stay where they are.
  std::vector<std::string> skip_keys = {};
  std::vector<std::string> preload_module_classes = {};
  /// Also for a map with a single device, where moving the model is enough.
  bool force_hooks = false;
  LazyOptions lazy = {};
};

/// Nothing: the weights are loaded and not dispatched. A text: "auto", "balanced",
/// "balanced_low_0" or "sequential".
using DeviceMapChoice = std::variant<std::monostate, std::string, DeviceMap>;

struct LoadDispatchOptions {
  DeviceMapChoice device_map = {};
  /// For a map that is computed. Unset: what is free.
  std::optional<MaxMemory> max_memory = std::nullopt;
  /// For a map that is computed: classes that are not split over devices.
  std::vector<std::string> no_split_module_classes = {};
  std::optional<std::filesystem::path> offload_folder = std::nullopt;
  bool offload_buffers = false;
  std::optional<c10::ScalarType> dtype = std::nullopt;
  /// Unset: if the map has "disk".
  std::optional<bool> offload_state_dict = std::nullopt;
  std::vector<std::string> skip_keys = {};
  std::vector<std::string> preload_module_classes = {};
  bool force_hooks = false;
  bool strict = false;
  bool broadcast_from_rank0 = false;
  /// Ours: from the names of the checkpoint to those of the model.
  KeyMapping key_mapping = {};
  /// Ours: a progress bar of the bytes that are loaded. Unset: ACCELERATE_PROGRESS, else none.
  std::optional<bool> progress = std::nullopt;
  LazyOptions lazy = {};
};

/// Moves a model that `cpu_offload_with_hook` took to the host and back.
class ACCELERATE_API UserCpuOffloadHook {
 public:
  /// For this library.
  explicit UserCpuOffloadHook(std::shared_ptr<detail::offload::DispatchedCore> core)
      : core_(std::move(core)) {}
  /// The weights leave the device until the model is used again.
  void offload() const { core_->offload_now(); }
  /// The model is an ordinary one again, on the host.
  void remove() const { core_->remove_hooks(); }
  [[nodiscard]] LazyStats stats() const { return core_->stats(); }

 private:
  std::shared_ptr<detail::offload::DispatchedCore> core_;
};

struct CpuOffloadWithHookOptions {
  /// Unset: GPU 0 if there is one, else the CPU.
  std::optional<c10::Device> execution_device = std::nullopt;
  /// Of the model that runs before: its weights leave the device when this one is needed there.
  std::optional<UserCpuOffloadHook> prev_module_hook = std::nullopt;
  /// Without `prefetch_depth` and `keep`: the whole model is one group, which stays until
  /// `offload()`.
  LazyOptions lazy = {};
};

namespace detail::offload {

using ModulePtr = std::shared_ptr<torch::nn::Module>;
using CorePtr = std::shared_ptr<DispatchedCore>;

[[nodiscard]] ACCELERATE_API CorePtr cpu_offload(const ModulePtr& model,
                                                 const CpuOffloadOptions& options);
[[nodiscard]] ACCELERATE_API CorePtr
cpu_offload_with_hook(const ModulePtr& model, const CpuOffloadWithHookOptions& options);
[[nodiscard]] ACCELERATE_API CorePtr disk_offload(const ModulePtr& model,
                                                  const std::filesystem::path& offload_dir,
                                                  const DiskOffloadOptions& options);
[[nodiscard]] ACCELERATE_API CorePtr dispatch_model(const ModulePtr& model,
                                                    const DeviceMap& device_map,
                                                    const DispatchOptions& options);
[[nodiscard]] ACCELERATE_API CorePtr
load_checkpoint_and_dispatch(const ModulePtr& model, const std::filesystem::path& checkpoint,
                             const LoadDispatchOptions& options);

}  // namespace detail::offload

/// Keeps all weights in host memory, pinned if there is a GPU. On the CPU nothing has to move, and
/// the model is used as it is. Throws `StateError` for a parameter without a value.
template <detail::modeling::ModelHolder M>
[[nodiscard]] Dispatched<M> cpu_offload(M model, const CpuOffloadOptions& options = {}) {
  auto core = detail::offload::cpu_offload(detail::modeling::ModuleOf<M>::pointer(model), options);
  return {std::move(model), std::move(core)};
}

/// Keeps a whole model in host memory until it is used, and on the device from then on until
/// `offload()` of the hook is called: for programs that run several models in turn.
template <detail::modeling::ModelHolder M>
[[nodiscard]] std::pair<M, UserCpuOffloadHook> cpu_offload_with_hook(
    M model, const CpuOffloadWithHookOptions& options = {}) {
  UserCpuOffloadHook hook(detail::offload::cpu_offload_with_hook(
      detail::modeling::ModuleOf<M>::pointer(model), options));
  return {std::move(model), std::move(hook)};
}

/// Keeps all weights in a folder. Values that it does not have yet are written; a model on the meta
/// device takes those of the folder. On the CPU the files are mapped and nothing is copied. The
/// folder is locked against writers until `remove_hooks` or the end of the handle. Throws
/// `CheckpointError` if a file cannot be written or read, the folder is of another model, or others
/// use it.
template <detail::modeling::ModelHolder M>
[[nodiscard]] Dispatched<M> disk_offload(M model, const std::filesystem::path& offload_dir,
                                         const DiskOffloadOptions& options = {}) {
  auto core = detail::offload::disk_offload(detail::modeling::ModuleOf<M>::pointer(model),
                                            offload_dir, options);
  return {std::move(model), std::move(core)};
}

/// Puts each part of a model where the map says. Parts on "cpu" and "disk" are computed with on the
/// main device. Tied weights exist once.
///
/// Throws `ArgumentError` for a map that leaves tensors out, and for parts on "disk" without a
/// folder or index; otherwise as `cpu_offload` and `disk_offload`.
template <detail::modeling::ModelHolder M>
[[nodiscard]] Dispatched<M> dispatch_model(M model, const DeviceMap& device_map,
                                           const DispatchOptions& options = {}) {
  auto core = detail::offload::dispatch_model(detail::modeling::ModuleOf<M>::pointer(model),
                                              device_map, options);
  return {std::move(model), std::move(core)};
}

/// Loads a checkpoint (see `load_checkpoint_in_model`) into a model, usually one of
/// `init_empty_weights`, and dispatches it. What the checkpoint lacks keeps the value of the model,
/// with a warning; see `Dispatched::load_report`. Throws `ArgumentError` for a text that is no kind
/// of device map, `StateError` for a tensor that neither has; otherwise as those two.
template <detail::modeling::ModelHolder M>
[[nodiscard]] Dispatched<M> load_checkpoint_and_dispatch(M model,
                                                         const std::filesystem::path& checkpoint,
                                                         const LoadDispatchOptions& options = {}) {
  auto core = detail::offload::load_checkpoint_and_dispatch(
      detail::modeling::ModuleOf<M>::pointer(model), checkpoint, options);
  return {std::move(model), std::move(core)};
}

}  // namespace accelerate
