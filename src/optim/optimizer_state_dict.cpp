// The state of a whole optimizer, in the layout of Python's `Optimizer.state_dict()`.
#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/value/from_value.h"
#include "core/text.h"
#include "optim/group_schedule.h"
#include "optim/optimizer_options.h"
#include "optim/optimizer_state.h"

namespace accelerate::detail::optim {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;

/// True for entries of a group that are no options here: its parameters, the choice of kernels, and
/// what schedulers keep in it.
bool is_ignored(std::string_view key) {
  constexpr auto kIgnored =
      std::to_array<std::string_view>({"params", "param_names", "foreach", "fused", "initial_lr",
                                       "max_lr", "min_lr", "max_momentum", "base_momentum"});
  return std::ranges::find(kIgnored, key) != kIgnored.end();
}

/// The options in a saved group that `options` have. Throws `ArgumentError` for those that this
/// optimizer does not support and for invalid values.
Value::Dict checked_options(const Value::Dict& saved, OptimizerOptions& options,
                            std::size_t group) {
  const auto own = options_by_name(options);
  Value::Dict result;
  for (const auto& [key, value] : saved) {
    const auto& name = key.as_string();
    if (is_ignored(name)) continue;
    if (own.contains(name)) {
      // Python may keep a learning rate as a tensor on the device.
      const bool number = value.is_tensor() && value.as_tensor().numel() == 1;
      result.set(name, number ? Value(value.as_tensor().item<double>()) : value);
      continue;
    }
    if (is_python_constant(options, name, value)) continue;
    throw ArgumentError(str("load_state_dict: group ", group, " has '", name, "': ", value.repr(),
                            ", which this optimizer does not support. Load it into an optimizer of "
                            "the class and options that were saved."));
  }
  try {
    update_options(*options.clone(), result);
  } catch (const Error& error) {
    throw ArgumentError(str("load_state_dict: the options of group ", group, ": ", error.what()));
  }
  return result;
}

NamedTensors tensors_of(const Value& state) {
  NamedTensors result;
  for (const auto& [key, value] : state.as_dict()) {
    if (value.is_none()) continue;
    // Older versions of PyTorch save step counts as plain numbers.
    result.emplace_back(key.as_string(), value.is_tensor()
                                             ? value.as_tensor()
                                             : at::full({}, value.as_double(), at::kFloat));
  }
  return result;
}

void check_count(std::size_t saved, std::size_t own, const std::string& what) {
  if (saved == own) return;
  throw ArgumentError(str("load_state_dict: the saved state has ", saved, " ", what,
                          " and this optimizer has ", own,
                          ". Build it on the same parameters, in the same groups."));
}

}  // namespace

Value optimizer_state_dict(Optimizer& optimizer, const StatesFilter& gather) {
  std::vector<parallel::ParameterState> all;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      all.push_back({.parameter = parameter, .tensors = optimizer_state_of(optimizer, parameter)});
    }
  }
  if (gather) gather(all);
  Value::Dict states;
  Value::List groups;
  std::size_t index = 0;
  for (auto& group : optimizer.param_groups()) {
    Value::List params;
    for (std::size_t i = 0; i < group.params().size(); ++i, ++index) {
      Value::Dict state;
      for (const auto& [name, tensor] : all[index].tensors) state.set(name, tensor);
      const auto key = static_cast<std::int64_t>(index);
      if (!state.empty()) states.set(key, std::move(state));
      params.emplace_back(key);
    }
    auto options = python_options(group.options());
    for_each_field(*schedule_of(group), kGroupScheduleFields, [&](const auto& field, auto& number) {
      if (number) options.set(field.name, *number);
    });
    options.set("params", std::move(params));
    groups.emplace_back(std::move(options));
  }
  return Value::Dict{{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

void load_optimizer_state_dict(Optimizer& optimizer, const Value& state, const StatesFilter& cut) {
  auto& groups = optimizer.param_groups();
  const auto& saved_states = state.at("state").as_dict();
  const auto saved_groups = state.at("param_groups").items();
  check_count(saved_groups.size(), groups.size(), "parameter groups");

  // Everything is checked before anything changes.
  std::vector<std::pair<Value::Dict, Value::Dict>> options;  // before and after
  std::vector<parallel::ParameterState> states;
  std::size_t used = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& saved = saved_groups[g].as_dict();
    const auto params = saved.at("params").items();
    check_count(params.size(), groups[g].params().size(), str("parameters in group ", g));
    options.emplace_back(options_by_name(groups[g].options()),
                         checked_options(saved, groups[g].options(), g));
    for (std::size_t p = 0; p < params.size(); ++p) {
      const auto* const one = saved_states.get(params[p].as_int());
      if (one != nullptr) ++used;
      states.push_back({.parameter = groups[g].params()[p],
                        .tensors = one != nullptr ? tensors_of(*one) : NamedTensors()});
    }
  }
  if (used != saved_states.size()) {
    throw ArgumentError(str("load_state_dict: there are states of ", saved_states.size(),
                            " parameters, but the groups name only ", used, " of them."));
  }
  if (cut) cut(states);

  std::optional<std::decay_t<decltype(optimizer.state())>> before;
  try {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      update_options(groups[g].options(), options[g].second);
      set_fields(*schedule_of(groups[g]), kGroupScheduleFields, saved_groups[g].as_dict());
    }
    StateRefill refill;
    std::vector<void*> kept;
    std::erase_if(states, [&](const auto& one) {
      const bool refilled = refill.add(optimizer, one.parameter, one.tensors);
      if (refilled) kept.push_back(one.parameter.unsafeGetTensorImpl());
      return refilled;
    });
    before = std::exchange(optimizer.state(), {});
    for (const auto& [parameter, tensors] : states) {
      set_optimizer_state_of(optimizer, parameter, tensors);
    }
    for (auto* const key : kept) optimizer.state()[key] = std::move(before->at(key));
    before.reset();  // all was checked: copying is what is left
    refill.run();
  } catch (...) {
    if (before) optimizer.state() = *std::move(before);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      update_options(groups[g].options(), options[g].first);
    }
    throw;
  }
}

}  // namespace accelerate::detail::optim
