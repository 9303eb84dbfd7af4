#include "sharding/deepspeed_steps.h"

#include <limits>
#include <utility>

#include "core/log.h"
#include "core/loss_scale.h"
#include "core/text.h"

namespace accelerate::detail::sharding {

void DeepSpeedSteps::after_backward(bool synchronizes, const StepParts& parts) {
  if (!synchronizes) return;
  norm_ = parts.clip(clipping_ > 0 ? clipping_ : std::numeric_limits<double>::infinity());
  const bool stepped = parts.step();
  parts.zero_grad();
  if (stepped) parts.step_scheduler();
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

namespace {

/// The rule of the factor, whose GradScaler follows it.
class ScaleState final : public Stateful {
 public:
  ScaleState(std::shared_ptr<DeepSpeedLossScale> scale, std::shared_ptr<optim::LossScaling> scaling)
      : scale_(std::move(scale)), scaling_(std::move(scaling)) {}

  [[nodiscard]] Value state_dict() override { return scale_->state_dict(); }
  void load_state_dict(const Value& state) override {
    scale_->load_state_dict(state);
    auto own = scaling_->scaler().state_dict().as_dict();
    own.set("scale", scale_->value());
    scaling_->scaler().load_state_dict(own);
  }

 private:
  std::shared_ptr<DeepSpeedLossScale> scale_;
  std::shared_ptr<optim::LossScaling> scaling_;
};

}  // namespace

DeepSpeedScaling loss_scaling(const DeepSpeedSettings& settings, bool on_cpu) {
  const bool scales = settings.fp16 && !on_cpu;
  if (!scales && !(settings.bf16 && settings.check_grad_overflow)) return {};
  if (!scales) {
    return {.scaling = std::make_shared<optim::LossScaling>(GradScalerKwargs{.init_scale = 1},
                                                            [](bool /*overflow*/) { return 1.0; })};
  }
  const auto scale = std::make_shared<DeepSpeedLossScale>(settings);
  auto scaling = std::make_shared<optim::LossScaling>(
      GradScalerKwargs{.init_scale = scale->value()},
      [scale](bool overflow) { return scale->update(overflow); });
  auto state = std::make_shared<ScaleState>(scale, scaling);
  return {.scaling = std::move(scaling), .state = std::move(state)};
}

}  // namespace accelerate::detail::sharding
