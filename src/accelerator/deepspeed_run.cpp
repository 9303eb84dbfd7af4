#include "accelerator/deepspeed_run.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/scheduler/deepspeed_schedulers.h"
#include "accelerate/sharding/deepspeed.h"
#include "accelerator/model_registry.h"
#include "core/deepspeed_auto.h"
#include "core/log.h"
#include "core/text.h"
#include "optim/clip_grad.h"
#include "sharding/deepspeed_objects.h"

namespace accelerate::detail::accelerator {
namespace {

using optim::OptimizerCore;

std::int64_t processes_per_batch(const AcceleratorCore& core) {
  const auto config = core.state.parallelism_config();
  return config ? config->non_data_parallel_size() : 1;
}

/// What the configuration is filled from.
DeepSpeedObjects described(const AcceleratorCore& core, const PrepareObjects& given) {
  DeepSpeedObjects objects{.batch_sizes = given.batch_sizes,
                           .split_batches = core.options.dataloader_config.split_batches,
                           .num_processes = core.state.num_processes(),
                           .processes_per_batch = processes_per_batch(core),
                           .gradient_accumulation_steps = core.num_steps()};
  if (objects.batch_sizes.empty()) {
    // Parity: Python asks for a loader in the same call.
    for (const auto& loader : core.registry.loaders) {
      objects.batch_sizes.push_back(loader->batch_size());
    }
  }
  const auto* optimizer = given.optimizers.empty() ? nullptr : given.optimizers.back();
  const auto* scheduler = given.schedulers.empty() ? nullptr : given.schedulers.back();
  const auto* model = given.models.empty() ? nullptr : given.models.front().get();
  sharding::describe(objects, model, optimizer, scheduler);
  // One of LibTorch.
  if (scheduler == nullptr && !given.schedulers.empty()) objects.scheduler = GivenObject::kReal;
  return objects;
}

std::shared_ptr<ModelCore> model_of(const AcceleratorCore& core) {
  return core.deepspeed ? core.deepspeed->model.lock() : nullptr;
}

const DeepSpeedRun& run_of(const AcceleratorCore& core, const char* dummy) {
  if (core.deepspeed) return *core.deepspeed;
  throw StateError(str("prepare: a ", dummy, " stands for what a DeepSpeed configuration has. ",
                       uses_deepspeed(core)
                           ? str("Prepare it together with its model.")
                           : str("This run does not use DeepSpeed: give prepare a real one.")));
}

/// Those that `backward` steps.
std::vector<std::shared_ptr<OptimizerCore>> own_optimizers(const AcceleratorCore& core) {
  std::vector<std::shared_ptr<OptimizerCore>> own;
  std::ranges::copy_if(core.registry.optimizers, std::back_inserter(own),
                       [](const auto& one) { return one->stepped_in_backward; });
  return own;
}

/// Only those with gradients, as a GradScaler wants it. All processes have the same ones.
bool step_all(const std::vector<std::shared_ptr<OptimizerCore>>& optimizers) {
  bool all = true;
  for (const auto& optimizer : optimizers) {
    if (!optimizer->has_gradients()) continue;
    optimizer->step();
    all = all && !optimizer->step_was_skipped;
  }
  return all;
}

void clear_gradients(const std::vector<std::shared_ptr<OptimizerCore>>& optimizers,
                     const ModelCore& model) {
  for (const auto& optimizer : optimizers) optimizer->zero_grad();
  // Also of parameters that no optimizer has.
  for (const auto& parameter : model.module->parameters()) parameter.mutable_grad().reset();
}

/// One step, whatever the number of processes: the steps in a configuration are those of the run.
void step_schedulers(const AcceleratorCore& core) {
  const optim::PreparedStep prepared;
  for (const auto& scheduler : core.registry.schedulers) {
    if (!scheduler->stepped_in_backward) continue;
    const auto* const ours = scheduler->parts.ours;
    const auto total = ours->total_steps();
    if (!total || ours->last_epoch() < *total) scheduler->parts.step();
  }
}

}  // namespace

bool uses_deepspeed(const AcceleratorCore& core) {
  return core.state.distributed_type() == DistributedType::kDeepspeed;
}

void begin_deepspeed(AcceleratorCore& core, const PrepareObjects& given) {
  if (given.models.size() > 1) {
    throw ArgumentError(
        "You can't use same `Accelerator()` instance with multiple models when using DeepSpeed: "
        "backward steps the optimizer of one model. Prepare each with an `Accelerator` of its "
        "own.");
  }
  const auto plugin = core.state.deepspeed_plugin();
  const auto objects = described(core, given);
  if (given.models.empty()) return check_optimizer_and_scheduler(*plugin, objects);
  Warnings warnings;
  const auto steps = fill_deepspeed_config(*plugin, objects, warnings);
  core.gradient_state.set_num_steps(steps);
  core.deepspeed_num_steps = steps;
  for (const auto& warning : warnings) warn(warning);
  if (model_of(core)) {
    return warn_once(
        "A DeepSpeed model is tied to this `Accelerator()` already: backward steps its optimizer "
        "only. To train another model in the same way create a separate `Accelerator()` and "
        "prepare it there.");
  }
  auto settings = deepspeed_settings(plugin->deepspeed_config());
  derive_batch_sizes(settings, objects.data_parallel_size());
  const bool on_cpu = core.state.device().is_cpu();
  if (settings.fp16 && on_cpu) {
    warn_once(
        "The DeepSpeed configuration enables fp16, which a CPU does not train in: all is computed "
        "in float32. Use bf16 for mixed precision on a CPU.");
  }
  auto [scaling, state] = sharding::loss_scaling(settings, on_cpu);
  core.registry.scaling = std::move(scaling);
  core.registry.scaling_state = std::move(state);
  core.deepspeed = std::make_shared<DeepSpeedRun>(std::move(settings));
}

void step_within_backward(const AcceleratorCore& core,
                          const std::shared_ptr<OptimizerCore>& optimizer) {
  const auto model = model_of(core);
  if (!model || optimizer->stepped_in_backward) return;
  std::unordered_set<const c10::TensorImpl*> own;
  for (const auto& parameter : model->module->parameters()) {
    own.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& group : optimizer->optimizer->param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!own.contains(parameter.unsafeGetTensorImpl())) continue;
      core.deepspeed->stepped[parameter.unsafeGetTensorImpl()] = optimizer;
      optimizer->stepped_in_backward = true;
    }
  }
  if (!optimizer->stepped_in_backward) return;
  sharding::check_offloaded(core.deepspeed->settings, *optimizer->optimizer);
}

std::shared_ptr<OptimizerCore> made_optimizer(const AcceleratorCore& core,
                                              const DummyOptim& dummy) {
  const auto& stepped = run_of(core, "DummyOptim").stepped;
  for (const auto& group : dummy.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto found = stepped.find(parameter.unsafeGetTensorImpl());
      if (found == stepped.end()) continue;
      if (auto made = found->second.lock()) return made;
    }
  }
  return nullptr;
}

std::shared_ptr<torch::optim::Optimizer> optimizer_for(const AcceleratorCore& core,
                                                       const DummyOptim& dummy) {
  return sharding::make_optimizer(run_of(core, "DummyOptim").settings, dummy);
}

std::shared_ptr<optim::SchedulerCore> made_scheduler(const AcceleratorCore& core,
                                                     const DummyScheduler& dummy,
                                                     const OptimizerCore& optimizer) {
  const auto& run = run_of(core, "DummyScheduler");
  for (const auto& one : run.schedulers) {
    auto made = one.lock();
    const bool is_its = made && std::ranges::any_of(made->optimizers, [&](const auto& its) {
                          return its.get() == &optimizer;
                        });
    if (!is_its) continue;
    if (dummy.options().lr_scheduler_callable && run.settings.scheduler_type) {
      throw StateError(
          "prepare: the scheduler of the DeepSpeed configuration is made already, so that the "
          "lr_scheduler_callable of this DummyScheduler would have no effect. Prepare it in the "
          "same call as its model, or take 'scheduler' out of the configuration.");
    }
    return made;
  }
  return nullptr;
}

std::shared_ptr<LRScheduler> scheduler_for(const AcceleratorCore& core, const DummyScheduler& dummy,
                                           torch::optim::Optimizer& optimizer) {
  return sharding::make_scheduler(run_of(core, "DummyScheduler").settings, dummy, optimizer);
}

bool is_stepped_in_backward(const AcceleratorCore& core, const LRScheduler& scheduler) {
  const auto is_any = [&]<class... Types>(std::type_identity<Types>...) {
    return ((dynamic_cast<const Types*>(&scheduler) != nullptr) || ...);
  };
  using std::type_identity;
  return core.deepspeed && is_any(type_identity<WarmupLR>(), type_identity<WarmupDecayLR>(),
                                  type_identity<WarmupCosineLR>(), type_identity<OneCycle>(),
                                  type_identity<LRRangeTest>());
}

void step_in_backward(AcceleratorCore& core) {
  const auto model = model_of(core);
  if (!model) return;
  const auto& state = core.gradient_state;
  const auto optimizers = own_optimizers(core);
  const bool completes =
      state.sync_gradients() && model->synchronizes &&
      std::ranges::any_of(optimizers, [](const auto& one) { return one->has_gradients(); });
  if (completes && core.num_steps() > 1 && core.step == 0 && !state.end_of_dataloader()) {
    warn_once(str("backward: the DeepSpeed configuration accumulates the gradients of ",
                  core.num_steps(),
                  " batches, but this one was stepped at once: it was not inside of "
                  "accelerator.accumulate(model)."));
  }
  core.deepspeed->steps.after_backward(
      completes, {.clip =
                      [&](double max_norm) {
                        for (const auto& one : optimizers) {
                          if (core.registry.scaling) core.registry.scaling->unscale(*one);
                        }
                        return optim::clip_grad_norm_(model->module->parameters(), max_norm,
                                                      /*norm_type=*/2.0,
                                                      /*error_if_nonfinite=*/false, list_engines());
                      },
                  .step = [&] { return step_all(optimizers); },
                  .zero_grad = [&] { clear_gradients(optimizers, *model); },
                  .step_scheduler = [&] { step_schedulers(core); }});
}

}  // namespace accelerate::detail::accelerator
