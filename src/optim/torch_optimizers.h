// src/optim/torch_optimizers.h - the optimizers of LibTorch that this library knows.
//
// One adapter per class: its options and state by Python's names, and the optimizer of
// accelerate/optim.h with the same formula. Steps, states, state dicts and cyclic schedules use it.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "accelerate/optim/options.h"
#include "optim/optimizer_traits.h"

namespace accelerate::detail::optim {

template <class OptimizerType, class OptionsType, class StateType, class OwnOptionsType>
struct TorchAdapter {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
  using State = StateType;
  /// The options of ours with the same formula.
  using OwnOptions = OwnOptionsType;

  /// Calls `f(name, option)` for each option. `O` is `Options`, const or not.
  template <class O, class F>
  static void for_each_option(O& options, const F& f) {
    f("lr", options.lr());
    f("weight_decay", options.weight_decay());
    if constexpr (requires { options.betas(); }) f("betas", options.betas());
    if constexpr (requires { options.eps(); }) f("eps", options.eps());
    if constexpr (requires { options.amsgrad(); }) f("amsgrad", options.amsgrad());
    if constexpr (requires { options.momentum(); }) f("momentum", options.momentum());
    if constexpr (requires { options.dampening(); }) f("dampening", options.dampening());
    if constexpr (requires { options.nesterov(); }) f("nesterov", options.nesterov());
    if constexpr (requires { options.alpha(); }) f("alpha", options.alpha());
    if constexpr (requires { options.centered(); }) f("centered", options.centered());
    if constexpr (requires { options.lr_decay(); }) {
      f("lr_decay", options.lr_decay());
      f("initial_accumulator_value", options.initial_accumulator_value());
    }
  }

  /// Calls `f(name, field)` for each field of a state, in the order of `OptimizerTraits::states`:
  /// `step` is an int64, the others are tensors.
  template <class F>
  static void for_each_state(State& state, const F& f) {
    if constexpr (requires { state.step(); }) f("step", state.step());
    if constexpr (requires { state.exp_avg(); }) {
      f("exp_avg", state.exp_avg());
      f("exp_avg_sq", state.exp_avg_sq());
      f("max_exp_avg_sq", state.max_exp_avg_sq());
    }
    if constexpr (requires { state.sum(); }) f("sum", state.sum());
    if constexpr (requires { state.square_avg(); }) f("square_avg", state.square_avg());
    if constexpr (requires { state.momentum_buffer(); }) {
      f("momentum_buffer", state.momentum_buffer());
    }
    if constexpr (requires { state.grad_avg(); }) f("grad_avg", state.grad_avg());
  }

  /// The options of a group of this optimizer as ours.
  [[nodiscard]] static OwnOptions own_options(const torch::optim::OptimizerOptions& of) {
    OwnOptions own;
    for_each_option(static_cast<const Options&>(of), [&]<class T>(std::string_view name, T& value) {
      if constexpr (requires { own.betas = {std::get<0>(value), std::get<1>(value)}; }) {
        own.betas = {std::get<0>(value), std::get<1>(value)};
      } else {
        const auto fields = value_fields(std::type_identity<OwnOptions>());
        for_each_field(own, fields, [&](const auto& field, auto& member) {
          if constexpr (std::is_same_v<T,
                                       std::add_const_t<std::remove_cvref_t<decltype(member)>>>) {
            if (field.name == name) member = value;
          }
        });
      }
    });
    return own;
  }
};

#define ACCELERATE_TORCH_ADAPTER(Name)                                                          \
  TorchAdapter<torch::optim::Name, torch::optim::Name##Options, torch::optim::Name##ParamState, \
               Name##Options>
using TorchAdapters = std::tuple<ACCELERATE_TORCH_ADAPTER(AdamW), ACCELERATE_TORCH_ADAPTER(Adam),
                                 ACCELERATE_TORCH_ADAPTER(SGD), ACCELERATE_TORCH_ADAPTER(Adagrad),
                                 ACCELERATE_TORCH_ADAPTER(RMSprop)>;
#undef ACCELERATE_TORCH_ADAPTER

/// Calls `f(adapter)` and returns true if `optimizer` is exactly one of these classes; a derived
/// class may keep another state and step in another way.
template <class F>
bool with_torch_adapter(const torch::optim::Optimizer& optimizer, const F& f) {
  const auto& type = typeid(optimizer);
  return [&]<class... Adapters>(std::type_identity<std::tuple<Adapters...>>) {
    return ((type == typeid(typename Adapters::Optimizer) && (f(Adapters()), true)) || ...);
  }(std::type_identity<TorchAdapters>());
}

/// Calls `f(options, adapter)` with the options cast to their class, and returns true if they are
/// those of one of these classes. `Base` is `OptimizerOptions`, const or not.
template <class Base, class F>
bool with_torch_options(Base& options, const F& f) {
  const auto attempt = [&]<class Adapter>(Adapter adapter) {
    using Options = typename Adapter::Options;
    auto* const known =
        dynamic_cast<std::conditional_t<std::is_const_v<Base>, const Options, Options>*>(&options);
    if (known != nullptr) f(*known, adapter);
    return known != nullptr;
  };
  return std::apply([&](auto... adapters) { return (attempt(adapters) || ...); }, TorchAdapters());
}

}  // namespace accelerate::detail::optim
