// FullyShardedDataParallelPlugin, versions 1 and 2, as what the sharded engine is asked for.
#include <torch/nn/module.h>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "core/text.h"
#include "sharding/shard_plan.h"
#include "sharding/unit_policy.h"

namespace accelerate::detail::sharding {
namespace {

using Fsdp = FullyShardedDataParallelPlugin;
using torch::nn::Module;

std::int64_t version_of(const Fsdp& plugin) { return plugin.fsdp_version.value_or(1); }

/// What a strategy of version 1 shards.
struct Strategy {
  ShardLevel level = ShardLevel::kParameters;
  bool reshard = true;
  bool within_node = false;
};

Strategy strategy_of(const Fsdp& plugin) {
  if (version_of(plugin) == 2) {
    const auto* reshard = std::get_if<bool>(&*plugin.reshard_after_forward);
    return {.reshard = reshard == nullptr || *reshard};
  }
  switch (plugin.sharding_strategy.value_or(ShardingStrategy::kFullShard)) {
    case ShardingStrategy::kNoShard:
      return {.level = ShardLevel::kNone};
    case ShardingStrategy::kShardGradOp:
      return {.reshard = false};
    case ShardingStrategy::kHybridShard:
      return {.within_node = true};
    case ShardingStrategy::kHybridShardZero2:
      return {.reshard = false, .within_node = true};
    case ShardingStrategy::kFullShard:
      break;
  }
  return {};
}

ShardGroups groups_of(const Fsdp& plugin, const Strategy& strategy, const ShardRun& run) {
  if (strategy.level == ShardLevel::kNone) return {.replicate = run.num_processes};
  if (run.mesh) return *run.mesh;
  if (!strategy.within_node) return {.shard = run.num_processes};
  return groups_of(str("sharding_strategy ", *plugin.sharding_strategy, ": a node"),
                   run.processes_per_node, run);
}

std::vector<std::string> classes_of(const Fsdp& plugin, const Module& model, Warnings& warnings) {
  if (plugin.transformer_cls_names_to_wrap) return *plugin.transformer_cls_names_to_wrap;
  if (const auto* told = dynamic_cast<const NoSplitModules*>(&model)) {
    return told->no_split_modules();
  }
  warnings.emplace_back(
      "auto_wrap_policy is TRANSFORMER_BASED_WRAP, but transformer_cls_names_to_wrap is not set "
      "and the model names no classes (it is no NoSplitModules): the whole model is gathered at "
      "once.");
  return {};
}

UnitNames units_of(const Fsdp& plugin, const Module& model, const UnitNames& ignored,
                   Warnings& warnings) {
  using Predicate = Callback<bool(const Module&)>;
  if (!plugin.auto_wrap_policy) return {};
  if (const auto* chosen = std::get_if<Predicate>(&*plugin.auto_wrap_policy)) {
    return units_by_predicate(model, [&](const Module& module) { return (*chosen)(module); });
  }
  switch (std::get<AutoWrapPolicy>(*plugin.auto_wrap_policy)) {
    case AutoWrapPolicy::kTransformerBasedWrap:
      return units_by_class(model, classes_of(plugin, model, warnings));
    case AutoWrapPolicy::kSizeBasedWrap:
      return version_of(plugin) == 1
                 ? units_by_remaining_size(model, plugin.min_num_params.value_or(0), ignored)
                 : units_by_total_size(model, plugin.min_num_params.value_or(0));
    case AutoWrapPolicy::kNoWrap:
      break;
  }
  return {};
}

void set_precision(ShardPlan& plan, const Fsdp& plugin, const Module& model, const ShardRun& run) {
  auto& precision = plan.spec.precision;
  if (const auto* policy = plugin.policy()) {
    precision.param_dtype = compute_dtype(policy->param_dtype, run);
    precision.reduce_dtype = compute_dtype(policy->reduce_dtype, run);
    precision.buffer_dtype = compute_dtype(policy->buffer_dtype, run);
    precision.output_dtype = compute_dtype(policy->output_dtype, run);
    const auto is_fp16 = [](const auto& type) { return type == FloatType::kFp16; };
    if (run.on_cpu && (is_fp16(policy->param_dtype) || is_fp16(policy->reduce_dtype) ||
                       is_fp16(policy->buffer_dtype) || is_fp16(policy->output_dtype))) {
      plan.warnings.emplace_back(
          "mixed_precision_policy has fp16, which a CPU does not train in: these types stay as "
          "they are. Use bf16 for mixed precision on a CPU.");
    }
  }
  // Parity: gradients of 16 bits are the default of FSDP, not of data parallelism.
  const auto reduced = precision.reduce_dtype ? precision.reduce_dtype : precision.param_dtype;
  if (reduced && c10::elementSize(*reduced) < 4) {
    plan.notes.push_back(str("FSDP reduces gradients in ", c10::toString(*reduced),
                             ". Set reduce_dtype of the mixed_precision_policy to fp32 to reduce "
                             "them in float32, as data parallelism does."));
  }
  if (run.mixed_precision == PrecisionType::kNo) return;
  precision.float32_masters = true;
  std::vector<std::string> upcast;
  for (const auto& parameter : model.named_parameters()) {
    const auto& tensor = parameter.value();
    if (tensor.requires_grad() && tensor.is_floating_point() &&
        tensor.scalar_type() != at::kFloat) {
      upcast.push_back(parameter.key());
    }
  }
  if (upcast.empty()) return;
  plan.warnings.push_back(
      str("FSDP upcast of low precision parameters to fp32 (since mixed_precision "
          "!= 'no') may affect the precision of model checkpoints. This ",
          "affects ", upcast.size(), " parameters: ", join(upcast), "."));
}

/// Whole state dictionaries are in one place only.
void check_state_dict_configs(const Fsdp& plugin, Warnings& warnings) {
  const bool is_whole = plugin.state_dict_type == StateDictType::kFullStateDict;
  const auto check = [&](const char* field, const std::optional<StateDictConfig>& config) {
    if (!config || (config->offload_to_cpu && config->rank0_only == is_whole)) return;
    warnings.push_back(str(field, " has no effect: whole state dictionaries are in the host's ",
                           "memory of the first process of each host, and shards stay where they ",
                           "are. Leave it unset."));
  };
  check("state_dict_config", plugin.state_dict_config);
  check("optim_state_dict_config", plugin.optim_state_dict_config);
}

void set_prefetch(ShardSpec& spec, const Fsdp& plugin) {
  spec.limit_gathers = plugin.limit_all_gathers;
  if (version_of(plugin) == 2) {
    spec.forward_prefetch = plugin.forward_prefetch.value_or(true) ? 1 : 0;
    return;
  }
  spec.forward_prefetch = plugin.forward_prefetch.value_or(false) ? 1 : 0;
  spec.backward_prefetch = plugin.backward_prefetch ? 1 : 0;
  spec.prefetch_after_gradients = plugin.backward_prefetch == BackwardPrefetch::kBackwardPost;
}

}  // namespace

ShardGroups groups_of(std::string_view name, std::int64_t shard, const ShardRun& run) {
  if (shard >= 1 && run.num_processes % shard == 0) {
    return {.replicate = run.num_processes / shard, .shard = shard};
  }
  throw ConfigError(str(name, " has ", shard, " processes, which does not divide the ",
                        run.num_processes, " processes of the run: each needs as many."));
}

std::optional<at::ScalarType> compute_dtype(std::optional<FloatType> type, const ShardRun& run) {
  if (!type || (*type == FloatType::kFp16 && run.on_cpu)) return std::nullopt;
  return *type == FloatType::kFp16   ? at::kHalf
         : *type == FloatType::kBf16 ? at::kBFloat16
                                     : at::kFloat;
}

ShardPlan plan_from(const Fsdp& plugin, const Module& model, const ShardRun& run) {
  ShardPlan plan;
  auto& spec = plan.spec;
  const Strategy strategy = strategy_of(plugin);
  plan.groups = groups_of(plugin, strategy, run);
  spec.level = plan.groups.replicates_only() ? ShardLevel::kNone : strategy.level;
  spec.reshard_after_forward = strategy.reshard;
  if (plugin.ignored_modules) spec.ignored = ignored_modules(model, *plugin.ignored_modules);
  spec.units = outside_of(spec.ignored, units_of(plugin, model, spec.ignored, plan.warnings));
  set_prefetch(spec, plugin);
  set_precision(plan, plugin, model, run);
  if (plugin.cpu_offload && plugin.cpu_offload->offload_params) {
    spec.offload.parameters = OffloadTarget::kCpu;
    spec.offload.optimizer = OffloadTarget::kCpu;
    spec.offload.pin_memory = plugin.cpu_offload->pin_memory;
  }
  check_state_dict_configs(plugin, plan.warnings);
  if (plugin.param_init_fn) {
    spec.init_empty = [init = plugin.param_init_fn](Module& module) { init(module); };
  }
  // As each version does: one reduces whole flat parameters, two leaves out what has no gradient.
  spec.skip_globally_unused = version_of(plugin) == 2;
  // Version 2 casts inputs and outputs by its policy alone.
  plan.autocast = version_of(plugin) == 1;
  if (plugin.activation_checkpointing.value_or(false)) {
    plan.checkpointed = spec.units;
    if (spec.units.empty()) {
      plan.warnings.emplace_back(
          "activation_checkpointing has no effect: it is for the units of the model, and "
          "auto_wrap_policy makes none. Choose TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP.");
    }
  }
  return plan;
}

}  // namespace accelerate::detail::sharding

namespace accelerate {

void FullyShardedDataParallelPlugin::set_auto_wrap_policy(const torch::nn::Module& model) {
  const auto* const chosen =
      auto_wrap_policy ? std::get_if<AutoWrapPolicy>(&*auto_wrap_policy) : nullptr;
  const auto policy = chosen != nullptr ? *chosen : AutoWrapPolicy::kNoWrap;
  if (policy == AutoWrapPolicy::kSizeBasedWrap && min_num_params.value_or(0) == 0) {
    auto_wrap_policy = AutoWrapPolicy::kNoWrap;
  }
  if (policy != AutoWrapPolicy::kTransformerBasedWrap) return;
  if (!transformer_cls_names_to_wrap) {
    const auto* const told = dynamic_cast<const NoSplitModules*>(&model);
    transformer_cls_names_to_wrap =
        told != nullptr ? told->no_split_modules() : std::vector<std::string>();
  }
  static_cast<void>(detail::sharding::units_by_class(model, *transformer_cls_names_to_wrap));
}

}  // namespace accelerate
