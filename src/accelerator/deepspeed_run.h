// src/accelerator/deepspeed_run.h - a run with DeepSpeed: one model, whose backward also steps.
//
// `prepare` fills the configuration from its arguments before it prepares any of them
// (`begin_deepspeed`) and makes the optimizer and the scheduler that the configuration names.
// `backward` steps the optimizers of the model (`step_in_backward`).
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "accelerate/detail/accelerator/prepare.h"
#include "accelerator/accelerator_core.h"
#include "core/deepspeed_settings.h"
#include "sharding/deepspeed_steps.h"

namespace accelerate {
class DummyOptim;
class DummyScheduler;
}  // namespace accelerate

namespace accelerate::detail::accelerator {

/// Made by the first call of `prepare` with a model that is trained.
struct DeepSpeedRun {
  explicit DeepSpeedRun(DeepSpeedSettings filled) : settings(std::move(filled)), steps(settings) {}

  DeepSpeedSettings settings;
  sharding::DeepSpeedSteps steps;
  /// The model whose optimizers `backward` steps.
  std::weak_ptr<ModelCore> model = {};
  /// The parameters of the model that an optimizer has.
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<optim::OptimizerCore>> stepped = {};
  /// Those that were made for dummies.
  std::vector<std::weak_ptr<optim::SchedulerCore>> schedulers = {};
};

[[nodiscard]] bool uses_deepspeed(const AcceleratorCore& core);

/// Fills what is "auto" in the configuration of the run, and sets the accumulation of gradients and
/// the loss scale as it says. Throws `ConfigError` and `ArgumentError` for objects that do not go
/// together with it, in Python's words.
void begin_deepspeed(AcceleratorCore& core, const PrepareObjects& objects);

/// Lets `backward` step the optimizer if it is of the model of the run. Before an engine replaces
/// its parameters.
void step_within_backward(const AcceleratorCore& core,
                          const std::shared_ptr<optim::OptimizerCore>& optimizer);

/// What an earlier call has made for the model of a dummy, since a configuration has one of each;
/// null if nothing. Throw `StateError` as those below.
[[nodiscard]] std::shared_ptr<optim::OptimizerCore> made_optimizer(const AcceleratorCore& core,
                                                                   const DummyOptim& dummy);
[[nodiscard]] std::shared_ptr<optim::SchedulerCore> made_scheduler(
    const AcceleratorCore& core, const DummyScheduler& dummy,
    const optim::OptimizerCore& optimizer);

/// What the configuration has for a dummy. Throw `StateError` if no model is prepared by it.
[[nodiscard]] std::shared_ptr<torch::optim::Optimizer> optimizer_for(const AcceleratorCore& core,
                                                                     const DummyOptim& dummy);
[[nodiscard]] std::shared_ptr<LRScheduler> scheduler_for(const AcceleratorCore& core,
                                                         const DummyScheduler& dummy,
                                                         torch::optim::Optimizer& optimizer);
/// Whether `backward` steps the scheduler: one that DeepSpeed knows.
[[nodiscard]] bool is_stepped_in_backward(const AcceleratorCore& core,
                                          const LRScheduler& scheduler);

/// Collective at the end of a batch. Clips, steps, clears gradients and steps the scheduler of the
/// configuration. Called after each backward of a run that has a `DeepSpeedRun`.
void step_in_backward(AcceleratorCore& core);

}  // namespace accelerate::detail::accelerator
