// src/optim/optimizer_traits.h - names, state tensors and Python's keys of each optimizer.
//
// The options are listed by `value_fields` in accelerate/optim/options.h, the formulas are in
// optim/update_rules.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "accelerate/optim/options.h"

namespace accelerate::detail::optim {

/// How many tensors the state of a parameter has at most.
inline constexpr std::size_t kMaxSlots = 4;

struct OptimizerTraits {
  std::string_view name;
  /// Whether LibTorch has fused kernels for it.
  bool fused = false;
  /// Python's keys of a group in a state dict, in its order; empty if Python has no such optimizer.
  std::string_view state_dict_keys;
  std::array<std::string_view, kMaxSlots> slots{};
  std::size_t slot_count = 0;

  constexpr OptimizerTraits() = default;
  constexpr OptimizerTraits(std::string_view name_of, bool has_kernels,
                            std::initializer_list<std::string_view> states, std::string_view keys)
      : name(name_of), fused(has_kernels), state_dict_keys(keys), slot_count(states.size()) {
    std::size_t i = 0;
    for (const auto state : states) slots[i++] = state;
  }

  /// The names of the state tensors; their positions are the slots of a bucket.
  [[nodiscard]] constexpr std::span<const std::string_view> states() const {
    return {slots.data(), slot_count};
  }
  [[nodiscard]] constexpr bool counts_steps() const { return slots[0] == "step"; }
};

template <class Options>
inline constexpr OptimizerTraits kTraits{};

// clang-format off
inline constexpr std::string_view kAdamKeys =
    "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused "
    "decoupled_weight_decay";
template <> inline constexpr OptimizerTraits kTraits<AdamOptions>{
    "Adam", true, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, kAdamKeys};
template <> inline constexpr OptimizerTraits kTraits<AdamWOptions>{
    "AdamW", true, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, kAdamKeys};
template <> inline constexpr OptimizerTraits kTraits<SGDOptions>{
    "SGD", true, {"momentum_buffer"},
    "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused"};
template <> inline constexpr OptimizerTraits kTraits<AdagradOptions>{
    "Adagrad", true, {"step", "sum"},
    "lr lr_decay eps weight_decay initial_accumulator_value foreach maximize differentiable fused"};
template <> inline constexpr OptimizerTraits kTraits<RMSpropOptions>{
    "RMSprop", false, {"step", "square_avg", "momentum_buffer", "grad_avg"},
    "lr momentum alpha eps centered weight_decay capturable foreach maximize differentiable"};
template <> inline constexpr OptimizerTraits kTraits<NAdamOptions>{
    "NAdam", false, {"step", "mu_product", "exp_avg", "exp_avg_sq"},
    "lr betas eps weight_decay momentum_decay decoupled_weight_decay maximize foreach capturable "
    "differentiable"};
template <> inline constexpr OptimizerTraits kTraits<RAdamOptions>{
    "RAdam", false, {"step", "exp_avg", "exp_avg_sq"},
    "lr betas eps weight_decay maximize foreach capturable decoupled_weight_decay differentiable"};
template <> inline constexpr OptimizerTraits kTraits<AdamaxOptions>{
    "Adamax", false, {"step", "exp_avg", "exp_inf"},
    "lr betas eps weight_decay foreach maximize differentiable capturable"};
template <> inline constexpr OptimizerTraits kTraits<LionOptions>{"Lion", false, {"exp_avg"}, ""};
template <> inline constexpr OptimizerTraits kTraits<AdafactorOptions>{
    "Adafactor", false, {"step", "row_var", "col_var", "variance"},
    "lr beta2_decay eps d weight_decay foreach maximize"};
// clang-format on

/// Whether these options use the state tensor `slot` of `parameter`.
template <class Options>
[[nodiscard]] bool uses_slot(const Options& options, std::size_t slot,
                             const at::Tensor& parameter) {
  if constexpr (requires { options.amsgrad; }) return slot != 3 || options.amsgrad;
  if constexpr (std::same_as<Options, SGDOptions>) return options.momentum != 0;
  if constexpr (std::same_as<Options, RMSpropOptions>) {
    if (slot == 2) return options.momentum > 0;
    return slot != 3 || options.centered;
  }
  if constexpr (std::same_as<Options, AdafactorOptions>) {
    return slot == 0 || (parameter.dim() > 1) == (slot != 3);
  }
  return true;
}

/// The value that a new state tensor is filled with.
template <class Options>
[[nodiscard]] double first_value(const Options& options, std::string_view name) {
  if constexpr (std::same_as<Options, AdagradOptions>) {
    if (name == "sum") return options.initial_accumulator_value;
  }
  return name == "mu_product" ? 1 : 0;
}

}  // namespace accelerate::detail::optim
