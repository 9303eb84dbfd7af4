#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "accelerate/detail/data/loader_core.h"
#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/prepared_model.h"
#include "accelerate/state/gradient_state.h"
#include "accelerator/gradient_watch.h"
#include "accelerator/model_registry.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "fp8/delayed_scaling.h"
#include "lazy/operator_rule.h"
#include "model_parallel/attention_calls.h"
#include "optim/optimizer_core.h"
#include "optim/optimizer_state.h"
#include "parallel/engine.h"
#include "state/attention_rule.h"

namespace accelerate {
namespace detail::accelerator {

void refuse_empty_holder() {
  throw ArgumentError(
      "The model is empty: its holder was made with nullptr, or the pointer was never assigned. "
      "Assign a module first, for example net = torch::nn::Linear(4, 2).");
}

namespace {

/// With sp_size: warns once where the loader gives whole sequences for training, or parts for
/// evaluation.
void check_sequences(bool trains) {
  const auto loader = GradientState().active_dataloader();
  const auto* const ours = dynamic_cast<const data::LoaderCore*>(loader.get());
  if (ours == nullptr) return;
  if (trains && at::GradMode::is_enabled() && ours->same_in_sequence_group() && !ours->splits()) {
    warn_once(
        "sp_size is above 1, and this loader gives all processes of a group the same whole "
        "sequences, of which a forward in training mode takes each for another part. Loop over "
        "deepspeed_ulysses_dl_adapter(loader, model), unless the program cuts them itself.");
  }
  if (!trains && ours->splits()) {
    warn_once(
        "In evaluation mode a model with sp_size above 1 takes whole sequences, but the loader of "
        "deepspeed_ulysses_dl_adapter gives parts of them. Loop over the prepared loader itself, "
        "or stay in training mode under torch::NoGradGuard.");
  }
}

}  // namespace

ForwardScope::ForwardScope(const ModelCore& core)
    : engine_(core.engine.get()), delayed_scaling_(core.delayed_scaling.get()) {
  if (delayed_scaling_) in_8_bits_ = delayed_scaling_->enter(core.module->is_training());
  if (engine_ != nullptr) entered_ = engine_->enter_forward();
  if (core.attention) check_sequences(core.module->is_training());
  if (core.attention && core.module->is_training()) {
    attention_ = std::make_shared<state::AttentionRuleScope>(core.attention);
  }
  if (core.cast) autocast_.emplace(core.cast->device_type, core.cast->dtype, core.cast->kwargs);
}

void ForwardScope::finish() const {
  if (attention_) model_parallel::warn_without_attention(*attention_, "sp_size");
  if (engine_ != nullptr) engine_->after_forward();
  if (in_8_bits_ && at::GradMode::is_enabled())
    delayed_scaling_->update(fp8::DelayedScaling::kForward);
}

void ModelCore::use(std::shared_ptr<parallel::Engine> new_engine) {
  engine = std::move(new_engine);
  watch = std::make_shared<GradientWatch>(shared_from_this());
  add_to_model_registry(shared_from_this());
}

StateDict ModelCore::state_dict() const {
  return engine ? engine->state_dict(*module) : accelerate::state_dict(*module);
}

StateDict state_dict_of(const std::shared_ptr<torch::nn::Module>& module,
                        const std::shared_ptr<ModelCore>& core, bool unwrap) {
  if (core == nullptr || core->engine == nullptr) {
    return accelerate::state_dict(unwrap ? *extract_model_from_parallel(module) : *module);
  }
  auto state = core->state_dict();
  const auto prefix = core->engine->wrapper_prefix();
  if (unwrap || prefix.empty()) return state;
  StateDict prefixed("Tensor");
  for (const auto& entry : state) prefixed.insert(str(prefix, entry.key()), entry.value());
  return prefixed;
}

void ModelCore::load_state_dict(const StateDict& state, bool strict) const {
  if (engine) return engine->load_state_dict(*module, state, strict);
  accelerate::load_state_dict(*module, state, strict);
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

/// The new state of the parameter in an optimizer; empty to drop it.
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
  if (engine && !engine->can_rebuild()) {
    throw UnsupportedError(
        "replace_parameter: the engine of this model keeps parameters of a fixed shape. Change the "
        "module before prepare.");
  }
  auto parameter = named_parameter(*module, name);
  if (!tensor.defined() || tensor.scalar_type() != parameter.scalar_type()) {
    throw ArgumentError(
        detail::str("replace_parameter: '", name, "' is ", parameter.scalar_type(),
                    ", and so must be what replaces it; this is ",
                    tensor.defined() ? detail::str(tensor.scalar_type()) : "not defined", "."));
  }
  const at::NoGradGuard no_grad;
  const auto values = tensor.detach().to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);

  // Compute all states first: nothing has changed if one does not fit.
  std::vector<std::pair<std::shared_ptr<optim::OptimizerCore>, NamedTensors>> states;
  for (const auto& core :
       optimizers ? optimizers() : std::vector<std::shared_ptr<optim::OptimizerCore>>()) {
    if (!steps(*core->optimizer, parameter)) continue;
    auto old = optim::optimizer_state_of(*core->optimizer, parameter);
    states.emplace_back(core, carried(old, parameter, values, options));
  }

  for (const auto& [core, state] : states)
    optim::drop_optimizer_state_of(*core->optimizer, parameter);
  parameter.mutable_grad().reset();
  const auto rule = lazy::find_rule(parameter);
  parameter.set_data(values);
  if (rule) lazy::set_rule(parameter, rule);
  // The gradient accumulator has the old shape.
  torch::autograd::impl::get_autograd_meta(parameter)->grad_accumulator_.reset();
  for (const auto& [core, state] : states) {
    if (!state.empty()) optim::set_optimizer_state_of(*core->optimizer, parameter, state);
  }
  if (engine) engine->rebuild();
  if (watch) watch->renew();
}

}  // namespace detail::accelerator
}  // namespace accelerate
