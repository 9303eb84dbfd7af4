// src/accelerator/model_sharding.h - how the plugins of a run shard a model.
#pragma once

#include <torch/nn/module.h>

#include <optional>

#include "accelerator/accelerator_core.h"
#include "sharding/shard_plan.h"

namespace accelerate::detail::accelerator {

/// What the FSDP or DeepSpeed plugin of the run asks for; nullopt for a run with neither. Logs the
/// notes of the plan. Throws `ConfigError` for a plugin that does not fit the model or the run.
[[nodiscard]] std::optional<sharding::ShardPlan> shard_plan_of(const AcceleratorCore& core,
                                                               const torch::nn::Module& module);

}  // namespace accelerate::detail::accelerator
