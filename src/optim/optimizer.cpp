#include "accelerate/optimizer.h"

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <utility>

#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/errors.h"
#include "optim/fused_step.h"
#include "optim/optimizer_core.h"
#include "optim/optimizer_state.h"
#include "parallel/engine.h"
#include "state/step_recording.h"

namespace accelerate {
namespace detail::optim {

bool OptimizerCore::has_gradients() const {
  return std::ranges::any_of(optimizer->param_groups(), [](const auto& group) {
    return std::ranges::any_of(group.params(),
                               [](const at::Tensor& one) { return one.grad().defined(); });
  });
}

void OptimizerCore::attach(const std::shared_ptr<parallel::Engine>& engine) {
  std::erase_if(engines, [](const auto& one) { return one.expired(); });
  if (std::ranges::any_of(engines, [&](const auto& one) { return one.lock() == engine; })) return;
  engine->attach(*optimizer);
  engines.push_back(engine);
}

void OptimizerCore::for_each_engine(const std::function<void(parallel::Engine&)>& f) const {
  for (const auto& one : engines) {
    if (const auto engine = one.lock()) f(*engine);
  }
}

at::Tensor OptimizerCore::found_inf_over_processes(at::Tensor found_inf) const {
  for_each_engine([&](auto& engine) { found_inf = engine.found_inf_over_processes(found_inf); });
  return found_inf;
}

void OptimizerCore::tell_engines() const {
  for_each_engine([&](auto& engine) { engine.after_step(*optimizer); });
}

void carry_out_step(torch::optim::Optimizer& optimizer) {
  if (const auto* recording = state::StepRecording::current()) {
    // The device leaves the step out if the flag is set.
    if (fused_step(optimizer, {}, recording->found_inf)) return;
    throw UnsupportedError("an optimizer or a gradient is of a kind that steps on the host only");
  }
  if (!fused_step(optimizer)) optimizer.step();
}

namespace {

/// Lets each replay do what a step does on the host around the work of the device.
void record_host_effects(OptimizerCore& core, state::StepRecording& recording,
                         const c10::function_ref<void()>& step) {
  if (core.before_step) recording.before_replay([&core] { core.before_step(*core.optimizer); });
  step();
  if (auto found_inf = std::exchange(recording.found_inf, {}); found_inf.defined()) {
    // Schedulers must know: the one wait of a step.
    recording.after_replay([&core, found_inf = std::move(found_inf)] {
      core.step_was_skipped = found_inf.item<float>() != 0;
    });
  }
  if (core.after_step) recording.after_replay([&core] { core.after_step(*core.optimizer); });
}

}  // namespace

at::Tensor OptimizerCore::carry_out(const torch::optim::Optimizer::LossClosure& closure) {
  if (scaling) {
    if (closure) {
      throw UnsupportedError(
          "step: a closure computes new gradients, which cannot be scaled for float16. Call "
          "backward before step, or train in bf16.");
    }
    step_was_skipped = !scaling->step(*this);
    if (!step_was_skipped) tell_engines();
    return {};
  }
  at::Tensor loss;
  if (closure) {
    loss = optimizer->step(closure);
  } else {
    carry_out_step(*optimizer);
  }
  tell_engines();
  return loss;
}

at::Tensor OptimizerCore::step(const torch::optim::Optimizer::LossClosure& closure) {
  if (auto* const recording = state::StepRecording::current()) {
    if (closure) {
      throw UnsupportedError("a closure of step() chooses on the host how often it runs");
    }
    record_host_effects(*this, *recording, [&] { carry_out(nullptr); });
    return {};
  }
  if (before_step) before_step(*optimizer);
  auto loss = carry_out(closure);
  if (after_step) after_step(*optimizer);
  return loss;
}

void OptimizerCore::zero_grad(bool set_to_none) {
  set_to_none = set_to_none && !state::StepRecording::keeps_gradients;
  // LibTorch's zero_grad detaches gradients, which fails for views into a bucket.
  for (auto& group : optimizer->param_groups()) {
    for (auto& parameter : group.params()) {
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
        continue;
      }
      if (gradient.grad_fn()) gradient.detach_();
      gradient.requires_grad_(false);
      gradient.zero_();
    }
  }
  for_each_engine([&](auto& engine) { engine.after_zero_grad(*optimizer); });
}

at::Tensor LossScaling::scale(const at::Tensor& loss) {
  if (!stepped_.empty()) update();
  return scaler_.scale(loss);
}

void LossScaling::unscale(OptimizerCore& optimizer) {
  if (!optimizer.has_gradients() || scaler_.is_unscaled(*optimizer.optimizer)) return;
  scaler_.unscale_(*optimizer.optimizer, [&](const at::Tensor& found_inf) {
    return optimizer.found_inf_over_processes(found_inf);
  });
}

bool LossScaling::step(OptimizerCore& optimizer) {
  unscale(optimizer);
  const bool done =
      scaler_.step(*optimizer.optimizer, [&] { carry_out_step(*optimizer.optimizer); });
  overflow_ = overflow_ || !done;
  stepped_.push_back(&optimizer);
  if (all_have_stepped()) update();
  return done;
}

std::string LossScaling::why_not_replayed() const {
  if (rule_) return "the factor of the loss follows a rule of the host";
  if (stepped_.empty()) return "";
  return "an optimizer that has gradients takes no step in it, and the factor of float16 changes "
         "after the steps of all";
}

bool LossScaling::all_have_stepped() const {
  return std::ranges::all_of(optimizers_, [this](const auto& reference) {
    const auto optimizer = reference.lock();
    return !optimizer || std::ranges::find(stepped_, optimizer.get()) != stepped_.end() ||
           !optimizer->has_gradients();
  });
}

void LossScaling::update() {
  if (rule_) {
    scaler_.update(rule_(std::exchange(overflow_, false)));
  } else {
    scaler_.update();
  }
  stepped_.clear();
  std::erase_if(optimizers_, [](const auto& reference) { return reference.expired(); });
}

std::shared_ptr<OptimizerCore> make_optimizer_core(
    std::shared_ptr<torch::optim::Optimizer> optimizer, const torch::optim::Optimizer* moved_from) {
  if (!optimizer) throw ArgumentError("There is no optimizer to prepare: the pointer is empty.");
  auto core = std::make_shared<OptimizerCore>();
  core->optimizer = std::move(optimizer);
  core->moved_from = moved_from;
  return core;
}

void set_modes(OptimizerCore& core,
               std::function<void(torch::optim::Optimizer&, bool training)> modes) {
  core.modes = std::move(modes);
}

}  // namespace detail::optim

AcceleratedOptimizer::AcceleratedOptimizer(std::shared_ptr<detail::optim::OptimizerCore> core)
    : core_(std::move(core)) {}

detail::optim::OptimizerCore& AcceleratedOptimizer::core() const {
  if (!core_) detail::refuse_empty("optimizer");
  return *core_;
}

at::Tensor AcceleratedOptimizer::step(const LossClosure& closure) {
  auto& own = core();
  if (own.stepped_in_backward || !own.gradient_state.sync_gradients()) return {};
  return own.step(closure);
}

void AcceleratedOptimizer::zero_grad(bool set_to_none) {
  auto& own = core();
  if (own.stepped_in_backward || !own.gradient_state.sync_gradients()) return;
  own.zero_grad(set_to_none);
}

bool AcceleratedOptimizer::step_was_skipped() const { return core().step_was_skipped; }

std::vector<torch::optim::OptimizerParamGroup>& AcceleratedOptimizer::param_groups() const {
  return core().optimizer->param_groups();
}

void AcceleratedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  auto& own = core();
  own.optimizer->add_param_group(group);
  own.for_each_engine([&](auto& engine) { engine.attach(*own.optimizer); });
}

AcceleratedOptimizer::ParamStates& AcceleratedOptimizer::state() const {
  return core().optimizer->state();
}

torch::optim::OptimizerOptions& AcceleratedOptimizer::defaults() const {
  return core().optimizer->defaults();
}

Value AcceleratedOptimizer::state_dict() const {
  auto& own = core();
  return detail::optim::optimizer_state_dict(*own.optimizer, [&](auto states) {
    own.for_each_engine([&](auto& engine) { engine.gather_states(states); });
  });
}

void AcceleratedOptimizer::load_state_dict(const Value& state) {
  auto& own = core();
  detail::optim::load_optimizer_state_dict(*own.optimizer, state, [&](auto states) {
    own.for_each_engine([&](auto& engine) {
      for (auto& one : states) engine.cut_state(one);
    });
  });
}

void AcceleratedOptimizer::train() const {
  const auto& own = core();
  if (own.modes) own.modes(*own.optimizer, /*training=*/true);
}

void AcceleratedOptimizer::eval() const {
  const auto& own = core();
  if (own.modes) own.modes(*own.optimizer, /*training=*/false);
}

torch::optim::Optimizer& AcceleratedOptimizer::optimizer() const { return *core().optimizer; }

}  // namespace accelerate
