// src/sharding/spec.h - what the front ends (FSDP, DeepSpeed, ParallelismConfig) ask the engine
// for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/enums.h"

namespace accelerate::detail::sharding {

/// What a process keeps a part of only; each level includes the ones before. ZeRO's stages.
enum class ShardLevel : std::uint8_t { kNone, kOptimizer, kGradients, kParameters };

enum class OffloadTarget : std::uint8_t { kNone, kCpu, kNvme };

/// What `state_dict` of a sharded model returns.
enum class WholeState : std::uint8_t {
  kMasters,
  kComputeTypes,  // what the model computes in
  kRefused        // it throws: the configuration does not allow to gather weights
};

/// The types of a model. What is unset stays as it is.
struct ShardPrecision {
  /// What parameters are gathered as and compute in. The masters, which the optimizer steps on,
  /// keep their own type.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// What gradients are reduced in. Unset: `param_dtype`.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  bool cast_forward_inputs = true;
  /// The masters of trained parameters are float32, whatever the model was built with.
  bool float32_masters = false;
};

/// Where shards are while nothing computes with them.
struct ShardOffload {
  OffloadTarget parameters = OffloadTarget::kNone;
  OffloadTarget optimizer = OffloadTarget::kNone;
  bool pin_memory = true;
  /// For `kNvme`.
  std::filesystem::path folder = {};
  /// For the states of optimizers. Empty: `folder`.
  std::filesystem::path states_folder = {};
};

struct ShardSpec {
  ShardLevel level = ShardLevel::kNone;
  /// Of level `kParameters`: a unit is released after its forward and gathered again for backward.
  bool reshard_after_forward = true;
  /// Backward passes that do not synchronize keep whole gradients; otherwise each is reduced.
  bool accumulate_unsharded = true;
  /// How many units are gathered ahead of their use.
  std::int64_t forward_prefetch = 1;
  std::int64_t backward_prefetch = 1;
  /// In backward the next unit is gathered when the gradients of a unit are complete; false: when
  /// its backward begins.
  bool prefetch_after_gradients = false;
  /// At most two gathers are under way.
  bool limit_gathers = true;
  /// Reductions run while backward goes on.
  bool overlap_reductions = true;
  /// Gradients are divided by it before they are summed over processes, and by the rest after; 0:
  /// as suits their type.
  double divide_before = 0;
  /// Parameters with fewer elements stay gathered.
  std::int64_t keep_gathered_below = 0;
  /// A parameter that no process used keeps no gradient, instead of zeros.
  bool skip_globally_unused = false;
  ShardPrecision precision = {};
  ShardOffload offload = {};
  /// The modules that are gathered together, by name, "" for the root, which is always one. A
  /// parameter belongs to the deepest of them.
  std::vector<std::string> units = {};
  /// Modules whose parameters stay whole; their gradients are averaged.
  std::vector<std::string> ignored = {};
  /// In which files `save_state` puts the model and its optimizers.
  StateDictType state_dict_type = StateDictType::kFullStateDict;
  /// Its folders have the names of DeepSpeed.
  bool deepspeed_names = false;
  WholeState whole_state = WholeState::kMasters;
  /// Gives a module on the meta device memory. Unset: empty tensors.
  std::function<void(torch::nn::Module&)> init_empty = {};
};

}  // namespace accelerate::detail::sharding
