// A DeepSpeed configuration as what the sharded engine is asked for.
#include <algorithm>
#include <filesystem>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/sharding/deepspeed.h"
#include "core/deepspeed_settings.h"
#include "core/text.h"
#include "sharding/shard_plan.h"
#include "sharding/unit_policy.h"

namespace accelerate::detail::sharding {
namespace {

using torch::nn::Module;

OffloadTarget target_of(const std::string& device, std::string_view key) {
  if (device == "none") return OffloadTarget::kNone;
  if (device == "cpu") return OffloadTarget::kCpu;
  if (device == "nvme") return OffloadTarget::kNvme;
  throw ConfigError(str("'", key, "' in the DeepSpeed configuration is '", device,
                        "'. Choose one of: none, cpu, nvme."));
}

std::filesystem::path folder_of(const std::optional<std::string>& path, std::string_view key) {
  std::error_code error;
  if (path && std::filesystem::is_directory(*path, error)) return *path;
  throw ConfigError(str("'", key, "' in the DeepSpeed configuration is ",
                        path ? str("'", *path, "', which is no folder") : "not set",
                        ". Name a folder on the drive."));
}

ShardOffload offload_of(const DeepSpeedSettings& settings, Warnings& warnings) {
  ShardOffload offload;
  offload.optimizer =
      target_of(settings.optimizer_device, "zero_optimization.offload_optimizer.device");
  offload.parameters = target_of(settings.param_device, "zero_optimization.offload_param.device");
  if (offload.parameters != OffloadTarget::kNone && settings.stage != 3) {
    // As with DeepSpeed. `accelerate config` asks for it from stage 2 on.
    warnings.push_back(str("The DeepSpeed configuration has offload_param, which has no effect ",
                           "below stage 3: its stage is ", settings.stage,
                           ", where each process computes with whole parameters. Use stage 3, or ",
                           "offload_optimizer alone."));
    offload.parameters = OffloadTarget::kNone;
  }
  if (offload.optimizer != OffloadTarget::kNone && settings.stage == 0) {
    throw ConfigError(
        "The DeepSpeed configuration has offload_optimizer, but its stage is 0, which shards "
        "nothing. Use stage 1, 2 or 3.");
  }
  // Parameters that wait elsewhere have their states there too.
  if (offload.optimizer == OffloadTarget::kNone) offload.optimizer = offload.parameters;
  offload.pin_memory = settings.optimizer_pin_memory || settings.param_pin_memory;
  if (settings.optimizer_device == "nvme") {
    offload.folder =
        folder_of(settings.optimizer_path, "zero_optimization.offload_optimizer.nvme_path");
  }
  if (offload.parameters == OffloadTarget::kNvme) {
    offload.states_folder =
        std::exchange(offload.folder,
                      folder_of(settings.param_path, "zero_optimization.offload_param.nvme_path"));
  }
  return offload;
}

/// Groups of a size that a key has.
ShardGroups groups_of_key(std::string_view key, std::int64_t size, const ShardRun& run) {
  if (run.dp_shard_size > 1) {
    throw ConfigError(str("'", key, "' in the DeepSpeed configuration is ", size,
                          ", and dp_shard_size of parallelism_config is ", run.dp_shard_size,
                          ": both say which processes share a model. Leave one of them out."));
  }
  return groups_of(key, size, run);
}

ShardGroups groups_of(const DeepSpeedSettings& settings, const ShardRun& run) {
  if (settings.stage == 0) return {.replicate = run.num_processes};
  if (settings.hpz_partition_size > 1) {
    return groups_of_key("zero_optimization.zero_hpz_partition_size", settings.hpz_partition_size,
                         run);
  }
  if (settings.mics_shard_size > 1) {
    return groups_of_key("zero_optimization.mics_shard_size", settings.mics_shard_size, run);
  }
  return run.mesh.value_or(ShardGroups{.shard = run.num_processes});
}

/// A name of DeepSpeed's: fp32, fp16, bf16.
std::optional<at::ScalarType> communication_type(const DeepSpeedSettings& settings,
                                                 const ShardRun& run) {
  const auto& text = settings.communication_data_type;
  if (!text) return std::nullopt;
  return compute_dtype(from_string<FloatType>(*text, "communication_data_type"), run);
}

/// One unit is gathered ahead, unless two of the largest would exceed the limit.
std::int64_t prefetch_of(const DeepSpeedSettings& settings, const Module& model,
                         const UnitNames& units) {
  return 2 * largest_elements(model, units) <= settings.max_live_parameters ? 1 : 0;
}

/// Whether whole models, averaged as data parallelism does it, do all that the settings ask for.
bool is_plain(const DeepSpeedSettings& settings, const ShardRun& run) {
  return settings.stage == 0 && run.num_processes > 1 && !settings.fp16 && !settings.bf16 &&
         !settings.prescale_gradients && settings.gradient_predivide_factor == 1 &&
         !settings.communication_data_type && settings.overlap_comm;
}

/// DeepSpeed casts the whole module, buffers too.
void set_precision(ShardPrecision& precision, const DeepSpeedSettings& settings,
                   const ShardRun& run) {
  if (settings.fp16) precision.param_dtype = compute_dtype(FloatType::kFp16, run);
  if (settings.bf16) precision.param_dtype = compute_dtype(FloatType::kBf16, run);
  precision.buffer_dtype = precision.param_dtype;
  precision.cast_forward_inputs = !settings.fp16 || settings.fp16_auto_cast;
  precision.reduce_dtype = communication_type(settings, run);
  precision.float32_masters = true;
}

void set_reductions(ShardSpec& spec, const DeepSpeedSettings& settings, const ShardRun& run) {
  spec.overlap_reductions = settings.overlap_comm;
  // DeepSpeed takes the factor for sums that are divided afterwards.
  if (settings.prescale_gradients) {
    spec.divide_before = static_cast<double>(run.num_processes);
  } else if (settings.gradient_predivide_factor != 1) {
    spec.divide_before = settings.gradient_predivide_factor;
  }
}

}  // namespace

ShardPlan plan_from(const DeepSpeedPlugin& plugin, const Module& model, const ShardRun& run) {
  const DeepSpeedSettings settings = deepspeed_settings(plugin.deepspeed_config());
  ShardPlan plan;
  plan.notes = settings.notes;
  plan.groups = groups_of(settings, run);
  auto& spec = plan.spec;
  // Shards of one process each are whole.
  spec.level = is_plain(settings, run) ? ShardLevel::kNone
                                       : static_cast<ShardLevel>(std::max<int>(1, settings.stage));
  spec.accumulate_unsharded = settings.stage < 2;
  const bool stage_3 = settings.stage == 3;
  const auto leaves = set_moe_leaf_modules(plugin, model);
  spec.units = units_by_bucket(
      model, stage_3 ? settings.prefetch_bucket_size : settings.reduce_bucket_size, leaves);
  if (stage_3) spec.keep_gathered_below = settings.param_persistence_threshold;
  const auto prefetch = prefetch_of(settings, model, spec.units);
  spec.forward_prefetch = prefetch;
  spec.backward_prefetch = prefetch;
  spec.offload = offload_of(settings, plan.warnings);
  set_precision(spec.precision, settings, run);
  if (settings.communication_data_type == "fp16" && run.on_cpu) {
    plan.warnings.emplace_back(
        "communication_data_type of the DeepSpeed configuration is fp16, in which a CPU does not "
        "reduce: gradients are reduced in the type that the model computes in. Use bf16 or fp32.");
  }
  set_reductions(spec, settings, run);
  spec.state_dict_type = StateDictType::kShardedStateDict;
  spec.deepspeed_names = true;
  spec.whole_state =
      stage_3 && !settings.gather_16bit_weights ? WholeState::kRefused : WholeState::kComputeTypes;
  if (settings.dump_state) {
    plan.notes.push_back(str("DeepSpeed configuration: ", Value(plugin.deepspeed_config()).repr()));
  }
  return plan;
}

}  // namespace accelerate::detail::sharding
