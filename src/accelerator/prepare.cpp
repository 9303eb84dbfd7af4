#include "accelerate/prepare.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerator/accelerator_core.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "training/gradient_watch.h"
#include "training/living_models.h"
#include "training/optimizer_state.h"

namespace accelerate::detail {
namespace {

template <class T>
void add_once(std::vector<std::shared_ptr<T>>& all, const std::shared_ptr<T>& one) {
  if (std::ranges::find(all, one) == all.end()) all.push_back(one);
}

bool places(const AcceleratorCore& core, std::optional<bool> placement) {
  return placement.value_or(core.options.device_placement);
}

bool has_trained_parameter(const torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(),
                             [](const at::Tensor& one) { return one.requires_grad(); });
}

/// The optimizer that a scheduler of ours was built on, also where it was moved since.
std::shared_ptr<OptimizerCore> optimizer_of(const AcceleratorCore& core,
                                            const LRScheduler& scheduler) {
  const torch::optim::Optimizer* const address = &scheduler.optimizer();
  for (const auto& one : core.optimizers) {
    if (one->optimizer.get() == address) return one;
  }
  // The latest first: an address can be used again.
  for (auto one = core.optimizers.rbegin(); one != core.optimizers.rend(); ++one) {
    if ((*one)->moved_from == address) return *one;
  }
  return nullptr;
}

/// Once, and where it is seen: a schedule that ends after a part of its steps is hard to trace
/// back.
void explain_steps(int processes) {
  warn_once(str("Each step of a prepared scheduler is ", processes,
                " steps of its schedule, one for each process, since each process sees one batch "
                "of ",
                processes,
                ": count the steps of a schedule as one process would. For one step only set "
                "step_scheduler_per_process = false of AcceleratorOptions."));
}

}  // namespace

CalledFrom::CalledFrom(const std::source_location& where)
    : here_(std::make_unique<AtCallSite>(where)) {}

CalledFrom::~CalledFrom() = default;

void check_prepare(const DevicePlacement* placement, std::size_t objects) {
  if (!AcceleratorState::initialized() || !PartialState::initialized()) {
    throw StateError(
        "prepare: the state of the run was reset after this accelerator was made. Make a new "
        "`Accelerator`.");
  }
  if (placement != nullptr && placement->flags().size() != objects) {
    throw ArgumentError(str("prepare: device_placement has ", placement->flags().size(),
                            " flags for ", objects, " objects. Give one for each."));
  }
}

std::shared_ptr<ModelCore> prepare_module(AcceleratorCore& core,
                                          std::shared_ptr<torch::nn::Module> module,
                                          std::optional<bool> placement, bool evaluation_mode) {
  if (!module) throw ArgumentError("There is no model to prepare: the holder is empty.");
  const bool parallel =
      core.state.use_distributed() && !evaluation_mode && has_trained_parameter(*module);
  for (const auto& known : core.models) {
    if (known->module == module && (known->parallel != nullptr) == parallel) return known;
  }
  auto model = std::make_shared<ModelCore>();
  model->module = std::move(module);
  model->device = core.state.device();
  model->cast = core.cast;
  if (places(core, placement)) {
    model->module->to(model->device);
  } else if (const auto parameters = model->module->parameters(); !parameters.empty()) {
    model->device = parameters.front().device();
  }
  if (parallel) {
    model->parallel =
        std::make_unique<DataParallel>(*model->module, core.state.process_group(), core.ddp);
    model->moves_inputs = !model->device.is_cpu();
    model->watch = std::make_shared<GradientWatch>(model);
    add_living_model(model);
  }
  register_prepared(core, model);
  return model;
}

std::shared_ptr<OptimizerCore> prepare_optimizer_core(
    AcceleratorCore& core, std::shared_ptr<torch::optim::Optimizer> optimizer,
    const torch::optim::Optimizer* moved_from, std::optional<bool> placement) {
  for (const auto& known : core.optimizers) {
    if (known->optimizer.get() == optimizer.get()) return known;
  }
  auto result = make_optimizer_core(std::move(optimizer), moved_from);
  if (places(core, placement)) move_optimizer_state(*result->optimizer, core.state.device());
  register_prepared(core, result);
  return result;
}

std::shared_ptr<SchedulerCore> prepare_scheduler_core(AcceleratorCore& core, SchedulerParts parts) {
  if (!parts.keeper && !parts.ours && !parts.step && !parts.step_with_metric) {
    throw ArgumentError("There is no scheduler to prepare: the pointer is empty.");
  }
  for (const auto& known : core.schedulers) {
    if (parts.ours != nullptr && known->parts.ours == parts.ours) return known;
  }
  auto scheduler = std::make_shared<SchedulerCore>();
  scheduler->optimizers = core.optimizers;
  if (parts.ours != nullptr) {
    if (const auto own = optimizer_of(core, *parts.ours)) {
      scheduler->optimizers = {own};
      if (own->optimizer.get() != &parts.ours->optimizer()) parts.ours->rebind(*own->optimizer);
    }
  }
  scheduler->parts = std::move(parts);
  const auto& options = core.options;
  const bool split = options.dataloader_config.split_batches;
  scheduler->step_with_optimizer = options.step_scheduler_with_optimizer;
  scheduler->ends_quietly = !split;
  if (!split && options.step_scheduler_per_process) {
    scheduler->steps_per_call = core.state.num_processes();
    const bool follows = scheduler->step_with_optimizer && !scheduler->parts.step_with_metric;
    if (follows && scheduler->steps_per_call > 1) explain_steps(scheduler->steps_per_call);
  }
  register_prepared(core, scheduler);
  return scheduler;
}

void register_prepared(AcceleratorCore& core, std::shared_ptr<ModelCore> model) {
  if (!model->optimizers) {
    model->optimizers = [weak = core.weak_from_this()] {
      const auto owner = weak.lock();
      return owner ? owner->optimizers : std::vector<std::shared_ptr<OptimizerCore>>();
    };
  }
  add_once(core.models, model);
}

void register_prepared(AcceleratorCore& core, std::shared_ptr<OptimizerCore> optimizer) {
  if (core.scaling && !optimizer->scaling) {
    optimizer->scaling = core.scaling;
    core.scaling->add(optimizer);
  }
  add_once(core.optimizers, optimizer);
}

void register_prepared(AcceleratorCore& core, std::shared_ptr<SchedulerCore> scheduler) {
  add_once(core.schedulers, scheduler);
}

void register_prepared(AcceleratorCore& core, std::shared_ptr<AnyPreparedLoader> loader) {
  add_once(core.loaders, loader);
}

PrepareDataLoaderOptions loader_options(const AcceleratorCore& core,
                                        std::optional<bool> placement) {
  auto options = prepare_options(core.options.dataloader_config);
  options.device = core.state.device();
  options.put_on_device = places(core, placement);
  options.rng_types = core.options.rng_types;
  return options;
}

}  // namespace accelerate::detail
