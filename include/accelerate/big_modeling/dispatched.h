// accelerate/big_modeling/dispatched.h - a model whose weights are spread over devices, host memory
// and disk.
//
//     auto model = accelerate::dispatch_model(net, {{"encoder", 0}, {"decoder", "cpu"}});
//     auto y = model(x);   // x may be on the CPU; y comes back to the device of x
//
// Copies are handles to the same model. The module itself works as well, with inputs that are on
// the device of its first weights. Weights that are away report the device on which they compute.
// Keep a handle as long as the module is used: at the end of the last one weights come back to
// where they were, but those of a model of the meta device are not read from disk; they throw by
// name.
//
// Part of accelerate/big_modeling.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/big_modeling/lazy_options.h"
#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/modeling/device_map.h"
#include "accelerate/operations/tensors.h"
#include "accelerate/state_dict.h"

namespace accelerate {

struct LoadCheckpointReport;  // accelerate/checkpoint.h

namespace detail::offload {

class LazyParams;

/// What the copies of a dispatched model share.
class ACCELERATE_API DispatchedCore {
 public:
  DispatchedCore(std::shared_ptr<torch::nn::Module> model, DeviceMap map, c10::Device device);
  /// Weights come back to where they were, if others hold the module. Those that were on the meta
  /// device and are on disk throw when they are used.
  ~DispatchedCore();
  DispatchedCore(const DispatchedCore&) = delete;
  DispatchedCore& operator=(const DispatchedCore&) = delete;

  /// Checks that the weights were not moved. The guard that it returns lives until the forward
  /// has ended.
  [[nodiscard]] std::shared_ptr<void> enter_forward() const;
  [[nodiscard]] StateDict state_dict() const;
  [[nodiscard]] LazyStats stats() const;
  void prefetch(std::int64_t depth) const;
  void offload_now() const;
  void reset() const;
  void remove_hooks();
  void check_movable() const;
  /// After the module was moved.
  void note_device();
  [[nodiscard]] const LoadCheckpointReport& load_report() const;

  /// Keeps others from writing the offload folder. Goes after what is read from there.
  std::shared_ptr<void> folder_lock;
  /// Goes after the module: if no other owner holds it, nothing is put back.
  std::unique_ptr<LazyParams> lazy;
  std::shared_ptr<torch::nn::Module> module;
  DeviceMap device_map;
  c10::Device main_device;
  SendOptions send_options;
  /// Parameters are on several devices that compute.
  bool several_devices = false;
  /// Null if no checkpoint was loaded.
  std::shared_ptr<const LoadCheckpointReport> loaded;
};

}  // namespace detail::offload

template <detail::modeling::ModelHolder Holder>
class Dispatched {
 public:
  using Module = typename detail::modeling::ModuleOf<Holder>::type;

  /// An empty handle, to be assigned to. Its functions throw `StateError`.
  Dispatched() = default;
  /// For this library.
  Dispatched(Holder holder, std::shared_ptr<detail::offload::DispatchedCore> core)
      : core_(std::move(core)), holder_(std::move(holder)) {}

  /// `forward` with its tensors on the main device; what it returns comes to the device of the
  /// first tensor that went in. Throws `StateError` if the module was moved meanwhile, and what
  /// went wrong if weights could not be brought.
  template <class... Args>
  auto operator()(Args&&... args) const {
    const auto& core = checked();
    std::optional<c10::Device> device;
    (note_device(device, args), ...);
    const auto scope = core.enter_forward();
    // A forward that changes its arguments gets them as they are.
    if constexpr (requires { module().forward(on_device(core, args)...); }) {
      return back_on(device, module().forward(on_device(core, args)...));
    } else {
      return back_on(device, module().forward(std::forward<Args>(args)...));
    }
  }
  [[nodiscard]] Module* operator->() const { return &checked_module(); }
  [[nodiscard]] Module& operator*() const { return checked_module(); }
  [[nodiscard]] const Holder& holder() const {
    checked();
    return *holder_;
  }

  [[nodiscard]] const DeviceMap& hf_device_map() const { return checked().device_map; }
  /// Where weights in host memory and on disk are computed with.
  [[nodiscard]] c10::Device main_device() const { return checked().main_device; }
  /// All parameters and buffers in host memory, copies where they are offloaded. Nothing is brought
  /// to a device for it.
  [[nodiscard]] StateDict state_dict() const { return checked().state_dict(); }
  [[nodiscard]] LazyStats stats() const { return checked().stats(); }
  /// What `load_checkpoint_and_dispatch` found in the checkpoint; empty for other functions.
  [[nodiscard]] const LoadCheckpointReport& load_report() const { return checked().load_report(); }
  /// How many groups of weights are brought ahead from now on.
  void prefetch(std::int64_t depth) const { checked().prefetch(depth); }
  /// Releases the weights that are on the device for a short time, and their memory.
  void offload_now() const { checked().offload_now(); }
  /// After a fill that failed: tries again when the weights are used.
  void reset() const { checked().reset(); }
  /// Puts all weights back to the devices where they were before, those of the meta device on the
  /// CPU. The module is an ordinary one afterwards. Weights that a checkpoint was loaded to are
  /// there where it was loaded to: `to` brings them together. A model whose map had a single device
  /// stays there.
  void remove_hooks() const { checked().remove_hooks(); }

  /// Moves the module if no weight of it is offloaded, and all are on one device: after
  /// `remove_hooks`. Otherwise throws `StateError`: a dispatched model stays where it is.
  template <class... Args>
  void to(Args&&... args) const {
    checked().check_movable();
    module().to(std::forward<Args>(args)...);
    checked().note_device();
  }

  explicit operator bool() const noexcept { return core_ != nullptr; }
  /// For this library.
  [[nodiscard]] const std::shared_ptr<detail::offload::DispatchedCore>& _core() const noexcept {
    return core_;
  }

 private:
  detail::offload::DispatchedCore& checked() const {
    if (!core_) detail::refuse_empty("model");
    return *core_;
  }
  [[nodiscard]] Module& checked_module() const {
    checked();
    return module();
  }
  [[nodiscard]] Module& module() const {
    return *detail::modeling::ModuleOf<Holder>::pointer(*holder_);
  }
  template <class T>
  static void note_device(std::optional<c10::Device>& device, const T& value) {
    if constexpr (TensorTree<T>) {
      if (!device) device = find_device(value);
    }
  }
  template <class T>
  static auto on_device(const detail::offload::DispatchedCore& core, const T& value) {
    if constexpr (TensorTree<T>) {
      return send_to_device(value, core.main_device, core.send_options);
    } else {
      return value;
    }
  }
  template <class T>
  static auto back_on(const std::optional<c10::Device>& device, T&& value) {
    if constexpr (TensorTree<std::remove_cvref_t<T>>) {
      if (device) return send_to_device(std::forward<T>(value), *device);
    }
    return std::remove_cvref_t<T>(std::forward<T>(value));
  }

  std::shared_ptr<detail::offload::DispatchedCore> core_ = nullptr;
  std::optional<Holder> holder_ = std::nullopt;  // goes first: see DispatchedCore::lazy
};

}  // namespace accelerate
