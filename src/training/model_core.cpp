#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/optimizer_state.h"
#include "accelerate/prepared_model.h"
#include "core/call_site.h"
#include "core/text.h"
#include "training/gradient_watch.h"
#include "training/optimizer_core.h"

namespace accelerate {
namespace {

void add_states(const torch::nn::Module& module, const std::string& prefix, StateDict& all) {
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    all.insert(prefix + entry.key(), entry.value());
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
    all.insert(prefix + entry.key(), entry.value());
  }
  for (const auto& entry : module.named_children()) {
    add_states(*entry.value(), prefix + entry.key() + ".", all);
  }
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict all("Tensor");
  add_states(module, "", all);
  return all;
}

namespace detail {

void refuse_empty_model() {
  throw StateError(
      "This prepared model is empty: it was never assigned, or given back by free_memory.");
}

namespace {

at::Tensor named_parameter(const torch::nn::Module& module, std::string_view name) {
  std::vector<std::string> names;
  for (const auto& entry : module.named_parameters()) {
    if (entry.key() == name) return entry.value();
    names.push_back(entry.key());
  }
  throw ArgumentError(detail::str("replace_parameter: there is no parameter '", name,
                                  "'. Choose one of: ", join(names), "."));
}

/// The states that an optimizer shall have of the parameter, or nothing to forget them.
NamedTensors carried(const NamedTensors& old, const at::Tensor& parameter, const at::Tensor& tensor,
                     const ReplaceParameterOptions& options) {
  if (const auto* choice = std::get_if<ReplacedState>(&options.state)) {
    if (*choice == ReplacedState::kDrop) return {};
    if (tensor.sizes() != parameter.sizes()) {
      throw ArgumentError(
          detail::str("replace_parameter: the state of the optimizer cannot be kept, since "
                      "the shape changes from ",
                      parameter.sizes(), " to ", tensor.sizes(),
                      ". Give a function that makes the new state of the old one."));
    }
    return old;
  }
  const auto& carry = std::get<CarryState>(options.state);
  NamedTensors result;
  for (const auto& [name, state] : old) {
    // Counters have no elements to carry.
    const bool belongs_to_elements = state.sizes() == parameter.sizes() && state.dim() > 0;
    if (!belongs_to_elements) {
      result.emplace_back(name, state);
      continue;
    }
    auto next = carry(name, state);
    if (!next.defined() || next.sizes() != tensor.sizes()) {
      throw ArgumentError(detail::str("replace_parameter: the new '", name, "' has shape ",
                                      next.defined() ? detail::str(next.sizes()) : "none",
                                      ", but the parameter has ", tensor.sizes(), "."));
    }
    result.emplace_back(name, std::move(next));
  }
  return result;
}

bool steps(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  return std::ranges::any_of(optimizer.param_groups(), [&](const auto& group) {
    return std::ranges::any_of(group.params(),
                               [&](const at::Tensor& one) { return one.is_same(parameter); });
  });
}

}  // namespace

void ModelCore::replace_parameter(std::string_view name, const at::Tensor& tensor,
                                  const ReplaceParameterOptions& options,
                                  std::source_location where) {
  const AtCallSite here(where);
  auto parameter = named_parameter(*module, name);
  if (!tensor.defined() || tensor.scalar_type() != parameter.scalar_type()) {
    throw ArgumentError(
        detail::str("replace_parameter: '", name, "' is ", parameter.scalar_type(),
                    ", and so must be what replaces it; this is ",
                    tensor.defined() ? detail::str(tensor.scalar_type()) : "not defined", "."));
  }
  const at::NoGradGuard no_grad;
  const auto values = tensor.detach().to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);

  // All states first, so that nothing has changed where one does not fit.
  std::vector<std::pair<std::shared_ptr<OptimizerCore>, NamedTensors>> states;
  for (const auto& core :
       optimizers ? optimizers() : std::vector<std::shared_ptr<OptimizerCore>>()) {
    if (!steps(*core->optimizer, parameter)) continue;
    auto old = optimizer_state_of(*core->optimizer, parameter);
    states.emplace_back(core, carried(old, parameter, values, options));
  }

  for (const auto& [core, state] : states) drop_optimizer_state_of(*core->optimizer, parameter);
  parameter.mutable_grad().reset();
  parameter.set_data(values);
  // What accumulates gradients knows the old shape.
  torch::autograd::impl::get_autograd_meta(parameter)->grad_accumulator_.reset();
  for (const auto& [core, state] : states) {
    if (!state.empty()) set_optimizer_state_of(*core->optimizer, parameter, state);
  }
  if (parallel) parallel->rebuild();
  if (watch) watch->renew();
}

}  // namespace detail
}  // namespace accelerate
