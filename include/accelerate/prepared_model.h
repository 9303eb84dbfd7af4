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

#include <memory>
#include <optional>
#include <source_location>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/detail/accelerator/model_core.h"
#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/operations/tensors.h"
#include "accelerate/state_dict.h"

namespace accelerate {

template <class Holder>
class PreparedModel {
 public:
  using Module = typename detail::accelerator::ModuleOf<Holder>::type;

  /// The module, in its forward until the end of the full expression.
  class Scope {
   public:
    Scope(const detail::accelerator::ModelCore& core, Module* module)
        : forward_(core), module_(module) {}
    Module* operator->() const { return module_; }
    /// Collective if parameters are sharded. The forward has returned its results.
    void finish() const { forward_.finish(); }

   private:
    detail::accelerator::ForwardScope forward_;
    Module* module_;
  };

  /// An empty handle, to be assigned to. Its functions throw `StateError`.
  PreparedModel() = default;
  /// For this library.
  PreparedModel(Holder holder, std::shared_ptr<detail::accelerator::ModelCore> core)
      : holder_(std::move(holder)), core_(std::move(core)) {}

  /// `forward` under autocast; tensors of 16 bits in what it returns become float32, wherever a
  /// tree has them (accelerate/tree.h).
  template <class... Args>
  auto operator()(Args&&... args) const {
    const auto& core = checked();
    const auto forward = [&](auto&&... inputs) {
      const Scope scope(core, module());
      if constexpr (std::is_void_v<decltype(scope->forward(
                        std::forward<decltype(inputs)>(inputs)...))>) {
        scope->forward(std::forward<decltype(inputs)>(inputs)...);
        scope.finish();
      } else {
        auto output = scope->forward(std::forward<decltype(inputs)>(inputs)...);
        scope.finish();
        return output;
      }
    };
    // A forward that changes its arguments gets them as they are.
    if constexpr (requires { module()->forward(as_input(core, args)...); }) {
      if (core.moves_inputs || core.input_dtype) {
        return converted(core, forward, as_input(core, args)...);
      }
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
  /// Collective if parameters are sharded. Whole parameters and buffers by name, in Python's order.
  /// A model that is not sharded returns its own tensors, not copies.
  [[nodiscard]] StateDict state_dict() const { return checked().state_dict(); }
  /// Collective if parameters are sharded. Copies the values of `state_dict` back. Throws
  /// `StateDictMismatch` as `accelerate::load_state_dict`.
  void load_state_dict(const StateDict& state, bool strict = true) const {
    checked().load_state_dict(state, strict);
  }
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
  [[nodiscard]] const std::shared_ptr<detail::accelerator::ModelCore>& _core() const {
    return core_;
  }

 private:
  const detail::accelerator::ModelCore& checked() const {
    if (!core_) detail::refuse_empty("model");
    return *core_;
  }
  [[nodiscard]] Module* module() const {
    return detail::accelerator::ModuleOf<Holder>::pointer(*holder_).get();
  }
  [[nodiscard]] torch::nn::Module& module_of() const { return *checked().module; }

  template <class T>
  static auto as_input(const detail::accelerator::ModelCore& core, const T& value) {
    if constexpr (TensorTree<T>) {
      auto moved = core.moves_inputs ? send_to_device(value, core.device) : T(value);
      return core.input_dtype ? as_dtype(std::move(moved), *core.input_dtype) : moved;
    } else {
      return value;
    }
  }
  template <class T>
  static T as_dtype(T tree, at::ScalarType dtype) {
    return recursively_apply(
        [dtype](const at::Tensor& one) {
          return one.defined() && one.is_floating_point() ? one.to(dtype) : one;
        },
        std::move(tree));
  }

  /// Converted outside of autocast, as in Python.
  template <class Forward, class... Args>
  static auto converted(const detail::accelerator::ModelCore& core, const Forward& forward,
                        Args&&... args) {
    using Output = std::remove_cvref_t<std::invoke_result_t<const Forward&, Args...>>;
    if constexpr (TensorTree<Output>) {
      Output output = forward(std::forward<Args>(args)...);
      if (core.output_dtype) return as_dtype(std::move(output), *core.output_dtype);
      return core.cast ? convert_to_fp32(std::move(output)) : output;
    } else {
      return forward(std::forward<Args>(args)...);
    }
  }

  std::optional<Holder> holder_ = std::nullopt;
  std::shared_ptr<detail::accelerator::ModelCore> core_ = nullptr;
};

}  // namespace accelerate
