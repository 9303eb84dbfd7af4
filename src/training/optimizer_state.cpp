#include "accelerate/optimizer_state.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using at::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// For each optimizer of LibTorch: its classes, the fields of a state in Python's order, and whether
// a state can be without one of them.

template <class StateOf, class OptionsOf>
struct AdamKind {
  using State = StateOf;
  using Options = OptionsOf;
  template <class F>
  static void visit(State& state, const F& f) {
    f("step", state.step());
    f("exp_avg", state.exp_avg());
    f("exp_avg_sq", state.exp_avg_sq());
    f("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  static bool needs(std::string_view name, const Options& options) {
    return name != "max_exp_avg_sq" || options.amsgrad();
  }
};

struct SGDKind {
  using State = torch::optim::SGDParamState;
  using Options = torch::optim::SGDOptions;
  template <class F>
  static void visit(State& state, const F& f) {
    f("momentum_buffer", state.momentum_buffer());
  }
  static bool needs(std::string_view /*name*/, const Options& /*options*/) { return true; }
};

struct AdagradKind {
  using State = torch::optim::AdagradParamState;
  using Options = torch::optim::AdagradOptions;
  template <class F>
  static void visit(State& state, const F& f) {
    f("step", state.step());
    f("sum", state.sum());
  }
  static bool needs(std::string_view /*name*/, const Options& /*options*/) { return true; }
};

struct RMSpropKind {
  using State = torch::optim::RMSpropParamState;
  using Options = torch::optim::RMSpropOptions;
  template <class F>
  static void visit(State& state, const F& f) {
    f("step", state.step());
    f("square_avg", state.square_avg());
    f("momentum_buffer", state.momentum_buffer());
    f("grad_avg", state.grad_avg());
  }
  static bool needs(std::string_view name, const Options& options) {
    if (name == "momentum_buffer") return options.momentum() > 0;
    return name != "grad_avg" || options.centered();
  }
};

std::string class_of(const Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

/// Calls `f` with the kind of an optimizer of LibTorch. A class derived from one of them may keep
/// other states: it is none.
template <class F>
void with_kind(const Optimizer& optimizer, const F& f) {
  const auto& type = typeid(optimizer);
  if (type == typeid(torch::optim::AdamW)) {
    f(AdamKind<torch::optim::AdamWParamState, torch::optim::AdamWOptions>());
  } else if (type == typeid(torch::optim::Adam)) {
    f(AdamKind<torch::optim::AdamParamState, torch::optim::AdamOptions>());
  } else if (type == typeid(torch::optim::SGD)) {
    f(SGDKind());
  } else if (type == typeid(torch::optim::Adagrad)) {
    f(AdagradKind());
  } else if (type == typeid(torch::optim::RMSprop)) {
    f(RMSpropKind());
  } else {
    throw UnsupportedError(detail::str(
        "What ", class_of(optimizer),
        " keeps of its parameters is not known here. Use one of accelerate/optim.h, or AdamW, "
        "Adam, SGD, Adagrad or RMSprop of torch::optim."));
  }
}

/// The group that holds `parameter`, or null.
OptimizerParamGroup* group_of(Optimizer& optimizer, const Tensor& parameter) {
  for (auto& group : optimizer.param_groups()) {
    const auto same = [&](const Tensor& p) { return p.is_same(parameter); };
    if (std::ranges::any_of(group.params(), same)) return &group;
  }
  return nullptr;
}

const Tensor* find(const NamedTensors& tensors, std::string_view name) {
  const auto found = std::ranges::find(tensors, name, &NamedTensors::value_type::first);
  return found == tensors.end() ? nullptr : &found->second;
}

std::int64_t step_from(const Tensor& tensor) {
  std::string found = "undefined";
  if (tensor.defined()) found = detail::str("a tensor of shape ", tensor.sizes());
  if (tensor.defined() && tensor.numel() == 1) {
    const auto steps = tensor.item<double>();
    if (steps >= 0 && steps < 9e15) return static_cast<std::int64_t>(steps);
    found = detail::str(steps);
  }
  throw ArgumentError(
      detail::str("'step' of a state must be one number, 0 or more, and is ", found, "."));
}

Tensor copy_for(const Tensor& parameter, std::string_view name, const Tensor& tensor) {
  if (!tensor.defined() || tensor.sizes() != parameter.sizes()) {
    throw ArgumentError(detail::str(
        "'", name, "' of a state ",
        tensor.defined() ? detail::str("has shape ", tensor.sizes()) : std::string("is undefined"),
        ", which does not fit the parameter of shape ", parameter.sizes(), "."));
  }
  auto copy = at::empty_like(parameter, at::TensorOptions().requires_grad(false),
                             at::MemoryFormat::Preserve);
  copy.copy_(tensor);
  return copy;
}

template <class Kind>
void require_known(const Optimizer& optimizer, const NamedTensors& tensors) {
  std::vector<std::string_view> known;
  typename Kind::State state;
  Kind::visit(state, [&](std::string_view name, auto& /*field*/) { known.push_back(name); });
  for (const auto& [name, tensor] : tensors) {
    if (std::ranges::find(known, name) != known.end()) continue;
    throw ArgumentError(detail::str("A state has a tensor '", name, "', which ",
                                    class_of(optimizer),
                                    " does not know. It knows: ", detail::join(known), "."));
  }
}

template <class Kind>
std::unique_ptr<typename Kind::State> state_from(const Optimizer& optimizer,
                                                 const OptimizerParamGroup& group,
                                                 const Tensor& parameter,
                                                 const NamedTensors& tensors) {
  require_known<Kind>(optimizer, tensors);
  const auto& options = static_cast<const typename Kind::Options&>(group.options());
  auto state = std::make_unique<typename Kind::State>();
  Kind::visit(*state, [&]<class Field>(std::string_view name, Field& field) {
    const auto* const tensor = find(tensors, name);
    if (tensor == nullptr) {
      if (!Kind::needs(name, options)) return;
      throw ArgumentError(detail::str("The state of a parameter of shape ", parameter.sizes(),
                                      " lacks '", name, "', which ", class_of(optimizer),
                                      " needs with the options it has."));
    }
    if constexpr (std::is_same_v<Field, Tensor>) {
      field = copy_for(parameter, name, *tensor);
    } else {
      field = step_from(*tensor);
    }
  });
  return state;
}

}  // namespace

NamedTensors optimizer_state_of(Optimizer& optimizer, const Tensor& parameter) {
  if (const auto* const own = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    return own->state_of(parameter);
  }
  NamedTensors result;
  with_kind(optimizer, [&]<class Kind>(Kind) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) return;
    auto& state = static_cast<typename Kind::State&>(*found->second);
    Kind::visit(state, [&]<class Field>(const char* name, Field& field) {
      if constexpr (std::is_same_v<Field, Tensor>) {
        if (field.defined()) result.emplace_back(name, field);
      } else {
        result.emplace_back(name, at::full({}, static_cast<double>(field), at::kFloat));
      }
    });
  });
  return result;
}

void set_optimizer_state_of(Optimizer& optimizer, const Tensor& parameter,
                            const NamedTensors& tensors) {
  if (tensors.empty()) return drop_optimizer_state_of(optimizer, parameter);
  if (auto* const own = dynamic_cast<FusedOptimizer*>(&optimizer)) {
    return own->set_state_of(parameter, tensors);
  }
  const at::NoGradGuard no_grad;
  with_kind(optimizer, [&]<class Kind>(Kind) {
    const auto* const group = group_of(optimizer, parameter);
    if (group == nullptr) {
      throw ArgumentError(detail::str("A state was given for a parameter of shape ",
                                      parameter.sizes(), " that is in no group of the ",
                                      class_of(optimizer), ". Add it with add_param_group first."));
    }
    optimizer.state()[parameter.unsafeGetTensorImpl()] =
        state_from<Kind>(optimizer, *group, parameter, tensors);
  });
}

void drop_optimizer_state_of(Optimizer& optimizer, const Tensor& parameter) {
  if (dynamic_cast<FusedOptimizer*>(&optimizer) != nullptr) {
    optimizer.state().erase(parameter.unsafeGetTensorImpl());
    return;
  }
  const at::NoGradGuard no_grad;
  with_kind(optimizer, [&]<class Kind>(Kind) {
    if constexpr (std::is_same_v<Kind, AdagradKind>) {
      // LibTorch makes these in the constructor and steps over nothing less.
      if (const auto* const group = group_of(optimizer, parameter)) {
        const auto& options = static_cast<const AdagradKind::Options&>(group->options());
        auto state = std::make_unique<AdagradKind::State>();
        state->sum(at::full_like(parameter, options.initial_accumulator_value(),
                                 at::TensorOptions().requires_grad(false),
                                 at::MemoryFormat::Preserve));
        optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
        return;
      }
    }
    optimizer.state().erase(parameter.unsafeGetTensorImpl());
  });
}

void move_optimizer_state(Optimizer& optimizer, c10::Device device) {
  if (optimizer.state().empty()) return;
  const at::NoGradGuard no_grad;
  if (const auto* const own = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        for (const auto& [name, tensor] : own->state_of(parameter)) {
          // The next step fetches the numbers to where it wants them.
          if (tensor.dim() == 0 && (name == "step" || name == "mu_product")) continue;
          if (tensor.device() != device) tensor.set_data(tensor.to(device));
        }
      }
    }
    return;
  }
  with_kind(optimizer, [&]<class Kind>(Kind) {
    for (auto& [key, state] : optimizer.state()) {
      Kind::visit(static_cast<typename Kind::State&>(*state),
                  [&]<class Field>(std::string_view /*name*/, Field& field) {
                    if constexpr (std::is_same_v<Field, Tensor>) {
                      if (field.defined()) field = field.to(device);
                    }
                  });
    }
  });
}

}  // namespace accelerate::detail
