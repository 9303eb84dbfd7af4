#include "accelerator/model_engines.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerator/model_sharding.h"
#include "core/log.h"
#include "core/text.h"
#include "model_parallel/regions.h"
#include "model_parallel/tensor_parallel_engine.h"
#include "modeling/checkpoint_marks.h"
#include "parallel/data_parallel.h"
#include "parallel/wrapped_engine.h"
#include "sharding/sharded_engine.h"
#include "state/tensor_device.h"

namespace accelerate::detail::accelerator {
namespace {

using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

void check_dimensions(const DeviceMesh& mesh) {
  if (mesh.has("pp")) {
    throw UnsupportedError(
        str("prepare: pp_size of parallelism_config is ", mesh.size("pp"),
            ", but C++ cannot find the stages of a model by itself. Give prepare an "
            "accelerate::Pipeline (accelerate/parallel.h) of the model and its loss."));
  }
}

/// The processes that hold the same part of a model, each with gradients of its own: those of the
/// dimensions of data and, since each has a part of a sequence only, of cp or sp. Null if this
/// process is the only one.
GroupHandle data_group(const DeviceMesh& mesh) {
  for (const char* const name : {"dp_sp", "dp_cp", "dp_replicate"}) {
    if (mesh.has(name)) return mesh.get_group(name);
  }
  return nullptr;
}

/// Collective if the plan has replicas that the mesh does not have.
sharding::ShardProcesses processes_of(const AcceleratorCore& core,
                                      const sharding::ShardPlan& plan) {
  sharding::ShardProcesses processes;
  processes.all = core.mesh ? data_group(*core.mesh) : nullptr;
  // With DeepSpeed also whole models are sharded, over one process each.
  if (core.deepspeed && plan.groups.shard == 1) {
    processes.replicate = processes.all;
    return processes;
  }
  processes.shard = processes.all;
  const auto take = [&](const DeviceMesh& mesh, const char* shard) {
    processes.shard = mesh.get_group(shard);
    if (mesh.has("dp_replicate")) processes.replicate = mesh.get_group("dp_replicate");
  };
  if (core.mesh->has("dp_shard")) {
    take(*core.mesh, core.mesh->has("sp")   ? "dp_shard_sp"
                     : core.mesh->has("cp") ? "dp_shard_cp"
                                            : "dp_shard");
  } else if (plan.groups.replicate > 1) {
    take(DeviceMesh(
             core.mesh->device_type(),
             MeshLayout({"dp_replicate", "dp_shard"}, {plan.groups.replicate, plan.groups.shard})),
         "dp_shard");
  }
  return processes;
}

/// Collective. A model of which each process keeps a part.
std::shared_ptr<parallel::Engine> sharded_engine(const AcceleratorCore& core, ModelCore& model,
                                                 const sharding::ShardPlan& plan) {
  check_averaging_of_shards(core.ddp);
  const auto& precision = plan.spec.precision;
  if (precision.cast_forward_inputs) model.input_dtype = precision.param_dtype;
  if (!plan.autocast) {
    model.cast = std::nullopt;
    model.output_dtype = precision.output_dtype;
  }
  if (!plan.checkpointed.empty()) {
    modeling::mark_for_checkpoints(*model.module, plan.checkpointed);
  }
  auto engine = std::make_shared<sharding::ShardedEngine>(
      *model.module, plan.spec, processes_of(core, plan), model.device, core.options.drift_check);
  if (core.mesh && core.mesh->has("tp")) engine->keep_states(keeps_states(core));
  return engine;
}

/// What a plugin that only replicates asks for beside shards, for a model of data parallelism.
void follow_without_shards(const AcceleratorCore& core, torch::nn::Module& module,
                           const sharding::ShardPlan& plan) {
  if (!plan.checkpointed.empty()) modeling::mark_for_checkpoints(module, plan.checkpointed);
  constexpr const char* kWhy =
      " of the FSDP plugin has no effect: nothing is sharded (NO_SHARD, or a mesh without "
      "dp_shard_size). ";
  if (plan.spec.offload.parameters != sharding::OffloadTarget::kNone) {
    warn_once(str("cpu_offload", kWhy, "Choose FULL_SHARD, or leave it out."));
  }
  const auto& dtype = plan.spec.precision.param_dtype;
  const bool is_cast = core.cast ? core.cast->dtype == dtype : dtype == at::kFloat;
  if (dtype && !is_cast) {
    warn_once(str("mixed_precision_policy", kWhy, "Set mixed_precision of the accelerator."));
  }
}

/// Collective. The engine for the dimensions of data.
std::shared_ptr<parallel::Engine> data_engine(const AcceleratorCore& core, ModelCore& model,
                                              const std::optional<sharding::ShardPlan>& plan) {
  if (plan) return sharded_engine(core, model, *plan);
  const bool trains = std::ranges::any_of(
      model.module->parameters(), [](const at::Tensor& one) { return one.requires_grad(); });
  if (auto group = trains ? data_group(*core.mesh) : nullptr) {
    return std::make_shared<parallel::DataParallel>(*model.module, std::move(group), core.ddp,
                                                    core.options.drift_check);
  }
  return std::make_shared<parallel::LocalEngine>(*model.module);
}

}  // namespace

std::optional<sharding::ShardPlan> sharding_of(const AcceleratorCore& core,
                                               torch::nn::Module& module) {
  auto plan = shard_plan_of(core, module);
  // With "tp" alone no other process has the same part of the model.
  const bool alone = core.state.fsdp_plugin() && core.mesh && data_group(*core.mesh) == nullptr;
  if (plan && (alone || plan->spec.level == sharding::ShardLevel::kNone)) {
    if (core.state.fsdp_plugin()) follow_without_shards(core, module, *plan);
    return std::nullopt;
  }
  if (plan && core.state.fsdp_plugin()) {
    plan->spec.state_dict_type =
        core.state.fsdp_plugin()->state_dict_type.value_or(StateDictType::kFullStateDict);
  }
  if (plan || !core.mesh || !core.mesh->has("dp_shard")) return plan;
  plan.emplace();
  plan->autocast = true;
  plan->spec.level = sharding::ShardLevel::kParameters;
  plan->spec.skip_globally_unused = true;  // as data parallelism with find_unused_parameters
  for (const auto& entry : module.named_modules("", /*include_self=*/false)) {
    if (!is_repeated_blocks(*entry.value())) continue;
    for (const auto& block : entry.value()->named_children()) {
      plan->spec.units.push_back(entry.key() + "." + block.key());
    }
  }
  if (core.cast) {
    plan->spec.precision.param_dtype = core.cast->dtype;
    plan->spec.precision.reduce_dtype = at::kFloat;
    plan->spec.precision.float32_masters = true;
    plan->spec.precision.cast_forward_inputs = false;  // as data parallelism
  }
  return plan;
}

void check_averaging_of_shards(const DistributedDataParallelKwargs& options) {
  if (options.comm_hook != DDPCommunicationHookType::kNo) {
    throw ConfigError(
        str("comm_hook of DistributedDataParallelKwargs is '", options.comm_hook,
            "', but gradients of a sharded model are not compressed. Leave it out, or "
            "train by data parallelism. With an FSDP plugin, reduce_dtype of its "
            "mixed_precision_policy chooses a smaller type."));
  }
  // A sharded model lets each process have its own buffers and parameters unused, whatever
  // broadcast_buffers and find_unused_parameters are.
  const DistributedDataParallelKwargs defaults;
  const auto warn_of = [&](std::string_view field, auto DistributedDataParallelKwargs::* member) {
    if (options.*member == defaults.*member) return;
    warn_once(str(field,
                  " of DistributedDataParallelKwargs has no effect: the model is sharded, so "
                  "that its gradients are reduced unit by unit. Leave it out."));
  };
  warn_of("bucket_cap_mb", &DistributedDataParallelKwargs::bucket_cap_mb);
  warn_of("check_reduction", &DistributedDataParallelKwargs::check_reduction);
  warn_of("gradient_as_bucket_view", &DistributedDataParallelKwargs::gradient_as_bucket_view);
  warn_of("static_graph", &DistributedDataParallelKwargs::static_graph);
}

bool keeps_states(const AcceleratorCore& core) {
  auto keeps = at::full({}, core.state.is_local_main_process() ? 1.0F : 0.0F,
                        at::TensorOptions(state::tensor_device(core.state.device())));
  for (const char* const name : {"tp", "pp"}) {
    if (!core.mesh->has(name)) continue;
    model_parallel::all_reduce(keeps, core.mesh->get_group(name), "keepers of optimizer states",
                               c10d::ReduceOp::MAX);
  }
  return keeps.item<float>() > 0;
}

void give_engine(const AcceleratorCore& core, ModelCore& model,
                 const std::optional<sharding::ShardPlan>& plan) {
  // One process has none.
  const bool cuts_layers = core.mesh && core.mesh->has("tp");
  if (core.mesh) check_dimensions(*core.mesh);
  model.moves_inputs = !model.device.is_cpu();
  if (cuts_layers) model_parallel::take_rules_off(*model.module);
  auto engine = data_engine(core, model, plan);
  if (cuts_layers) {
    engine = std::make_shared<model_parallel::TensorParallelEngine>(
        std::move(engine), *model.module, core.mesh->get_group("tp"), data_group(*core.mesh),
        core.options.drift_check);
  }
  model.use(std::move(engine));
}

}  // namespace accelerate::detail::accelerator
