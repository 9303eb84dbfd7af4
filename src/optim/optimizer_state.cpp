#include "optim/optimizer_state.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "accelerate/errors.h"
#include "core/copy_past_cache.h"
#include "core/run_in_parallel.h"
#include "core/text.h"
#include "optim/torch_optimizers.h"
#include "optim/update_rules.h"

namespace accelerate::detail::optim {
namespace {

using at::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

std::string class_of(const Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

/// Calls `f` with the adapter of an optimizer of LibTorch. Throws `UnsupportedError` for others.
template <class F>
void with_adapter(const Optimizer& optimizer, const F& f) {
  if (with_torch_adapter(optimizer, f)) return;
  throw UnsupportedError(detail::str(
      "The state of ", class_of(optimizer),
      " is not known here. Use an optimizer of accelerate/optim.h, or AdamW, Adam, SGD, "
      "Adagrad or RMSprop of torch::optim."));
}

/// The group that holds `parameter`, or null.
const OptimizerParamGroup* find_group(const Optimizer& optimizer, const Tensor& parameter) {
  const auto holds = [&](const OptimizerParamGroup& group) {
    return std::ranges::any_of(group.params(), [&](const auto& p) { return p.is_same(parameter); });
  };
  const auto& groups = optimizer.param_groups();
  const auto found = std::ranges::find_if(groups, holds);
  return found == groups.end() ? nullptr : &*found;
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

const Tensor* find_tensor(const NamedTensors& tensors, std::string_view name) {
  const auto found = std::ranges::find(tensors, name, &NamedTensors::value_type::first);
  return found == tensors.end() ? nullptr : &found->second;
}

template <class Adapter>
std::unique_ptr<typename Adapter::State> state_from(const Optimizer& optimizer,
                                                    const Tensor& parameter,
                                                    const NamedTensors& tensors) {
  const auto options = Adapter::own_options(group_of(optimizer, parameter).options());
  require_known_names(tensors, kTraits<typename Adapter::OwnOptions>.states());
  auto state = std::make_unique<typename Adapter::State>();
  std::vector<TensorCopy> copies;
  std::size_t slot = 0;
  Adapter::for_each_state(*state, [&]<class T>(std::string_view name, T& field) {
    const auto here = slot++;
    const auto* const found = find_tensor(tensors, name);
    if (found == nullptr) {
      if (!uses_slot(options, here, parameter)) return;
      throw ArgumentError(detail::str("The state of a parameter of shape ", parameter.sizes(),
                                      " lacks '", name, "', which ", class_of(optimizer),
                                      " needs with the options it has."));
    }
    if constexpr (std::is_same_v<T, Tensor>) {
      require_shape(name, *found, parameter);
      field = empty_state_tensor(name, parameter, parameter.device());
      copies.push_back({.to = field, .from = *found});
    } else {
      field = step_from(*found);
    }
  });
  copy_all(copies);
  return state;
}

bool has_state_shape(std::string_view name, const Tensor& tensor, const Tensor& parameter) {
  return tensor.defined() &&
         (is_number(name) ? tensor.numel() == 1 : tensor.sizes() == state_shape(name, parameter));
}

/// Whether a tensor of the state of `parameter` can take other contents: it is like a new one, and
/// there are no more than `references` to it.
bool can_be_refilled(std::string_view name, const Tensor& tensor, const Tensor& parameter,
                     std::size_t references) {
  if (!has_state_shape(name, tensor, parameter) || tensor.use_count() > references ||
      !tensor.has_storage() || tensor.storage().use_count() > 1) {
    return false;
  }
  return is_number(name) ||
         (tensor.scalar_type() == parameter.scalar_type() && tensor.device() == parameter.device());
}

/// Whether bytes can be copied as they are.
bool is_plain_copy(const TensorCopy& copy) {
  const auto& [to, from] = copy;
  return to.is_cpu() && from.is_cpu() && to.scalar_type() == from.scalar_type() &&
         to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
         to.is_neg() == from.is_neg() && to.is_conj() == from.is_conj();
}

}  // namespace

const OptimizerParamGroup& group_of(const Optimizer& optimizer, const Tensor& parameter) {
  if (const auto* const group = find_group(optimizer, parameter)) return *group;
  throw ArgumentError(detail::str("A state was given for a parameter of shape ", parameter.sizes(),
                                  " that is in no group of the ", class_of(optimizer),
                                  ". Add it with add_param_group first."));
}

void require_known_names(const NamedTensors& tensors, std::span<const std::string_view> known) {
  for (const auto& [name, tensor] : tensors) {
    if (std::ranges::find(known, name) != known.end()) continue;
    throw ArgumentError(
        detail::str("The state of a parameter has a tensor '", name,
                    "', which this optimizer does not know. It knows: ", join(known), "."));
  }
}

void require_shape(std::string_view name, const Tensor& tensor, const Tensor& parameter) {
  if (has_state_shape(name, tensor, parameter)) return;
  throw ArgumentError(detail::str(
      "The tensor '", name, "' of a state ",
      tensor.defined() ? detail::str("has shape ", tensor.sizes()) : std::string("is undefined"),
      ", which does not fit the parameter of shape ", parameter.sizes(), "."));
}

void copy_all(const std::vector<TensorCopy>& copies) {
  const at::NoGradGuard no_grad;
  std::vector<const TensorCopy*> plain;
  std::vector<std::size_t> sizes;
  for (const auto& copy : copies) {
    if (!is_plain_copy(copy)) {
      copy.to.copy_(copy.from);
      continue;
    }
    plain.push_back(&copy);
    sizes.push_back(copy.to.nbytes());
    copy.to.unsafeGetTensorImpl()->bump_version();
  }
  run_in_chunks(sizes, [&](std::size_t i, std::size_t begin, std::size_t length) {
    copy_past_cache(static_cast<std::byte*>(plain[i]->to.data_ptr()) + begin,
                    static_cast<const std::byte*>(plain[i]->from.const_data_ptr()) + begin, length);
  });
}

NamedTensors optimizer_state_of(Optimizer& optimizer, const Tensor& parameter) {
  if (const auto* const own = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    return own->state_of(parameter);
  }
  NamedTensors result;
  with_adapter(optimizer, [&]<class Adapter>(Adapter) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) return;
    auto& state = static_cast<typename Adapter::State&>(*found->second);
    Adapter::for_each_state(state, [&]<class T>(const char* name, T& field) {
      if constexpr (!std::is_same_v<T, Tensor>) {
        result.emplace_back(name, at::full({}, static_cast<double>(field), at::kFloat));
      } else if (field.defined()) {
        result.emplace_back(name, field);
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
  with_adapter(optimizer, [&]<class Adapter>(Adapter) {
    auto state = state_from<Adapter>(optimizer, parameter, tensors);
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  });
}

bool StateRefill::add(Optimizer& optimizer, const Tensor& parameter, const NamedTensors& tensors) {
  std::vector<TensorCopy> copies;
  std::vector<Step> steps;
  if (const auto* const own = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    const auto kept = own->state_of(parameter);
    for (const auto& [name, tensor] : kept) {
      const auto* const found = find_tensor(tensors, name);
      if (found == nullptr || !has_state_shape(name, *found, parameter) ||
          !can_be_refilled(name, tensor, parameter, /*references=*/2)) {  // the state's and kept's
        return false;
      }
      copies.push_back({.to = tensor, .from = is_number(name) ? found->reshape({}) : *found});
    }
  } else {
    bool fits = true;
    with_adapter(optimizer, [&]<class Adapter>(Adapter) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) return;
      const auto options = Adapter::own_options(group_of(optimizer, parameter).options());
      std::size_t slot = 0;
      Adapter::for_each_state(static_cast<typename Adapter::State&>(*found->second),
                              [&]<class T>(std::string_view name, T& field) {
                                [[maybe_unused]] const auto here = slot++;
                                const auto* const tensor = find_tensor(tensors, name);
                                if constexpr (std::is_same_v<T, Tensor>) {
                                  if (!field.defined() && tensor == nullptr) {
                                    fits = fits && !uses_slot(options, here, parameter);
                                    return;
                                  }
                                  fits = fits && tensor != nullptr &&
                                         has_state_shape(name, *tensor, parameter) &&
                                         can_be_refilled(name, field, parameter, /*references=*/1);
                                  if (fits) copies.push_back({.to = field, .from = *tensor});
                                } else {
                                  fits = fits && tensor != nullptr;
                                  if (fits)
                                    steps.push_back({.to = &field, .value = step_from(*tensor)});
                                }
                              });
    });
    if (!fits) return false;
  }
  if (copies.size() + steps.size() != tensors.size() || tensors.empty()) return false;
  std::ranges::move(copies, std::back_inserter(copies_));
  std::ranges::move(steps, std::back_inserter(steps_));
  return true;
}

void StateRefill::run() const {
  for (const auto& [to, value] : steps_) *to = value;
  copy_all(copies_);
}

void drop_optimizer_state_of(Optimizer& optimizer, const Tensor& parameter) {
  auto* const key = parameter.unsafeGetTensorImpl();
  if (dynamic_cast<FusedOptimizer*>(&optimizer) != nullptr) {
    optimizer.state().erase(key);
    return;
  }
  const at::NoGradGuard no_grad;
  with_adapter(optimizer, [&]<class Adapter>(Adapter) {
    if constexpr (std::is_same_v<typename Adapter::Optimizer, torch::optim::Adagrad>) {
      // LibTorch makes this state in the constructor, and its step needs it.
      if (const auto* const group = find_group(optimizer, parameter)) {
        const auto value = first_value(Adapter::own_options(group->options()), "sum");
        auto state = std::make_unique<typename Adapter::State>();
        state->sum(new_state_tensor("sum", parameter, parameter.device(), value));
        optimizer.state()[key] = std::move(state);
        return;
      }
    }
    optimizer.state().erase(key);
  });
}

void move_optimizer_state(Optimizer& optimizer, c10::Device device) {
  if (optimizer.state().empty()) return;
  const at::NoGradGuard no_grad;
  if (const auto* const own = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        for (const auto& [name, tensor] : own->state_of(parameter)) {
          // The next step moves numbers to the device that it needs.
          if (!is_number(name) && tensor.device() != device) tensor.set_data(tensor.to(device));
        }
      }
    }
    return;
  }
  with_adapter(optimizer, [&]<class Adapter>(Adapter) {
    for (auto& [key, state] : optimizer.state()) {
      Adapter::for_each_state(static_cast<typename Adapter::State&>(*state),
                              [&]<class T>(std::string_view /*name*/, T& field) {
                                if constexpr (std::is_same_v<T, Tensor>) {
                                  if (field.defined()) field = field.to(device);
                                }
                              });
    }
  });
}

}  // namespace accelerate::detail::optim
