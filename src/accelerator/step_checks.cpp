#include "accelerator/step_checks.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>

#include "accelerate/errors.h"
#include "accelerator/gradient_watch.h"
#include "accelerator/model_registry.h"
#include "core/first_names.h"
#include "core/log.h"
#include "core/text.h"
#include "parallel/engine.h"

namespace accelerate::detail::accelerator {
namespace {

using torch::optim::Optimizer;

// Messages list this many parameters at most.

/// Calls `f(parameter, group, index in the group)`.
template <class F>
void for_each_parameter(const Optimizer& optimizer, F&& f) {
  const auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const auto& parameters = groups[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) f(parameters[i], group, i);
  }
}

/// Of the parameters in their order, as objects.
std::size_t hash_of(const Optimizer& optimizer) {
  std::size_t hash = 0;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter, auto, auto) {
    hash = c10::hash_combine(hash, std::hash<const void*>()(parameter.unsafeGetTensorImpl()));
  });
  return hash;
}

bool has(const Optimizer& optimizer, const at::Tensor& parameter) {
  bool found = false;
  for_each_parameter(optimizer, [&](const at::Tensor& one, auto, auto) {
    found = found || one.is_same(parameter);
  });
  return found;
}

/// The name of a parameter in the modules of the models; empty if it is in none.
std::string name_in(const std::vector<std::shared_ptr<ModelCore>>& models,
                    const at::Tensor& parameter) {
  for (const auto& model : models) {
    for (const auto& entry : model->module->named_parameters()) {
      if (entry.value().is_same(parameter)) return entry.key();
    }
  }
  return "";
}

/// A gradient that was set to zero leaves a parameter as it is on all processes.
bool trains(const at::Tensor& gradient) {
  return gradient.defined() && (gradient.is_sparse() || gradient.count_nonzero().item<bool>());
}

void check_strays(const Optimizer& optimizer,
                  const std::vector<std::shared_ptr<ModelCore>>& models) {
  if (!any_stray()) return;
  bool left = false;
  for (const auto& model : models) {
    if (!model->strayed || !model->watch) continue;
    const auto& parameter = model->watch->parameter();
    if (!has(optimizer, parameter)) {
      left = true;
      continue;
    }
    model->strayed = false;
    if (!trains(parameter.grad())) continue;
    throw StateError(
        str("step: the gradients of a prepared model with ", model->module->parameters().size(),
            " parameters (the last one is '", model->watch->name(),
            "') were not averaged over the processes: they come from loss.backward(). Call "
            "accelerator.backward(loss). If each process shall keep its own gradients, or you "
            "average them yourself, call backward under no_sync(model)."));
  }
  set_any_stray(left);
}

}  // namespace

void StepChecks::operator()(const Optimizer& optimizer) {
  list_model_registry(models_);
  if (checks_) check(optimizer);
  for (const auto& model : models_) {
    if (model->synchronizes) model->engine->before_step();
  }
  models_.clear();  // they are not kept alive
}

void StepChecks::check(const Optimizer& optimizer) {
  check_strays(optimizer, models_);
  find_unheld(optimizer);
  // Where no model synchronizes, each process trains for itself.
  const auto synchronizes = [](const auto& model) { return model->synchronizes; };
  if (!models_.empty() && std::ranges::none_of(models_, synchronizes)) return;
  check_added();
  check_others();
}

bool StepChecks::is_held(const at::Tensor& parameter) const {
  return std::ranges::any_of(models_,
                             [&](const auto& model) { return model->engine->holds(parameter); });
}

void StepChecks::find_unheld(const Optimizer& optimizer) {
  const auto hash = hash_of(optimizer);
  const auto same = [](const auto& model, const auto& one) { return model->engine == one.lock(); };
  if (hash == hash_ && std::ranges::equal(models_, engines_, same)) return;
  hash_ = hash;
  engines_.clear();
  for (const auto& model : models_) engines_.emplace_back(model->engine);
  parameters_ = 0;
  added_ = {};
  others_ = {};
  for_each_parameter(optimizer, [&](const at::Tensor& parameter, auto group, auto index) {
    ++parameters_;
    // Frozen ones too: they may be unfrozen later.
    if (is_held(parameter)) return;
    const auto name = name_in(models_, parameter);
    auto& unheld = name.empty() ? others_ : added_;
    unheld.tensors.push_back(parameter);
    unheld.names.push_back(
        name.empty() ? detail::str("parameter ", index, " of group ", group, " ", parameter.sizes())
                     : detail::str("'", name, "'"));
  });
}

std::vector<std::string> StepChecks::trained(const Unheld& unheld) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < unheld.tensors.size(); ++i) {
    const auto& parameter = unheld.tensors[i];
    // An engine that was rebuilt may have taken it over.
    if (parameter.grad().defined() && !is_held(parameter)) names.push_back(unheld.names[i]);
  }
  return names;
}

void StepChecks::check_added() const {
  auto names = trained(added_);
  if (names.empty()) return;
  throw StateError(
      str("step: parameters that a prepared model got, or that were unfrozen, after prepare have "
          "gradients which are not averaged over the processes: ",
          first_names(std::move(names)),
          ". Prepare the model again: accelerator.free_memory(model), then prepare. If each "
          "process shall train them for itself, give them to an optimizer that is not prepared."));
}

void StepChecks::check_others() {
  if (warned_ || others_.tensors.empty()) return;
  const char* const remedy =
      "Prepare the model that they belong to, before the first step. If each process shall train "
      "them for itself, or you average their gradients, use an optimizer that is not prepared, or "
      "set drift_check = 0 of AcceleratorOptions.";
  if (auto names = trained(others_); !names.empty()) {
    warned_ = true;
    const auto count = names.size();
    warn_once(str("step: the optimizer has ", count,
                  " parameters that no prepared model has, whose gradients are not averaged over "
                  "the processes: ",
                  first_names(std::move(names)), ". The processes drift apart. ", remedy));
    return;
  }
  if (others_.tensors.size() < parameters_) return;
  warned_ = true;
  warn_once(str("step: none of the ", parameters_,
                " parameters of the optimizer has a gradient, and no prepared model has any of "
                "them, so that nothing is trained: ",
                first_names(others_.names), ". Was it built on the parameters of another model? ",
                remedy));
}

}  // namespace accelerate::detail::accelerator
