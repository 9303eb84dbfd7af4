// accelerate/prepared_model.h - a model that `Accelerator::prepare` has taken over.
//
//     auto model = accelerator.prepare(net);
//     auto loss = mse_loss(model(x), y);     // forward in the chosen precision, results in float32
//     auto features = model->features(x);    // any other member, in the chosen precision
//
// Copies are handles to the same model.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <atomic>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/autocast.h"
#include "accelerate/data_parallel.h"
#include "accelerate/kwargs.h"
#include "accelerate/state_dict.h"
#include "accelerate/tensor_operations.h"

namespace accelerate {

/// What becomes of the optimizer's state when the values of a parameter are replaced.
enum class ReplacedState : std::uint8_t {
  /// The next step begins anew.
  kDrop,
  /// It stays: the shape must be the same.
  kKeep
};

/// The new state tensor (`name` as in Python: "exp_avg", ...) in place of an old one, which has the
/// shape that the parameter had. Counters are kept.
using CarryState = std::function<at::Tensor(const std::string& name, const at::Tensor& old_state)>;

struct ReplaceParameterOptions {
  std::variant<ReplacedState, CarryState> state = ReplacedState::kDrop;
};

namespace detail {

struct OptimizerCore;
class GradientWatch;

/// How the forward pass of a model is cast.
struct CastSettings {
  c10::DeviceType device_type = c10::DeviceType::CPU;
  at::ScalarType dtype = at::kFloat;
  AutocastKwargs kwargs = {};
};

/// What the copies of a prepared model and its accelerator share.
struct ACCELERATE_API ModelCore {
  std::shared_ptr<torch::nn::Module> module;
  c10::Device device = c10::Device(c10::kCPU);
  std::optional<CastSettings> cast = std::nullopt;
  /// Whether arguments are sent to the device, as Python's DistributedDataParallel does.
  bool moves_inputs = false;
  /// Null where nothing is averaged: one process, evaluation, no trainable parameter.
  std::unique_ptr<DataParallel> parallel = nullptr;
  /// Whether backward averages; off under `no_sync`.
  bool averages = true;
  /// An error ended a backward in the middle of averaging.
  bool unfinished = false;
  /// Got gradients that stay with the process, and nobody asked for that; see `watch`.
  std::atomic<bool> strayed = false;
  std::shared_ptr<GradientWatch> watch = nullptr;
  /// The optimizers of the accelerator, for parameters that are replaced.
  std::function<std::vector<std::shared_ptr<OptimizerCore>>()> optimizers = {};

  /// Collective.
  void replace_parameter(std::string_view name, const at::Tensor& tensor,
                         const ReplaceParameterOptions& options, std::source_location where);
};

/// The module that a holder or a smart pointer leads to.
template <class Holder>
struct ModuleOf;
template <class Holder>
requires torch::detail::is_module_holder<Holder>::value struct ModuleOf<Holder> {
  using type = typename Holder::ContainedType;
  static const std::shared_ptr<type>& pointer(const Holder& holder) { return holder.ptr(); }
};
template <std::derived_from<torch::nn::Module> M>
struct ModuleOf<std::shared_ptr<M>> {
  using type = M;
  static const std::shared_ptr<M>& pointer(const std::shared_ptr<M>& holder) { return holder; }
};

template <class T>
concept ModelHolder = requires {
  typename ModuleOf<T>::type;
};

/// Throws `StateError`.
[[noreturn]] ACCELERATE_API void refuse_empty_model();

}  // namespace detail

template <class Holder>
class PreparedModel {
 public:
  using Module = typename detail::ModuleOf<Holder>::type;

  /// The module, under autocast until the end of the full expression.
  class Scope {
   public:
    Scope(const detail::ModelCore& core, Module* module) : module_(module) {
      if (core.cast) scope_.emplace(core.cast->device_type, core.cast->dtype, core.cast->kwargs);
    }
    Module* operator->() const { return module_; }

   private:
    std::optional<AutocastScope> scope_ = std::nullopt;
    Module* module_;
  };

  /// An empty handle, to be assigned to. Its functions throw `StateError`.
  PreparedModel() = default;
  /// For this library.
  PreparedModel(Holder holder, std::shared_ptr<detail::ModelCore> core)
      : holder_(std::move(holder)), core_(std::move(core)) {}

  /// `forward` under autocast; tensors of 16 bits in what it returns become float32, wherever a
  /// tree has them (accelerate/tree.h).
  template <class... Args>
  auto operator()(Args&&... args) const {
    const auto& core = checked();
    const auto forward = [&](auto&&... inputs) {
      const Scope scope(core, module());
      return scope->forward(std::forward<decltype(inputs)>(inputs)...);
    };
    // A forward that changes its arguments gets them as they are.
    if constexpr (requires { module()->forward(on_device(core, args)...); }) {
      if (core.moves_inputs) return converted(core, forward, on_device(core, args)...);
    }
    return converted(core, forward, std::forward<Args>(args)...);
  }
  /// `model->anything()` runs under autocast; nothing is converted.
  [[nodiscard]] Scope operator->() const { return Scope(checked(), module()); }

  /// What was prepared.
  [[nodiscard]] const Holder& holder() const {
    checked();
    return *holder_;
  }

  [[nodiscard]] std::vector<at::Tensor> parameters(bool recurse = true) const {
    return module_of().parameters(recurse);
  }
  [[nodiscard]] auto named_parameters(bool recurse = true) const {
    return module_of().named_parameters(recurse);
  }
  [[nodiscard]] std::vector<at::Tensor> buffers(bool recurse = true) const {
    return module_of().buffers(recurse);
  }
  [[nodiscard]] auto named_buffers(bool recurse = true) const {
    return module_of().named_buffers(recurse);
  }
  /// Parameters and buffers by name, in Python's order. They are the model's own, not copies.
  [[nodiscard]] StateDict state_dict() const { return accelerate::state_dict(module_of()); }
  void train(bool on = true) const { module_of().train(on); }
  void eval() const { module_of().eval(); }
  [[nodiscard]] bool is_training() const { return module_of().is_training(); }
  [[nodiscard]] c10::Device device() const { return checked().device; }

  /// Collective. Gives a parameter other values, which may be more or fewer: the tensor object
  /// stays, so that members, optimizers and this library keep pointing to it. All processes go on
  /// with the values of process 0. Not while a loss of the old values waits for its backward.
  ///
  /// Throws `ArgumentError` for a name that is not there, and for a state that does not fit.
  ///
  ///     model.replace_parameter("means", means.index({kept}),
  ///                             {.state = [&](auto&, auto& old) { return old.index({kept}); }});
  void replace_parameter(std::string_view name, const at::Tensor& tensor,
                         const ReplaceParameterOptions& options = {},
                         std::source_location where = std::source_location::current()) const {
    checked();
    core_->replace_parameter(name, tensor, options, where);
  }

  explicit operator bool() const noexcept { return core_ != nullptr; }
  void reset() noexcept {
    core_.reset();
    holder_.reset();
  }
  /// For this library.
  [[nodiscard]] const std::shared_ptr<detail::ModelCore>& _core() const { return core_; }

 private:
  const detail::ModelCore& checked() const {
    if (!core_) detail::refuse_empty_model();
    return *core_;
  }
  [[nodiscard]] Module* module() const { return detail::ModuleOf<Holder>::pointer(*holder_).get(); }
  [[nodiscard]] torch::nn::Module& module_of() const { return *checked().module; }

  template <class T>
  static auto on_device(const detail::ModelCore& core, const T& value) {
    if constexpr (TensorTree<T>) {
      return send_to_device(value, core.device);
    } else {
      return value;
    }
  }

  /// Converted outside of autocast, as in Python.
  template <class Forward, class... Args>
  static auto converted(const detail::ModelCore& core, const Forward& forward, Args&&... args) {
    using Output = std::remove_cvref_t<std::invoke_result_t<const Forward&, Args...>>;
    if constexpr (TensorTree<Output>) {
      Output output = forward(std::forward<Args>(args)...);
      return core.cast ? convert_to_fp32(std::move(output)) : output;
    } else {
      return forward(std::forward<Args>(args)...);
    }
  }

  std::optional<Holder> holder_ = std::nullopt;
  std::shared_ptr<detail::ModelCore> core_ = nullptr;
};

}  // namespace accelerate
