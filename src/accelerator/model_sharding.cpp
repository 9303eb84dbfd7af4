#include "accelerator/model_sharding.h"

#include "core/log.h"

namespace accelerate::detail::accelerator {
namespace {

sharding::ShardRun run_of(const AcceleratorCore& core) {
  const auto& state = core.state;
  sharding::ShardRun run{.mixed_precision = state.mixed_precision(),
                         .on_cpu = state.device().is_cpu(),
                         .num_processes = state.num_processes()};
  run.processes_per_node = state.local_num_processes().value_or(state.num_processes());
  if (const auto config = state.parallelism_config()) {
    // Those of the other dimensions keep parts of the model that are sharded each for itself.
    const auto sequence = config->cp_size.value_or(1) * config->sp_size.value_or(1);
    run.num_processes = config->data_parallel_size() * sequence;
    run.mesh = {.replicate = config->dp_replicate_size.value_or(1),
                .shard = config->dp_shard_size.value_or(1) * sequence};
    run.dp_shard_size = config->dp_shard_size.value_or(1);
  }
  return run;
}

}  // namespace

std::optional<sharding::ShardPlan> shard_plan_of(const AcceleratorCore& core,
                                                 const torch::nn::Module& module) {
  const auto& state = core.state;
  std::optional<sharding::ShardPlan> plan;
  if (const auto deepspeed = state.deepspeed_plugin()) {
    plan = sharding::plan_from(*deepspeed, module, run_of(core));
  } else if (state.distributed_type() == DistributedType::kFsdp && state.fsdp_plugin()) {
    plan = sharding::plan_from(*state.fsdp_plugin(), module, run_of(core));
  }
  if (!plan) return std::nullopt;
  for (const auto& warning : plan->warnings) warn_once(warning);
  for (const auto& note : plan->notes) info(note);
  return plan;
}

}  // namespace accelerate::detail::accelerator
