#include "fp8/delayed_scaling.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "fp8/scaled_product.h"

namespace accelerate::detail::fp8 {
namespace {

constexpr auto kRoles = static_cast<std::int64_t>(DelayedScaling::kRoles);

/// The last `count` rows, after rows of zeros where there are fewer.
at::Tensor newest(const at::Tensor& rows, std::int64_t count) {
  const auto kept = std::min(rows.size(0), count);
  auto result = at::zeros({count, rows.size(1)}, rows.options());
  result.narrow(0, count - kept, kept).copy_(rows.narrow(0, rows.size(0) - kept, kept));
  return result;
}

}  // namespace

DelayedScaling::DelayedScaling(TERecipeKwargs kwargs) : kwargs_(std::move(kwargs)) {}

c10::ScalarType DelayedScaling::dtype(Role role) const {
  return role == kGradient && *kwargs_.fp8_format == FP8Format::kHybrid ? kE5m2 : kE4m3;
}

std::int64_t DelayedScaling::add_layer(const std::string& name) {
  layers_.push_back(name);
  return static_cast<std::int64_t>(layers_.size()) - 1;
}

void DelayedScaling::allocate(c10::Device device) {
  const auto tensors = static_cast<std::int64_t>(layers_.size()) * kRoles;
  const auto options = at::TensorOptions(at::kFloat).device(device);
  std::vector<float> targets;
  for (std::int64_t i = 0; i < tensors; ++i) {
    const auto top = largest(dtype(static_cast<Role>(i % kRoles)));
    targets.push_back(static_cast<float>(std::ldexp(top, -static_cast<int>(*kwargs_.margin))));
  }
  scales_ = at::ones({tensors}, options);
  targets_ = at::tensor(targets).to(device);
  current_ = at::zeros({tensors}, options);
  history_ = at::zeros({*kwargs_.amax_history_len - 1, tensors}, options);
}

std::shared_ptr<void> DelayedScaling::enter(bool training) const {
  if (!training && !*kwargs_.use_autocast_during_eval) return nullptr;
  auto region = std::make_shared<Region>();
  region->owner = this;
  region->scales = scales_.clone();
  return std::make_shared<modeling::ForwardContextScope>(std::move(region), /*repeats=*/false);
}

const Region* DelayedScaling::region() const {
  const auto* region = dynamic_cast<const Region*>(modeling::forward_context().context.get());
  return region != nullptr && region->owner == this ? region : nullptr;
}

void DelayedScaling::record(std::int64_t layer, Role role, const at::Tensor& amax) {
  if (modeling::forward_context().repeats) return;  // the first call has recorded it
  const std::lock_guard lock(mutex_);
  auto slot = current_[layer * kRoles + role];
  slot.copy_(at::maximum(slot, amax.detach().to(at::kFloat)));
}

void DelayedScaling::update(Phase phase) {
  const at::NoGradGuard no_grad;
  if (reduce_max) reduce_max(current_);
  const auto used = current_ != 0;
  // The window has the oldest maximum too, which then makes room. `fmax` passes over NaN.
  auto amax = current_.clone();
  if (history_.size(0) > 0) {
    if (*kwargs_.amax_compute_algo == AmaxComputeAlgorithm::kMax) {
      amax = at::fmax(amax, at::where(history_.isnan(), 0.0, history_).amax(0));
    }
    const auto moved = at::cat({history_.slice(0, 1), current_.unsqueeze(0)});
    history_.copy_(at::where(used, moved, history_));
  }
  if (updates_[phase]++ % *kwargs_.interval == 0) {
    constexpr auto kMost = std::numeric_limits<float>::max();
    const auto usable = used.logical_and(amax.isfinite()).logical_and(amax > 0);
    scales_.copy_(at::where(usable, (targets_ / amax).clamp_max(kMost), scales_));
  }
  current_.zero_();
}

Value DelayedScaling::state_dict() const {
  Value::Dict layers;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const auto first = static_cast<std::int64_t>(i) * kRoles;
    const auto of_layer = [&](const at::Tensor& all) {
      return Value(all.slice(-1, first, first + kRoles).contiguous());
    };
    layers.set(layers_[i], Value(Value::Dict{{"scale", of_layer(scales_)},
                                             {"amax", of_layer(current_)},
                                             {"amax_history", of_layer(history_)}}));
  }
  return Value(Value::Dict{{"forward_updates", Value(updates_[kForward])},
                           {"backward_updates", Value(updates_[kBackward])},
                           {"layers", Value(std::move(layers))}});
}

void DelayedScaling::load_state_dict(const Value& state) {
  const at::NoGradGuard no_grad;
  if (const auto* const both = state.as_dict().get("updates")) {  // of older files
    updates_.fill(both->as_int());
  } else {
    updates_ = {state.at("forward_updates").as_int(), state.at("backward_updates").as_int()};
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const auto* const saved = state.at("layers").as_dict().get(layers_[i]);
    if (saved == nullptr) continue;
    const auto first = static_cast<std::int64_t>(i) * kRoles;
    const auto take = [&](const char* key, const at::Tensor& all) {
      const auto tensor = saved->at(key).as_tensor();
      if (tensor.dim() != all.dim() || tensor.size(-1) != kRoles) {
        throw ArgumentError(
            detail::str("The fp8 state of the layer '", layers_[i], "' has a ", key, " of shape ",
                        tensor.sizes(), ", but it keeps ", static_cast<int>(kRoles),
                        " numbers of each kind. The file is not one of save_state."));
      }
      all.slice(-1, first, first + kRoles)
          .copy_(tensor.dim() == 2 ? newest(tensor, all.size(0)) : tensor);
    };
    take("scale", scales_);
    take("amax", current_);
    take("amax_history", history_);
  }
}

}  // namespace accelerate::detail::fp8
