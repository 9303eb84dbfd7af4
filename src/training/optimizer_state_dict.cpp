// The state of a whole optimizer, in the layout of Python's `Optimizer.state_dict()`.
#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/optimizer.h"
#include "accelerate/optimizer_state.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using Keys = std::span<const std::string_view>;

// ---- the options of a group under Python's names ------------------------------------------------

template <class Options, class F>
void visit_adam(Options& options, const F& f) {
  f("lr", options.lr());
  f("betas", options.betas());
  f("eps", options.eps());
  f("weight_decay", options.weight_decay());
  f("amsgrad", options.amsgrad());
}

/// Calls `f(name, field)` for each option of LibTorch's five.
template <class F>
void visit(torch::optim::AdamWOptions& options, const F& f) {
  visit_adam(options, f);
}
template <class F>
void visit(torch::optim::AdamOptions& options, const F& f) {
  visit_adam(options, f);
}
template <class F>
void visit(torch::optim::SGDOptions& options, const F& f) {
  f("lr", options.lr());
  f("momentum", options.momentum());
  f("dampening", options.dampening());
  f("weight_decay", options.weight_decay());
  f("nesterov", options.nesterov());
}
template <class F>
void visit(torch::optim::AdagradOptions& options, const F& f) {
  f("lr", options.lr());
  f("lr_decay", options.lr_decay());
  f("eps", options.eps());
  f("weight_decay", options.weight_decay());
  f("initial_accumulator_value", options.initial_accumulator_value());
}
template <class F>
void visit(torch::optim::RMSpropOptions& options, const F& f) {
  f("lr", options.lr());
  f("momentum", options.momentum());
  f("alpha", options.alpha());
  f("eps", options.eps());
  f("centered", options.centered());
  f("weight_decay", options.weight_decay());
}

Value to_value(double field) { return field; }
Value to_value(bool field) { return field; }
Value to_value(const std::tuple<double, double>& field) {
  return Value::tuple({std::get<0>(field), std::get<1>(field)});
}

void take(const Value& value, double& field) { field = value.as_double(); }
void take(const Value& value, bool& field) { field = value.as_bool(); }
void take(const Value& value, std::tuple<double, double>& field) {
  const auto items = value.items();
  if (items.size() != 2) throw ArgumentError(str(value.repr(), " is not a pair of numbers."));
  field = {items[0].as_double(), items[1].as_double()};
}

/// Calls `f` with the options as what they are; false for those of another optimizer.
template <class F>
bool with_torch_options(OptimizerOptions& options, const F& f) {
  const auto attempt = [&]<class Options>(std::type_identity<Options>) {
    if (typeid(options) != typeid(Options)) return false;
    f(static_cast<Options&>(options));
    return true;
  };
  return attempt(std::type_identity<torch::optim::AdamWOptions>()) ||
         attempt(std::type_identity<torch::optim::AdamOptions>()) ||
         attempt(std::type_identity<torch::optim::SGDOptions>()) ||
         attempt(std::type_identity<torch::optim::AdagradOptions>()) ||
         attempt(std::type_identity<torch::optim::RMSpropOptions>());
}

/// What the options of a group say, each that there is.
Value::Dict options_of(OptimizerOptions& options) {
  if (const auto* const own = dynamic_cast<const ParamGroupOptions*>(&options)) {
    return own->to_dict();
  }
  Value::Dict result;
  with_torch_options(options, [&](auto& known) {
    visit(known, [&](const char* name, const auto& field) { result.set(name, to_value(field)); });
  });
  return result;
}

/// Changes those that `values` names. Throws `ArgumentError`, and changes nothing then.
void change_options(OptimizerOptions& options, const Value::Dict& values) {
  if (auto* const own = dynamic_cast<ParamGroupOptions*>(&options)) return own->update(values);
  with_torch_options(options, [&](auto& known) {
    auto changed = known;
    visit(changed, [&](const char* name, auto& field) {
      if (const auto* const value = values.get(name)) take(*value, field);
    });
    known = changed;
  });
}

// ---- Python's keys ------------------------------------------------------------------------------

template <std::size_t N>
using Names = std::array<std::string_view, N>;

constexpr Names<11> kAdam{"lr",
                          "betas",
                          "eps",
                          "weight_decay",
                          "amsgrad",
                          "maximize",
                          "foreach",
                          "capturable",
                          "differentiable",
                          "fused",
                          "decoupled_weight_decay"};
constexpr Names<9> kSGD{"lr",       "momentum", "dampening",      "weight_decay", "nesterov",
                        "maximize", "foreach",  "differentiable", "fused"};
constexpr Names<9> kAdagrad{
    "lr",       "lr_decay",       "eps",  "weight_decay", "initial_accumulator_value", "foreach",
    "maximize", "differentiable", "fused"};
constexpr Names<10> kRMSprop{"lr",           "momentum",   "alpha",   "eps",      "centered",
                             "weight_decay", "capturable", "foreach", "maximize", "differentiable"};
constexpr Names<10> kNAdam{"lr",
                           "betas",
                           "eps",
                           "weight_decay",
                           "momentum_decay",
                           "decoupled_weight_decay",
                           "maximize",
                           "foreach",
                           "capturable",
                           "differentiable"};
constexpr Names<9> kRAdam{"lr",
                          "betas",
                          "eps",
                          "weight_decay",
                          "maximize",
                          "foreach",
                          "capturable",
                          "decoupled_weight_decay",
                          "differentiable"};
constexpr Names<8> kAdamax{"lr",       "betas",          "eps",       "weight_decay", "foreach",
                           "maximize", "differentiable", "capturable"};
constexpr Names<7> kAdafactor{"lr",           "beta2_decay", "eps",     "d",
                              "weight_decay", "foreach",     "maximize"};

/// The keys of a group in Python's order; none where Python has no such optimizer.
Keys keys_of(const OptimizerOptions& options) {
  const auto& type = typeid(options);
  const auto is = [&]<class... Options>(std::type_identity<Options>...) {
    return ((type == typeid(Options)) || ...);
  };
  using std::type_identity;
  if (is(type_identity<GroupOptions<AdamWOptions>>(), type_identity<GroupOptions<AdamOptions>>(),
         type_identity<torch::optim::AdamWOptions>(), type_identity<torch::optim::AdamOptions>())) {
    return kAdam;
  }
  if (is(type_identity<GroupOptions<SGDOptions>>(), type_identity<torch::optim::SGDOptions>())) {
    return kSGD;
  }
  if (is(type_identity<GroupOptions<AdagradOptions>>(),
         type_identity<torch::optim::AdagradOptions>())) {
    return kAdagrad;
  }
  if (is(type_identity<GroupOptions<RMSpropOptions>>(),
         type_identity<torch::optim::RMSpropOptions>())) {
    return kRMSprop;
  }
  if (is(type_identity<GroupOptions<NAdamOptions>>())) return kNAdam;
  if (is(type_identity<GroupOptions<RAdamOptions>>())) return kRAdam;
  if (is(type_identity<GroupOptions<AdamaxOptions>>())) return kAdamax;
  if (is(type_identity<GroupOptions<AdafactorOptions>>())) return kAdafactor;
  return {};
}

/// What Python says of an option that there is none of here.
Value constant_of(std::string_view key, const OptimizerOptions& options) {
  if (key == "foreach" || key == "fused") return nullptr;
  if (key == "decoupled_weight_decay") {
    return typeid(options) == typeid(GroupOptions<AdamWOptions>) ||
           typeid(options) == typeid(torch::optim::AdamWOptions);
  }
  return false;  // maximize, capturable, differentiable
}

Value::Dict python_options(OptimizerOptions& options) {
  auto own = options_of(options);
  const auto keys = keys_of(options);
  if (keys.empty()) return own;
  Value::Dict result;
  for (const auto key : keys) {
    const auto* const value = own.get(key);
    result.set(key, value != nullptr ? *value : constant_of(key, options));
  }
  return result;
}

/// How a step is computed, and what schedulers keep in a group: both are not the optimizer's here.
bool is_passed_over(std::string_view key) {
  constexpr auto kPassedOver =
      std::to_array<std::string_view>({"params", "param_names", "foreach", "fused", "initial_lr",
                                       "max_lr", "min_lr", "max_momentum", "base_momentum"});
  return std::ranges::find(kPassedOver, key) != kPassedOver.end();
}

/// The options in a saved group, for one with `options`.
Value::Dict checked_options(const Value::Dict& saved, OptimizerOptions& options,
                            std::size_t group) {
  const auto own = options_of(options);
  Value::Dict result;
  for (const auto& [key, value] : saved) {
    const auto& name = key.as_string();
    if (is_passed_over(name)) continue;
    if (own.contains(name)) {
      // A learning rate on the device.
      const bool number = value.is_tensor() && value.as_tensor().numel() == 1;
      result.set(name, number ? Value(value.as_tensor().item<double>()) : value);
      continue;
    }
    const bool known = std::ranges::find(keys_of(options), name) != keys_of(options).end();
    if (known && value == constant_of(name, options)) continue;
    throw ArgumentError(str("load_state_dict: group ", group, " has '", name, "': ", value.repr(),
                            ", which this optimizer cannot do. Load it into one of the same class "
                            "and options as the one that was saved."));
  }
  try {
    change_options(*options.clone(), result);
  } catch (const Error& error) {
    throw ArgumentError(str("load_state_dict: the options of group ", group, ": ", error.what()));
  }
  return result;
}

NamedTensors tensors_of(const Value& state) {
  NamedTensors result;
  for (const auto& [key, value] : state.as_dict()) {
    if (value.is_none()) continue;
    // Python counted steps by plain numbers once.
    result.emplace_back(key.as_string(), value.is_tensor()
                                             ? value.as_tensor()
                                             : at::full({}, value.as_double(), at::kFloat));
  }
  return result;
}

void check_count(std::size_t saved, std::size_t own, const std::string& what) {
  if (saved == own) return;
  throw ArgumentError(str("load_state_dict: what was saved has ", saved, " ", what,
                          " and this optimizer has ", own,
                          ". Build it on the same parameters, in the same groups."));
}

}  // namespace

Value optimizer_state_dict(Optimizer& optimizer) {
  Value::Dict states;
  Value::List groups;
  std::int64_t index = 0;
  for (auto& group : optimizer.param_groups()) {
    Value::List params;
    for (const auto& parameter : group.params()) {
      Value::Dict state;
      for (const auto& [name, tensor] : optimizer_state_of(optimizer, parameter)) {
        state.set(name, tensor);
      }
      if (!state.empty()) states.set(index, std::move(state));
      params.emplace_back(index++);
    }
    auto options = python_options(group.options());
    options.set("params", std::move(params));
    groups.emplace_back(std::move(options));
  }
  return Value::Dict{{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

void load_optimizer_state_dict(Optimizer& optimizer, const Value& state) {
  auto& groups = optimizer.param_groups();
  const auto& saved_states = state.at("state").as_dict();
  const auto saved_groups = state.at("param_groups").items();
  check_count(saved_groups.size(), groups.size(), "parameter groups");

  // All is looked at before anything changes.
  std::vector<std::pair<Value::Dict, Value::Dict>> options;  // before and after
  std::vector<std::pair<at::Tensor, NamedTensors>> states;
  std::size_t used = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& saved = saved_groups[g].as_dict();
    const auto params = saved.at("params").items();
    check_count(params.size(), groups[g].params().size(), str("parameters in group ", g));
    options.emplace_back(options_of(groups[g].options()),
                         checked_options(saved, groups[g].options(), g));
    for (std::size_t p = 0; p < params.size(); ++p) {
      const auto* const one = saved_states.get(params[p].as_int());
      if (one != nullptr) ++used;
      states.emplace_back(groups[g].params()[p],
                          one != nullptr ? tensors_of(*one) : NamedTensors());
    }
  }
  if (used != saved_states.size()) {
    throw ArgumentError(str("load_state_dict: there are states of ", saved_states.size(),
                            " parameters, but the groups name only ", used, " of them."));
  }

  auto before = std::exchange(optimizer.state(), {});
  try {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      change_options(groups[g].options(), options[g].second);
    }
    for (const auto& [parameter, tensors] : states) {
      set_optimizer_state_of(optimizer, parameter, tensors);
    }
  } catch (...) {
    optimizer.state() = std::move(before);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      change_options(groups[g].options(), options[g].first);
    }
    throw;
  }
}

}  // namespace accelerate::detail
