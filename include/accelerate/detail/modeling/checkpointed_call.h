// accelerate/detail/modeling/checkpointed_call.h - a call that backward repeats.
//
// Part of accelerate/nn/activation_checkpoint.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/tree.h"

namespace accelerate {

struct ActivationCheckpointOptions;

namespace detail::modeling {

template <class F, class... Inputs>
decltype(auto) call_block(F& f, Inputs&&... inputs) {
  if constexpr (ModelHolder<F>) {
    return f->forward(std::forward<Inputs>(inputs)...);
  } else {
    return std::invoke(f, std::forward<Inputs>(inputs)...);
  }
}

/// While it lives, tensors that this thread saves for backward are not kept: `repeat`, called with
/// the inputs, saves them again.
class ACCELERATE_API CheckpointScope {
 public:
  using Repeat = std::function<void(std::span<const at::Tensor> inputs)>;

  /// Before the first forward with gradients, best before any backward: replaces LibTorch's
  /// autograd engine, once. Throws `UnsupportedError` if it was replaced by others.
  static void install();

  CheckpointScope(const ActivationCheckpointOptions& options, std::span<const at::Tensor> inputs,
                  const std::type_info& function, Repeat repeat);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  struct Recording;
  std::unique_ptr<Recording> recording_;
};

/// A tensor without elements, in the place of one that is kept elsewhere.
[[nodiscard]] ACCELERATE_API const at::Tensor& placeholder();

/// A function and its inputs. `Inputs` are references or values, as they are passed.
template <class F, class... Inputs>
class CheckpointedCall {
 public:
  explicit CheckpointedCall(F f, const std::remove_reference_t<Inputs>&... inputs)
      : function(std::move(f)), inputs_(inputs...) {}

  /// Returns the tensors of all inputs, and keeps them no longer.
  [[nodiscard]] std::vector<at::Tensor> take_tensors() {
    std::vector<at::Tensor> tensors;
    if constexpr (kHasTensors) {
      tensors = tree::leaves(inputs_, tree::Order::kSorted);
      inputs_ = tree::map([](const at::Tensor&) { return placeholder(); }, std::move(inputs_));
    }
    return tensors;
  }

  /// Calls the function with `tensors` in the places of those that were taken.
  void repeat(std::span<const at::Tensor> tensors) {
    Held inputs = with_tensors(tensors);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      static_cast<void>(call_block(function, pass<Inputs>(std::get<I>(inputs))...));
    }(std::index_sequence_for<Inputs...>());
  }

  F function;

 private:
  using Held = std::tuple<std::decay_t<Inputs>...>;
  static constexpr bool kHasTensors = (TensorTree<std::decay_t<Inputs>> || ...);

  [[nodiscard]] Held with_tensors([[maybe_unused]] std::span<const at::Tensor> tensors) const {
    if constexpr (kHasTensors) {
      return tree::unflatten(inputs_, tensors, tree::Order::kSorted);
    } else {
      return inputs_;
    }
  }
  /// As the input was passed: by reference or as a temporary.
  template <class Input, class T>
  static decltype(auto) pass(T& input) {
    if constexpr (std::is_lvalue_reference_v<Input>) {
      return static_cast<T&>(input);
    } else {
      return std::move(input);
    }
  }

  Held inputs_;
};

}  // namespace detail::modeling
}  // namespace accelerate
