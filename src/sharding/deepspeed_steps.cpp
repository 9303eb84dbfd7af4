#include "sharding/deepspeed_steps.h"

#include <limits>

#include "core/log.h"
#include "core/loss_scale.h"
#include "core/text.h"

namespace accelerate::detail::sharding {

void DeepSpeedSteps::after_backward(bool synchronizes, const StepParts& parts) {
  if (!synchronizes) return;
  norm_ = parts.clip(clipping_ > 0 ? clipping_ : std::numeric_limits<double>::infinity());
  skipped_ = !parts.step();
  parts.zero_grad();
  if (!skipped_) parts.step_scheduler();
}

at::Tensor DeepSpeedSteps::clip_grad_norm_(double max_norm) const {
  if (max_norm != clipping_) {
    warn_once(str("clip_grad_norm_: max_norm is ", max_norm, ", but backward has clipped to ",
                  clipping_,
                  ", the gradient_clipping of the DeepSpeed configuration. Set it "
                  "there."));
  }
  return norm_;
}

std::shared_ptr<optim::LossScaling> loss_scaling(const DeepSpeedSettings& settings, bool on_cpu) {
  const bool scales = settings.fp16 && !on_cpu;
  if (!scales && !(settings.bf16 && settings.check_grad_overflow)) return nullptr;
  if (!scales) {
    return std::make_shared<optim::LossScaling>(GradScalerKwargs{.init_scale = 1},
                                                [](bool /*overflow*/) { return 1.0; });
  }
  const auto scale = std::make_shared<DeepSpeedLossScale>(settings);
  return std::make_shared<optim::LossScaling>(
      GradScalerKwargs{.init_scale = scale->value()},
      [scale](bool overflow) { return scale->update(overflow); });
}

}  // namespace accelerate::detail::sharding
