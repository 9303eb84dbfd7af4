// accelerate/big_modeling/hooks.h - functions around the forward of a model.
//
//     accelerate::Hooked model(net);
//     model.add_hook(std::make_shared<MyHook>());
//     auto y = model(x);
//
// torch::nn::Module has no place for hooks: they run for calls through `Hooked` alone, not for
// calls of the module or of its children. What needs to see all uses of a weight (cpu_offload,
// dispatch_model, ...) does not depend on them. Part of accelerate/big_modeling.h.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/errors.h"

namespace accelerate {

/// The arguments of a forward. C++ has no keywords, so these are all.
using ModelArgs = std::vector<c10::IValue>;

/// What happens around a forward; each function may be overridden.
class ACCELERATE_API ModelHook {
 public:
  virtual ~ModelHook();

  /// When the hook is added.
  virtual void init_hook(torch::nn::Module& module);
  /// Returns the arguments for `forward`, of the same types.
  [[nodiscard]] virtual ModelArgs pre_forward(torch::nn::Module& module, ModelArgs args);
  /// Returns what the caller gets.
  [[nodiscard]] virtual c10::IValue post_forward(torch::nn::Module& module, c10::IValue output);
  /// When the hook is removed.
  virtual void detach_hook(torch::nn::Module& module);
  /// Whether the forward records no graph.
  [[nodiscard]] virtual bool no_grad() const { return false; }
};

/// Several hooks, in the same order before and after the forward.
class ACCELERATE_API SequentialHook : public ModelHook {
 public:
  explicit SequentialHook(std::vector<std::shared_ptr<ModelHook>> hooks);
  void init_hook(torch::nn::Module& module) override;
  ModelArgs pre_forward(torch::nn::Module& module, ModelArgs args) override;
  c10::IValue post_forward(torch::nn::Module& module, c10::IValue output) override;
  void detach_hook(torch::nn::Module& module) override;
  bool no_grad() const override;

 private:
  std::vector<std::shared_ptr<ModelHook>> hooks_;
};

struct AlignDevicesOptions {
  /// Where the module and its arguments go. Unset: nothing is moved.
  std::optional<c10::Device> execution_device = std::nullopt;
  /// What `forward` returns goes to where its first tensor came from.
  bool io_same_device = false;
  /// Moves also what is below the module.
  bool place_submodules = false;
};
/// Moves a module and its arguments to a device. To offload weights, use `cpu_offload` and
/// `disk_offload`.
class ACCELERATE_API AlignDevicesHook : public ModelHook {
 public:
  explicit AlignDevicesHook(AlignDevicesOptions options) : options_(options) {}
  void init_hook(torch::nn::Module& module) override;
  ModelArgs pre_forward(torch::nn::Module& module, ModelArgs args) override;
  c10::IValue post_forward(torch::nn::Module& module, c10::IValue output) override;

 private:
  AlignDevicesOptions options_;
  std::optional<c10::Device> input_device_ = std::nullopt;
};

struct AddHookOptions {
  /// After the one that is there, in a `SequentialHook`. Off: in its place.
  bool append = false;
};

/// A model with hooks around its forward. Python's add_hook_to_module and remove_hook_from_module.
template <detail::modeling::ModelHolder Holder>
class Hooked {
 public:
  using Module = typename detail::modeling::ModuleOf<Holder>::type;

  explicit Hooked(Holder model) : model_(std::move(model)) {
    if (detail::modeling::ModuleOf<Holder>::pointer(model_) == nullptr) {
      throw ArgumentError("There is no model to put a hook on: the holder is empty.");
    }
  }

  void add_hook(std::shared_ptr<ModelHook> hook, const AddHookOptions& options = {}) {
    if (hook == nullptr) throw ArgumentError("add_hook was given no hook.");
    if (hook_ != nullptr && options.append) {
      hook->init_hook(module());
      hook_ = std::make_shared<SequentialHook>(std::vector{hook_, std::move(hook)});
      return;
    }
    remove_hook();
    hook->init_hook(module());
    hook_ = std::move(hook);
  }
  void remove_hook() {
    if (const auto hook = std::exchange(hook_, nullptr)) hook->detach_hook(module());
  }
  /// Null if there is none.
  [[nodiscard]] const std::shared_ptr<ModelHook>& hook() const noexcept { return hook_; }

  /// Arguments and result must be types that an IValue holds: tensors, numbers, strings, lists and
  /// tuples of them.
  template <class... Args>
  auto operator()(Args&&... args) {
    using Output = std::remove_cvref_t<decltype(module().forward(std::forward<Args>(args)...))>;
    if (hook_ == nullptr) return Output(module().forward(std::forward<Args>(args)...));
    auto given = hook_->pre_forward(module(), ModelArgs{c10::IValue(args)...});
    if (given.size() != sizeof...(Args)) {
      throw ArgumentError("A hook returned another number of arguments than it was given.");
    }
    const auto call = [&]<std::size_t... I>(std::index_sequence<I...>) {
      return c10::IValue(module().forward(given[I].template to<std::decay_t<Args>>()...));
    };
    const at::AutoGradMode gradients(at::GradMode::is_enabled() && !hook_->no_grad());
    auto output = call(std::index_sequence_for<Args...>());
    return hook_->post_forward(module(), std::move(output)).template to<Output>();
  }
  [[nodiscard]] Module* operator->() const { return &module(); }
  [[nodiscard]] const Holder& holder() const noexcept { return model_; }

 private:
  [[nodiscard]] Module& module() const {
    return *detail::modeling::ModuleOf<Holder>::pointer(model_);
  }

  Holder model_;
  std::shared_ptr<ModelHook> hook_ = nullptr;
};

}  // namespace accelerate
