// src/sharding/shard_plan.h - what a front end makes of its plugin for one model.
//
//     const ShardPlan plan = plan_from(resolved_fsdp_plugin, *module, run);
//     engine(module, plan.spec, groups of plan.replicate x plan.shard processes)
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/kwargs/plugins.h"
#include "core/resolve.h"
#include "sharding/spec.h"

namespace accelerate::detail::sharding {

/// Rank = replica * shard + part: the processes of a shard group have consecutive ranks. Sizes of a
/// mesh with the dimensions dp_replicate and dp_shard.
struct ShardGroups {
  std::int64_t replicate = 1;
  std::int64_t shard = 1;

  [[nodiscard]] bool replicates_only() const { return shard == 1 && replicate > 1; }

  bool operator==(const ShardGroups&) const = default;
};

/// The run that a model is sharded for.
struct ShardRun {
  PrecisionType mixed_precision = PrecisionType::kNo;
  bool on_cpu = true;
  std::int64_t num_processes = 1;
  std::int64_t processes_per_node = 1;
  /// Of the parallelism_config; nullopt without one.
  std::optional<ShardGroups> mesh = std::nullopt;
  /// dp_shard_size of it; also the processes of cp and sp share a model in parts.
  std::int64_t dp_shard_size = 1;
};

struct ShardPlan {
  ShardSpec spec = {};
  ShardGroups groups = {};
  /// The model runs under autocast and returns float32, as one that is not sharded.
  bool autocast = false;
  /// Modules whose activations are computed again in backward, by name.
  std::vector<std::string> checkpointed = {};
  /// Lines for the log of the main process, once: what the user should know, and what was mapped.
  Warnings warnings = {};
  Warnings notes = {};
};

/// Of resolved plugins. Throw `ConfigError` for a plugin that does not fit the model or the run.
[[nodiscard]] ACCELERATE_API ShardPlan plan_from(const FullyShardedDataParallelPlugin& plugin,
                                                 const torch::nn::Module& model,
                                                 const ShardRun& run);
/// After `fill_deepspeed_config`.
[[nodiscard]] ACCELERATE_API ShardPlan plan_from(const DeepSpeedPlugin& plugin,
                                                 const torch::nn::Module& model,
                                                 const ShardRun& run);

/// Groups of `shard` processes each. Throws `ConfigError` that contains `name` if the processes of
/// the run do not fit.
[[nodiscard]] ShardGroups groups_of(std::string_view name, std::int64_t shard, const ShardRun& run);

/// The type, unless it is float16 on the CPU, which does not train in it.
[[nodiscard]] std::optional<at::ScalarType> compute_dtype(std::optional<FloatType> type,
                                                          const ShardRun& run);

}  // namespace accelerate::detail::sharding
