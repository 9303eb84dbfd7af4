#include "training/fused_step.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/optim.h"
#include "training/update_rules.h"

namespace accelerate::detail {
namespace {

using at::Tensor;
using torch::optim::Optimizer;

/// Step counts as kernels read them. Parameters that have taken equally many steps share one
/// tensor, which lives until the end of the call.
class StepTensors {
 public:
  const Tensor& at(std::int64_t step, c10::Device device) {
    for (const auto& known : known_) {
      if (known.step == step && known.tensor.device() == device) return known.tensor;
    }
    const auto options = at::TensorOptions(at::kFloat).device(device);
    known_.push_back({step, at::full({}, static_cast<double>(step), options)});
    return known_.back().tensor;
  }

 private:
  struct Known {
    std::int64_t step;
    Tensor tensor;
  };
  std::vector<Known> known_;
};

Tensor zeros_for(const Tensor& parameter) {
  return at::zeros_like(parameter, at::TensorOptions(), at::MemoryFormat::Preserve);
}

/// The state of `parameter`; made when there is none.
template <class State>
State& state_of(Optimizer& optimizer, const Tensor& parameter) {
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

AdamOptions adam_options(double lr, const std::tuple<double, double>& betas, double eps,
                         double weight_decay, bool amsgrad, bool decoupled) {
  return {.lr = lr,
          .betas = {std::get<0>(betas), std::get<1>(betas)},
          .eps = eps,
          .weight_decay = weight_decay,
          .amsgrad = amsgrad,
          .decoupled_weight_decay = decoupled};
}

// For each optimizer of LibTorch: our name for its options, and how a parameter with its state
// joins a bucket.

struct AdamState {
  template <class State>
  static void collect(State& state, const AdamOptions& options, const Tensor& parameter,
                      TensorBuckets& buckets, StepTensors& steps) {
    if (!state.exp_avg().defined()) {
      state.exp_avg(zeros_for(parameter));
      state.exp_avg_sq(zeros_for(parameter));
    }
    if (options.amsgrad && !state.max_exp_avg_sq().defined()) {
      state.max_exp_avg_sq(zeros_for(parameter));
    }
    state.step(state.step() + 1);
    const auto& grad = parameter.grad();
    const bool fused = fusable(parameter, grad) && same_layout(parameter, state.exp_avg()) &&
                       same_layout(parameter, state.exp_avg_sq()) &&
                       (!options.amsgrad || same_layout(parameter, state.max_exp_avg_sq()));
    auto& bucket = buckets.at(parameter.device(), parameter.scalar_type(), fused);
    bucket.params.push_back(parameter);
    bucket.grads.push_back(grad);
    bucket.slots[0].push_back(steps.at(state.step(), fused ? parameter.device() : c10::kCPU));
    bucket.slots[1].push_back(state.exp_avg());
    bucket.slots[2].push_back(state.exp_avg_sq());
    if (options.amsgrad) bucket.slots[3].push_back(state.max_exp_avg_sq());
  }
};

struct AdamWSteps : AdamState {
  using State = torch::optim::AdamWParamState;
  static AdamOptions options(const torch::optim::OptimizerOptions& of) {
    const auto& o = static_cast<const torch::optim::AdamWOptions&>(of);
    return adam_options(o.lr(), o.betas(), o.eps(), o.weight_decay(), o.amsgrad(), true);
  }
};

struct AdamSteps : AdamState {
  using State = torch::optim::AdamParamState;
  static AdamOptions options(const torch::optim::OptimizerOptions& of) {
    const auto& o = static_cast<const torch::optim::AdamOptions&>(of);
    return adam_options(o.lr(), o.betas(), o.eps(), o.weight_decay(), o.amsgrad(), false);
  }
};

struct AdagradSteps {
  using State = torch::optim::AdagradParamState;
  static AdagradOptions options(const torch::optim::OptimizerOptions& of) {
    const auto& o = static_cast<const torch::optim::AdagradOptions&>(of);
    return {.lr = o.lr(),
            .lr_decay = o.lr_decay(),
            .weight_decay = o.weight_decay(),
            .initial_accumulator_value = o.initial_accumulator_value(),
            .eps = o.eps()};
  }
  static void collect(State& state, const AdagradOptions& options, const Tensor& parameter,
                      TensorBuckets& buckets, StepTensors& steps) {
    // LibTorch makes the state in the constructor; a group that came later has none.
    if (!state.sum().defined()) {
      state.sum(at::full_like(parameter, options.initial_accumulator_value, at::TensorOptions(),
                              at::MemoryFormat::Preserve));
    }
    state.step(state.step() + 1);
    const auto& grad = parameter.grad();
    const bool fused = fusable(parameter, grad) && same_layout(parameter, state.sum());
    auto& bucket = buckets.at(parameter.device(), parameter.scalar_type(), fused);
    bucket.params.push_back(parameter);
    bucket.grads.push_back(grad);
    bucket.slots[0].push_back(steps.at(state.step(), fused ? parameter.device() : c10::kCPU));
    bucket.slots[1].push_back(state.sum());
  }
};

struct SGDSteps {
  using State = torch::optim::SGDParamState;
  static SGDOptions options(const torch::optim::OptimizerOptions& of) {
    const auto& o = static_cast<const torch::optim::SGDOptions&>(of);
    return {.lr = o.lr(),
            .momentum = o.momentum(),
            .dampening = o.dampening(),
            .weight_decay = o.weight_decay(),
            .nesterov = o.nesterov()};
  }
  /// Without momentum there is no state, as in LibTorch: `state` is null.
  static void collect(State* state, const Tensor& parameter, TensorBuckets& buckets) {
    bool first = false;
    if (state != nullptr && !state->momentum_buffer().defined()) {
      state->momentum_buffer(zeros_for(parameter));
      first = true;
    }
    const auto& grad = parameter.grad();
    const bool fused = fusable(parameter, grad) &&
                       (state == nullptr || same_layout(parameter, state->momentum_buffer()));
    auto& bucket = buckets.at(parameter.device(), parameter.scalar_type(), fused, first);
    bucket.params.push_back(parameter);
    bucket.grads.push_back(grad);
    if (state != nullptr) bucket.slots[0].push_back(state->momentum_buffer());
  }
};

struct RMSpropSteps {
  using State = torch::optim::RMSpropParamState;
  static RMSpropOptions options(const torch::optim::OptimizerOptions& of) {
    const auto& o = static_cast<const torch::optim::RMSpropOptions&>(of);
    return {.lr = o.lr(),
            .alpha = o.alpha(),
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .momentum = o.momentum(),
            .centered = o.centered()};
  }
  static void collect(State& state, const RMSpropOptions& options, const Tensor& parameter,
                      TensorBuckets& buckets, StepTensors& /*steps*/) {
    if (!state.square_avg().defined()) state.square_avg(zeros_for(parameter));
    if (options.momentum > 0 && !state.momentum_buffer().defined()) {
      state.momentum_buffer(zeros_for(parameter));
    }
    if (options.centered && !state.grad_avg().defined()) state.grad_avg(zeros_for(parameter));
    state.step(state.step() + 1);
    auto& bucket = buckets.at(parameter.device(), parameter.scalar_type(), false);
    bucket.params.push_back(parameter);
    bucket.grads.push_back(parameter.grad());
    bucket.slots[1].push_back(state.square_avg());
    if (options.momentum > 0) bucket.slots[2].push_back(state.momentum_buffer());
    if (options.centered) bucket.slots[3].push_back(state.grad_avg());
  }
};

/// Whether the kernels take all gradients.
bool takes(Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& grad = parameter.grad();
      if (!grad.defined()) continue;
      if (grad.layout() != at::kStrided || parameter.layout() != at::kStrided ||
          !at::isFloatingType(parameter.scalar_type()) ||
          grad.scalar_type() != parameter.scalar_type() || grad.device() != parameter.device()) {
        return false;
      }
    }
  }
  return true;
}

/// Kept for its memory only; empty between calls.
TensorBuckets& buckets_of_this_thread() {
  thread_local TensorBuckets buckets;
  return buckets;
}

template <class Steps>
void step_counted(Optimizer& optimizer, const GradScaling& scaling) {
  if (scaling.overflowed()) return;
  const GradScaling unscaling{.grad_scale = scaling.grad_scale, .found_inf = {}};
  StepTensors steps;
  for (auto& group : optimizer.param_groups()) {
    const auto options = Steps::options(group.options());
    auto& buckets = buckets_of_this_thread();
    const BucketsScope scope(buckets);
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_of<typename Steps::State>(optimizer, parameter);
      Steps::collect(state, options, parameter, buckets, steps);
    }
    for (auto& bucket : buckets) {
      UpdateRule<std::remove_const_t<decltype(options)>>::apply(
          bucket, options, {.value = options.lr, .tensor = {}}, unscaling);
    }
  }
}

/// Whether a buffer has to be made, which must not happen in a step that is none.
bool lacks_buffers(Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    if (SGDSteps::options(group.options()).momentum == 0) continue;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      if (optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0) return true;
    }
  }
  return false;
}

/// SGD counts nothing: `found_inf` can stay on the device.
void step_sgd(Optimizer& optimizer, GradScaling scaling) {
  if (scaling.on_host() || lacks_buffers(optimizer)) {
    if (scaling.overflowed()) return;
    scaling.found_inf = Tensor();
  }
  for (auto& group : optimizer.param_groups()) {
    const auto options = SGDSteps::options(group.options());
    auto& buckets = buckets_of_this_thread();
    const BucketsScope scope(buckets);
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto* const state =
          options.momentum == 0 ? nullptr : &state_of<SGDSteps::State>(optimizer, parameter);
      SGDSteps::collect(state, parameter, buckets);
    }
    for (auto& bucket : buckets) {
      if (scaling.found_inf.defined() && !bucket.fusable) {
        if (scaling.overflowed()) return;
        scaling.found_inf = Tensor();
      }
      UpdateRule<SGDOptions>::apply(bucket, options, {.value = options.lr, .tensor = {}}, scaling);
    }
  }
}

}  // namespace

bool fused_step(Optimizer& optimizer, const Tensor& grad_scale, const Tensor& found_inf) {
  if (!takes(optimizer)) return false;
  const at::NoGradGuard no_grad;
  const GradScaling scaling{.grad_scale = grad_scale, .found_inf = found_inf};
  if (auto* const own = dynamic_cast<FusedOptimizer*>(&optimizer)) {
    own->step_scaled(grad_scale, found_inf);
    return true;
  }
  // Exactly these types: a class derived from one of them may step in its own way.
  const auto& type = typeid(optimizer);
  if (type == typeid(torch::optim::AdamW)) {
    step_counted<AdamWSteps>(optimizer, scaling);
  } else if (type == typeid(torch::optim::Adam)) {
    step_counted<AdamSteps>(optimizer, scaling);
  } else if (type == typeid(torch::optim::SGD)) {
    step_sgd(optimizer, scaling);
  } else if (type == typeid(torch::optim::Adagrad)) {
    step_counted<AdagradSteps>(optimizer, scaling);
  } else if (type == typeid(torch::optim::RMSprop)) {
    step_counted<RMSpropSteps>(optimizer, scaling);
  } else {
    return false;
  }
  return true;
}

bool fused_step(Optimizer& optimizer) { return fused_step(optimizer, {}, {}); }

}  // namespace accelerate::detail
