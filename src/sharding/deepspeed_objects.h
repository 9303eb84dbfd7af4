// src/sharding/deepspeed_objects.h - the optimizer and the scheduler of a DeepSpeed configuration.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>

#include "accelerate/api.h"
#include "accelerate/scheduler/lr_scheduler.h"
#include "accelerate/sharding/deepspeed.h"
#include "core/deepspeed_auto.h"
#include "core/deepspeed_settings.h"

namespace accelerate::detail::sharding {

/// Adds what a model, an optimizer and a scheduler of ours (null for none) tell to `objects`.
ACCELERATE_API void describe(DeepSpeedObjects& objects, const torch::nn::Module* model,
                             const torch::optim::Optimizer* optimizer,
                             const LRScheduler* scheduler);

/// The optimizer of the configuration for the parameters of `dummy`. Throws `ConfigError` for a
/// type or a parameter that it does not have.
[[nodiscard]] ACCELERATE_API std::shared_ptr<torch::optim::Optimizer> make_optimizer(
    const DeepSpeedSettings& settings, const DummyOptim& dummy);

/// The scheduler of the configuration, or that of the callable of `dummy`, for `optimizer`. Throws
/// as `make_optimizer`.
[[nodiscard]] ACCELERATE_API std::shared_ptr<LRScheduler> make_scheduler(
    const DeepSpeedSettings& settings, const DummyScheduler& dummy,
    torch::optim::Optimizer& optimizer);

/// Throws `ConfigError` for an optimizer whose states cannot be moved to the host as the
/// configuration asks.
ACCELERATE_API void check_offloaded(const DeepSpeedSettings& settings,
                                    const torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail::sharding
