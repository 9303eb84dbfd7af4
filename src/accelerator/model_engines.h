// src/accelerator/model_engines.h - the engine that a prepared model gets, by the mesh of the run.
//
// An engine for the dimensions of data is always there: data parallelism, sharding, or that of one
// process. Dimensions that divide the model itself wrap it (parallel/wrapped_engine.h).
#pragma once

#include <torch/nn/module.h>

#include <optional>

#include "accelerator/accelerator_core.h"
#include "sharding/shard_plan.h"

namespace accelerate::detail::accelerator {

/// How the model is sharded, by a plugin or by dp_shard_size; nullopt if it is not. A plugin that
/// shards nothing still marks what is computed again in backward.
[[nodiscard]] std::optional<sharding::ShardPlan> sharding_of(const AcceleratorCore& core,
                                                             torch::nn::Module& module);

/// Collective. Whether this process keeps optimizer states that are gathered over the dimensions of
/// data: if the first process of a host needs them, to put them together over "tp" and "pp".
[[nodiscard]] bool keeps_states(const AcceleratorCore& core);

/// Of the options for averaging gradients, for a model whose gradients are sharded: warns of those
/// without effect, and throws `ConfigError` if they compress.
void check_averaging_of_shards(const DistributedDataParallelKwargs& options);

/// Collective. Gives the model the engine that trains it on all processes. Throws
/// `UnsupportedError` for a dimension of the mesh in which this version cannot train a model.
void give_engine(const AcceleratorCore& core, ModelCore& model,
                 const std::optional<sharding::ShardPlan>& plan);

}  // namespace accelerate::detail::accelerator
