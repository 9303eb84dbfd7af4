#include "accelerate/grad_scaler.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "state/step_recording.h"
#include "state/tensor_batches.h"

namespace accelerate {
namespace {

using detail::str;
using detail::state::TensorBatches;

at::Tensor number_on(c10::Device device, double value, at::ScalarType dtype) {
  return at::full({}, value, at::TensorOptions(dtype).device(device));
}

/// The sum of at least one flag.
at::Tensor sum_on(c10::Device device, const std::vector<at::Tensor>& flags) {
  auto sum = flags.front().to(device, /*non_blocking=*/true);
  for (std::size_t i = 1; i < flags.size(); ++i) {
    sum = sum + flags[i].to(device, /*non_blocking=*/true);
  }
  return sum;
}

void add_gradients(torch::optim::Optimizer& optimizer, TensorBatches& batches) {
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      auto gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.scalar_type() == at::kHalf) {
        throw ArgumentError(
            "The gradients of a parameter are float16 and may have overflowed already. Keep "
            "parameters in float32: autocast still computes in float16.");
      }
      // Coalesce first: the sum of values for one element may be infinite.
      if (gradient.is_sparse()) {
        if (!gradient.is_coalesced()) {
          gradient = gradient.coalesce();
          parameter.mutable_grad() = gradient;
        }
        gradient = gradient._values();
      }
      batches.add(std::move(gradient));
    }
  }
}

}  // namespace

GradScaler::GradScaler(const GradScalerKwargs& options)
    : options_(options), next_scale_(options.init_scale) {
  if (!options.enabled) return;
  if (options.growth_factor <= 1) {
    throw ArgumentError(str("growth_factor is ", options.growth_factor,
                            ", but must be greater than 1: the factor has to grow."));
  }
  if (options.backoff_factor >= 1) {
    throw ArgumentError(str("backoff_factor is ", options.backoff_factor,
                            ", but must be less than 1: the factor has to shrink."));
  }
}

void GradScaler::start(c10::Device device) {
  scale_ = number_on(device, next_scale_, at::kFloat);
  growth_tracker_ = number_on(device, static_cast<double>(next_tracker_), at::kInt);
}

void GradScaler::require_factor(const char* what) const {
  if (scale_.defined()) return;
  throw StateError(
      str(what, ": there is no factor yet. Scale the loss first: scaler.scale(loss).backward()."));
}

GradScaler::OfOptimizer& GradScaler::of(const torch::optim::Optimizer& optimizer) {
  return optimizers_[&optimizer];
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!options_.enabled) return output;
  if (!scale_.defined()) start(output.device());
  return output * scale_.to(output.device(), /*non_blocking=*/true);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer,
                          const std::function<at::Tensor(const at::Tensor& found_inf)>& agree) {
  if (!options_.enabled) return;
  require_factor("unscale_");
  auto& state = of(optimizer);
  if (state.stage == Stage::kUnscaled) {
    throw StateError(
        "unscale_() has already been called on this optimizer since the last update().");
  }
  if (state.stage == Stage::kStepped) {
    throw StateError("unscale_() is being called after step(). Call it before, or update() first.");
  }
  const at::NoGradGuard no_grad;
  // In double, so that the result is rounded only once.
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  thread_local TensorBatches batches;
  const detail::state::ClearedAtEnd clearing(batches);
  add_gradients(optimizer, batches);
  auto& found = state.found_inf;
  found.clear();
  for (const auto& gradients : batches) {
    const auto device = gradients[0].device();
    auto here =
        std::ranges::find_if(found, [&](const at::Tensor& one) { return one.device() == device; });
    if (here == found.end()) here = found.insert(here, number_on(device, 0, at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, *here,
                                                   inverse.to(device, /*non_blocking=*/true));
  }
  if (agree && !found.empty()) {
    auto agreed = agree(sum_on(scale_.device(), found));
    found.clear();
    found.push_back(std::move(agreed));
  }
  state.stage = Stage::kUnscaled;
}

bool GradScaler::any_inf(const OfOptimizer& state) {
  return std::ranges::any_of(state.found_inf,
                             [](const at::Tensor& found) { return found.item<float>() != 0; });
}

bool GradScaler::step(torch::optim::Optimizer& optimizer, const std::function<void()>& carry_out) {
  const auto go = [&] {
    if (carry_out) {
      carry_out();
    } else {
      optimizer.step();
    }
  };
  if (!options_.enabled) {
    go();
    return true;
  }
  require_factor("step");
  auto& state = of(optimizer);
  if (state.stage == Stage::kStepped) {
    throw StateError("step() has already been called since the last update().");
  }
  if (state.stage == Stage::kReady) unscale_(optimizer);
  if (state.found_inf.empty()) {
    throw StateError(
        "No inf checks were recorded for this optimizer: none of its parameters has a gradient. "
        "Call backward() first, and check that the loss depends on them.");
  }
  if (auto* const recording = detail::state::StepRecording::current()) {
    recording->found_inf = sum_on(scale_.device(), state.found_inf);  // the device decides
    go();
    state.stage = Stage::kStepped;
    return true;
  }
  const bool finite = !any_inf(state);
  if (finite) go();
  state.stage = Stage::kStepped;
  return finite;
}

bool GradScaler::found_inf(const torch::optim::Optimizer& optimizer) const {
  const auto at = optimizers_.find(&optimizer);
  return at != optimizers_.end() && any_inf(at->second);
}

bool GradScaler::is_unscaled(const torch::optim::Optimizer& optimizer) const {
  const auto at = optimizers_.find(&optimizer);
  return at != optimizers_.end() && at->second.stage != Stage::kReady;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  require_factor("update");
  at::Tensor found;
  for (const auto& [optimizer, state] : optimizers_) {
    if (state.found_inf.empty()) continue;
    const auto here = sum_on(scale_.device(), state.found_inf);
    found = found.defined() ? found + here : here;
  }
  if (!found.defined()) {
    throw StateError(
        "No inf checks were recorded prior to update(). Call step() or unscale_() first.");
  }
  at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor,
                         options_.backoff_factor, options_.growth_interval);
  forget_steps();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  require_factor("update");
  scale_.fill_(new_scale);
  forget_steps();
}

void GradScaler::forget_steps() {
  for (auto& [optimizer, state] : optimizers_) {
    state.stage = Stage::kReady;
    state.found_inf.clear();
  }
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<double>() : next_scale_;
}

std::int64_t GradScaler::get_growth_tracker() const {
  if (!options_.enabled) return 0;
  return growth_tracker_.defined() ? growth_tracker_.item<std::int64_t>() : next_tracker_;
}

Value GradScaler::state_dict() const {
  if (!options_.enabled) return Value::Dict{};
  return Value::Dict{{"scale", get_scale()},
                     {"growth_factor", options_.growth_factor},
                     {"backoff_factor", options_.backoff_factor},
                     {"growth_interval", options_.growth_interval},
                     {"_growth_tracker", get_growth_tracker()}};
}

void GradScaler::load_state_dict(const Value& state) {
  if (!options_.enabled) return;
  if (state.as_dict().empty()) {
    throw ArgumentError(
        "The state of the scaler is empty: it was saved by a disabled scaler. Disable this one "
        "too, "
        "or do not load the state.");
  }
  GradScalerKwargs options = options_;
  options.growth_factor = state.at("growth_factor").as_double();
  options.backoff_factor = state.at("backoff_factor").as_double();
  options.growth_interval = state.at("growth_interval").as_int();
  const double scale = state.at("scale").as_double();
  const auto tracker = state.at("_growth_tracker").as_int();
  // Nothing below throws, so a failed load changes nothing.
  options_ = options;
  next_scale_ = options_.init_scale = scale;
  next_tracker_ = tracker;
  if (scale_.defined()) {
    scale_.fill_(scale);
    growth_tracker_.fill_(tracker);
  }
}

}  // namespace accelerate
