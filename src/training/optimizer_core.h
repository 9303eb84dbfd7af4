// src/training/optimizer_core.h - what the copies of a prepared optimizer share.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/grad_scaler.h"
#include "accelerate/gradient_state.h"

namespace accelerate::detail {

class Engine;
class LossScaling;

struct OptimizerCore {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  const torch::optim::Optimizer* moved_from = nullptr;
  /// That of the accelerator, with float16.
  std::shared_ptr<LossScaling> scaling = nullptr;
  GradientState gradient_state = {};
  bool step_was_skipped = false;
  /// The engines that are attached to it.
  std::vector<std::weak_ptr<Engine>> engines = {};
  /// Of an optimizer that has `train` and `eval`.
  std::function<void(torch::optim::Optimizer&, bool training)> modes = {};

  [[nodiscard]] bool has_gradients() const;
  /// Lets an engine replace parameters in the groups, once.
  void attach(const std::shared_ptr<Engine>& engine);
  /// Tells the engines of a step that was carried out.
  void tell_engines() const;
};

/// The factor on the loss, for all optimizers of an accelerator: it changes when all of them that
/// have gradients have stepped, so that none is divided by another factor than it was scaled with.
class LossScaling {
 public:
  explicit LossScaling(const GradScalerKwargs& options) : scaler_(options) {}

  [[nodiscard]] GradScaler& scaler() { return scaler_; }
  void add(const std::shared_ptr<OptimizerCore>& optimizer) { optimizers_.push_back(optimizer); }

  /// Also ends a round of steps that not every optimizer took part in.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  /// Once between two updates, and nothing for an optimizer without gradients.
  void unscale(OptimizerCore& optimizer);
  /// The step, unless a gradient is infinite or NaN: false then.
  bool step(OptimizerCore& optimizer);

 private:
  [[nodiscard]] bool all_have_stepped() const;
  void update();

  GradScaler scaler_;
  std::vector<std::weak_ptr<OptimizerCore>> optimizers_;
  std::vector<const OptimizerCore*> stepped_;
};

/// One step of the optimizer inside: fused where possible.
void carry_out_step(torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail
