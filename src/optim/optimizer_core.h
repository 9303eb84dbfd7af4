// src/optim/optimizer_core.h - the shared part of all handles to a prepared optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/grad_scaler.h"
#include "accelerate/state/gradient_state.h"

namespace accelerate::detail::parallel {
class Engine;
}  // namespace accelerate::detail::parallel

namespace accelerate::detail::optim {

class LossScaling;

struct ACCELERATE_API OptimizerCore {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  const torch::optim::Optimizer* moved_from = nullptr;
  /// The accelerator's, in float16; null otherwise.
  std::shared_ptr<LossScaling> scaling = nullptr;
  GradientState gradient_state = {};
  bool step_was_skipped = false;
  /// `backward` steps it and clears its gradients, with DeepSpeed: the program's calls do nothing.
  bool stepped_in_backward = false;
  /// The engines that are attached to it.
  std::vector<std::weak_ptr<parallel::Engine>> engines = {};
  /// Called before each step; empty for nothing.
  std::function<void(const torch::optim::Optimizer&)> before_step = {};
  /// Called after each step, also after one that was skipped; empty for nothing.
  std::function<void(const torch::optim::Optimizer&)> after_step = {};
  /// Calls `train` or `eval` of the optimizer; empty if it has neither.
  std::function<void(torch::optim::Optimizer&, bool training)> modes = {};

  /// One step as that of the handle, with the scaled gradients of float16 if there is a scaling.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  void zero_grad(bool set_to_none = true);
  [[nodiscard]] bool has_gradients() const;
  /// Lets an engine replace parameters in the groups, once.
  void attach(const std::shared_ptr<parallel::Engine>& engine);
  /// Those that still exist.
  void for_each_engine(const std::function<void(parallel::Engine&)>& f) const;
  /// Collective with engines that shard. Whether any process has found an infinite gradient.
  [[nodiscard]] at::Tensor found_inf_over_processes(at::Tensor found_inf) const;

 private:
  at::Tensor carry_out(const torch::optim::Optimizer::LossClosure& closure);
  /// Tells the engines of a step that was carried out.
  void tell_engines() const;
};

/// The loss scale of all optimizers of an accelerator. It changes after all optimizers with
/// gradients have stepped, so that each is unscaled with the factor that its loss was scaled with.
class ACCELERATE_API LossScaling {
 public:
  /// The factor of the next steps, after steps of which one found an infinite gradient, or none.
  using Rule = std::function<double(bool overflow)>;

  /// Without a rule the factor follows `options`.
  explicit LossScaling(const GradScalerKwargs& options, Rule rule = {})
      : scaler_(options), rule_(std::move(rule)) {}

  [[nodiscard]] GradScaler& scaler() { return scaler_; }
  void add(const std::shared_ptr<OptimizerCore>& optimizer) { optimizers_.push_back(optimizer); }

  /// Updates the factor first if some, but not all, optimizers have stepped since the last update.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  /// Unscales at most once between two updates, and agrees with the other processes on infinite
  /// gradients. Does nothing without gradients.
  void unscale(OptimizerCore& optimizer);
  /// Steps and returns true; skips the step and returns false if a gradient is infinite or NaN.
  bool step(OptimizerCore& optimizer);
  /// After a step was recorded: why its replays would not change the factor; empty if they do.
  [[nodiscard]] std::string why_not_replayed() const;

 private:
  [[nodiscard]] bool all_have_stepped() const;
  void update();

  GradScaler scaler_;
  Rule rule_;
  bool overflow_ = false;
  std::vector<std::weak_ptr<OptimizerCore>> optimizers_;
  std::vector<const OptimizerCore*> stepped_;
};

/// The shared part of a prepared optimizer. `moved_from` is its address before it was moved to the
/// heap, or null: schedulers may still refer to that address.
[[nodiscard]] ACCELERATE_API std::shared_ptr<OptimizerCore> make_optimizer_core(
    std::shared_ptr<torch::optim::Optimizer> optimizer,
    const torch::optim::Optimizer* moved_from = nullptr);

/// One step of `optimizer`, with fused kernels if possible.
void carry_out_step(torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail::optim
