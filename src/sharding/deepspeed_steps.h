// src/sharding/deepspeed_steps.h - who steps in a run with DeepSpeed: `backward`.
//
// A DeepSpeed engine clips, steps, clears gradients and steps the scheduler of its configuration at
// the end of the backward that completes a batch. The program's own calls then do nothing:
// `optimizer.step()`, `optimizer.zero_grad()`, `scheduler.step()` of that scheduler, and
// `clip_grad_norm_`, which returns the norm of the last step.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "accelerate/api.h"
#include "accelerate/state/stateful.h"
#include "core/deepspeed_settings.h"
#include "optim/optimizer_core.h"

namespace accelerate::detail::sharding {

/// What a step is made of. All of them are set.
struct StepParts {
  /// Collective. Clips the gradients to `max_norm`, which may be infinite, and returns their norm.
  std::function<at::Tensor(double max_norm)> clip;
  /// Steps and returns true; returns false if the step was skipped for an overflow.
  std::function<bool()> step;
  std::function<void()> zero_grad;
  /// Of the configuration's scheduler; does nothing without one.
  std::function<void()> step_scheduler;
};

class ACCELERATE_API DeepSpeedSteps {
 public:
  explicit DeepSpeedSteps(const DeepSpeedSettings& settings)
      : clipping_(settings.gradient_clipping) {}

  /// Collective. Call after each backward. Does nothing for one that is only accumulated.
  void after_backward(bool synchronizes, const StepParts& parts);

  /// What `clip_grad_norm_` returns: the norm before the last step, undefined before the first.
  /// Warns once if `max_norm` is not what the configuration clips to.
  [[nodiscard]] at::Tensor clip_grad_norm_(double max_norm) const;

 private:
  double clipping_;
  at::Tensor norm_;
};

struct DeepSpeedScaling {
  std::shared_ptr<optim::LossScaling> scaling = nullptr;
  /// The rule of its factor; null if that does not change.
  std::shared_ptr<Stateful> state = nullptr;
};

/// The factor on the loss by DeepSpeed's rule in float16, and a factor of 1 that only skips steps
/// for bf16 with check_grad_overflow; null otherwise, and for float16 on the CPU, which does not
/// train in it.
[[nodiscard]] ACCELERATE_API DeepSpeedScaling loss_scaling(const DeepSpeedSettings& settings,
                                                           bool on_cpu);

}  // namespace accelerate::detail::sharding
