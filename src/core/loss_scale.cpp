#include "core/loss_scale.h"

#include <algorithm>
#include <cmath>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {

DeepSpeedLossScale::DeepSpeedLossScale(const DeepSpeedSettings& settings)
    : scale_(settings.loss_scale != 0
                 ? settings.loss_scale
                 : std::ldexp(1.0, static_cast<int>(settings.initial_scale_power))),
      minimum_(settings.min_loss_scale),
      window_(settings.loss_scale_window),
      full_hysteresis_(settings.hysteresis),
      hysteresis_(settings.hysteresis),
      refill_always_(settings.consecutive_hysteresis),
      dynamic_(settings.loss_scale == 0) {}

double DeepSpeedLossScale::update(bool overflow) {
  if (!dynamic_) return scale_;
  if (overflow) {
    clean_ = 0;
    if (hysteresis_ > 1) {
      --hysteresis_;
    } else if (scale_ <= minimum_) {
      throw StateError(str("Current loss scale already at minimum (", minimum_,
                           ") - cannot decrease scale anymore: the gradients of float16 overflow. "
                           "Use bf16, a lower learning rate, or a smaller fp16.min_loss_scale."));
    } else {
      scale_ = std::max(scale_ / 2, minimum_);
    }
    return scale_;
  }
  if (refill_always_) hysteresis_ = full_hysteresis_;
  if (clean_ > 0 && clean_ % window_ == 0) {
    scale_ *= 2;
    hysteresis_ = full_hysteresis_;
  }
  ++clean_;
  return scale_;
}

Value::Dict DeepSpeedLossScale::state_dict() const {
  return {{"cur_scale", scale_}, {"cur_hysteresis", hysteresis_}, {"clean_iterations", clean_}};
}

void DeepSpeedLossScale::load_state_dict(const Value& state) {
  const auto scale = state.at("cur_scale").as_double();
  const auto hysteresis = state.at("cur_hysteresis").as_int();
  clean_ = state.at("clean_iterations").as_int();
  scale_ = scale;
  hysteresis_ = hysteresis;
}

}  // namespace accelerate::detail::inline core
