#include "accelerate/detail/accelerator/prepare.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <set>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/sharding/deepspeed.h"
#include "accelerator/accelerator_core.h"
#include "accelerator/deepspeed_run.h"
#include "accelerator/model_engines.h"
#include "accelerator/model_fp8.h"
#include "accelerator/monitoring.h"
#include "accelerator/pipeline_models.h"
#include "accelerator/step_checks.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "model_parallel/attention_calls.h"
#include "model_parallel/parameter_part.h"
#include "model_parallel/sequence_parallel.h"
#include "modeling/stand_in.h"
#include "optim/optimizer_state.h"
#include "state/accelerator_backend.h"
#include "state/tensor_device.h"

namespace accelerate::detail::accelerator {
namespace {

/// Returns true if it is new.
template <class T>
bool add_once(std::vector<std::shared_ptr<T>>& all, const std::shared_ptr<T>& one) {
  if (std::ranges::find(all, one) != all.end()) return false;
  all.push_back(one);
  return true;
}

bool places(const AcceleratorCore& core, std::optional<bool> placement) {
  return placement.value_or(core.options.device_placement);
}

bool has_trained_parameter(const torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(),
                             [](const at::Tensor& one) { return one.requires_grad(); });
}

/// The optimizer that a scheduler of ours was built on, also where it was moved since.
std::shared_ptr<optim::OptimizerCore> optimizer_of(const AcceleratorCore& core,
                                                   const LRScheduler& scheduler) {
  const torch::optim::Optimizer* const address = &scheduler.optimizer();
  for (const auto& one : core.registry.optimizers) {
    if (one->optimizer.get() == address) return one;
  }
  // The latest first: an address can be used again.
  for (auto one = core.registry.optimizers.rbegin(); one != core.registry.optimizers.rend();
       ++one) {
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

/// At the first step, since the optimizer may be prepared after the scheduler. With one process and
/// one batch per step a prepared scheduler is as good as the plain one.
void check_optimizer(const AcceleratorCore& core, const LRScheduler& scheduler) {
  if (!core.state.use_distributed() && core.num_steps() == 1) return;
  if (optimizer_of(core, scheduler)) return;
  warn_once(
      "step: the optimizer of a prepared scheduler is not prepared, so that they move at different "
      "times: the scheduler follows the gradient accumulation and the processes of the "
      "accelerator, the optimizer does not. Prepare the optimizer that the scheduler was built "
      "on.");
}

/// Python's rule and words.
void check_delayed_scales(std::size_t models, std::size_t optimizers) {
  if (models + optimizers == 0 || (models == 1 && optimizers == 1)) return;
  if (models == 0 || optimizers == 0) {
    throw ArgumentError(
        "You must pass a model and an optimizer together to `accelerate.prepare()` when using "
        "TransformerEngine.");
  }
  throw ArgumentError(str("You can't use multiple models (", models, ") or optimizers (",
                          optimizers, ") with TransformerEngine."));
}

void check(const AcceleratorCore& core, const PrepareObjects& given,
           const DevicePlacement* placement, std::size_t objects) {
  if (!AcceleratorState::initialized() || !PartialState::initialized()) {
    throw StateError(
        "prepare: the state of the run was reset after this accelerator was made. Make a new "
        "`Accelerator`.");
  }
  if (placement != nullptr && placement->flags().size() != objects) {
    throw ArgumentError(str("prepare: device_placement has ", placement->flags().size(),
                            " flags for ", objects, " objects. Give one for each."));
  }
  if (backend_of(core.fp8) == FP8BackendType::kTe) {
    check_delayed_scales(given.models.size(), given.optimizers.size());
  }
}

/// Whether DeepSpeed keeps models in parts, also those that are not trained.
bool is_stage_3(const AcceleratorCore& core) {
  return uses_deepspeed(core) && core.state.deepspeed_plugin()->zero_stage == 3;
}

/// Of a run with DeepSpeed: models that are not trained are sharded as the one that is, or alone.
void begin_if_deepspeed(AcceleratorCore& core, PrepareObjects given) {
  if (!uses_deepspeed(core)) return;
  auto& models = given.models;
  const auto is_frozen = [](const auto& one) { return !has_trained_parameter(*one); };
  const bool is_first = !core.deepspeed && is_stage_3(core) && !models.empty();
  if (is_first && std::ranges::all_of(models, is_frozen)) {
    models.resize(1);
  } else {
    std::erase_if(models, is_frozen);
  }
  begin_deepspeed(core, given);
}

/// How an engine keeps a model that is not trained: in parts, or not at all.
std::optional<sharding::ShardPlan> frozen_plan(const AcceleratorCore& core,
                                               torch::nn::Module& module) {
  if (!modeling::stand_ins(module).empty()) return std::nullopt;  // 8 or 4 bits stay whole
  if (uses_deepspeed(core) && !is_stage_3(core)) return std::nullopt;
  auto plan = sharding_of(core, module);
  if (plan && plan->spec.level == sharding::ShardLevel::kParameters) return plan;
  return std::nullopt;
}

}  // namespace

CalledFrom::CalledFrom(const std::source_location& where)
    : here_(std::make_unique<AtCallSite>(where)) {}

CalledFrom::~CalledFrom() = default;

void Preparer::begin(const PrepareObjects& given, const DevicePlacement* placement,
                     std::size_t size) const {
  check(core_, given, placement, size);
  begin_if_deepspeed(core_, given);
}

void Preparer::finish(const PrepareObjects& given) const {
  const auto model = core_.deepspeed ? core_.deepspeed->model.lock() : nullptr;
  if (!model || std::ranges::find(given.models, model->module) == given.models.end()) return;
  const auto& settings = core_.deepspeed->settings;
  if (settings.optimizer_type && given.optimizers.empty()) {
    static_cast<void>(optimizer(std::make_shared<DummyOptim>(model->module->parameters()), nullptr,
                                std::nullopt));
  }
  if (!settings.scheduler_type || !given.schedulers.empty()) return;
  const auto& optimizers = core_.registry.optimizers;
  const auto own =
      std::ranges::find_if(optimizers, [](const auto& one) { return one->stepped_in_backward; });
  if (own == optimizers.end()) return;
  static_cast<void>(
      scheduler(optim::scheduler_parts(std::make_shared<DummyScheduler>(*(*own)->optimizer))));
}

bool is_spread(const torch::nn::Module& module) {
  const auto map = hf_device_map(module);
  return (map && map->size() > 1) || std::ranges::any_of(module.children(), [](const auto& child) {
           return is_spread(*child);
         });
}

namespace {

void refuse_spread_model() {
  if (Environment::process().flag("ACCELERATE_BYPASS_DEVICE_MAP", false)) return;
  throw ArgumentError(
      "You can't train a model that has been loaded with `device_map='auto'` in any distributed "
      "mode. Please rerun your program with `--num_processes=1`.");
}

/// Throws as Python does for a model in 8 or 4 bits that cannot be trained where it is.
void check_quantized(const AcceleratorCore& core, const torch::nn::Module& module) {
  const auto map = hf_device_map(module);
  if (!map) return;
  std::set<MapDevice> devices;
  for (const auto& [name, device] : *map) devices.insert(device);
  if (devices.contains("disk")) {
    throw ArgumentError(
        "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk "
        "offload. Give a device_map without \"disk\".");
  }
  const auto current = core.state.device();
  if (devices.size() == 1 && devices.begin()->is_gpu() && current.is_cuda() &&
      devices.begin()->index() != state::gpu_index(current)) {
    throw ArgumentError(str(
        "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different "
        "device than the one you're training on: it is on GPU ",
        *devices.begin(), ", and this process trains on ", current.str(),
        ". Leave device_map of load_and_quantize_model out, or name that device there."));
  }
}

/// How the model computes attention in training mode; null: as usual.
state::AttentionRulePtr attention_of(const AcceleratorCore& core, const torch::nn::Module& module) {
  const auto config = core.state.parallelism_config();
  if (!config || !core.mesh || !(config->cp_enabled() || config->sp_enabled())) return nullptr;
  model_parallel::refuse_own_attention(module);
  if (!config->sp_enabled()) return nullptr;
  return model_parallel::ulysses_rule(*config->sp_handler, core.mesh->get_group("sp"));
}

}  // namespace

std::shared_ptr<ModelCore> Preparer::model(std::shared_ptr<torch::nn::Module> module,
                                           std::optional<bool> placement,
                                           bool evaluation_mode) const {
  const auto& core = core_;
  const bool trains = !evaluation_mode && has_trained_parameter(*module);
  if (!evaluation_mode && !core.deepspeed) begin_if_deepspeed(core_, {.models = {module}});
  const bool joins = core.state.use_distributed() || core.deepspeed;
  auto plan = joins && !evaluation_mode && !trains ? frozen_plan(core, *module) : std::nullopt;
  // Without an engine the parts of a cut model are not put together when it is saved.
  const bool cut = core.mesh && core.mesh->has("tp") && model_parallel::is_cut(*module);
  const bool shared = joins && (trains || plan || cut);
  for (const auto& known : core.registry.models) {
    if (known->module == module && (known->engine != nullptr) == shared) return known;
  }
  const bool spread = is_spread(*module);
  if (spread && core.state.use_distributed()) refuse_spread_model();
  const bool quantized = !modeling::stand_ins(*module).empty();
  if (quantized) check_quantized(core, *module);
  auto model = std::make_shared<ModelCore>();
  model->module = std::move(module);
  model->device = core.state.device();
  model->cast = core.cast;
  if (is_pipeline(*model->module)) {
    prepare_pipeline(core_, *model);
    add(model);
    return model;
  }
  model->attention = attention_of(core, *model->module);
  const auto converted = fp8::converted_layers(*model->module);
  if (trains) refuse_without_pipeline(core);
  if (shared && trains) plan = sharding_of(core, *model->module);
  if (plan && quantized) {
    throw UnsupportedError(
        "prepare: a model in 8 or 4 bits cannot be sharded. Train its adapters with data "
        "parallelism: leave the FSDP plugin and dp_shard_size out.");
  }
  if (plan) {
    // The engine moves the model unit by unit.
  } else if (places(core, placement) && !spread && !quantized) {
    model->module->to(state::tensor_device(model->device));
  } else if (const auto parameters = model->module->parameters(); !parameters.empty()) {
    model->device = parameters.front().device();
  }
  if (shared) give_engine(core, *model, plan);
  multiply_in_8_bits(core_, *model, converted);
  if (shared && trains && core.deepspeed && core.deepspeed->model.expired()) {
    core.deepspeed->model = model;
  }
  add(model);
  return model;
}

std::shared_ptr<optim::OptimizerCore> Preparer::optimizer(
    std::shared_ptr<torch::optim::Optimizer> optimizer, const torch::optim::Optimizer* moved_from,
    std::optional<bool> placement) const {
  const auto& core = core_;
  for (const auto& known : core.registry.optimizers) {
    if (known->optimizer.get() == optimizer.get()) return known;
  }
  if (const auto* dummy = dynamic_cast<const DummyOptim*>(optimizer.get())) {
    const auto* const from = moved_from != nullptr ? moved_from : dummy;
    const auto made = made_optimizer(core, *dummy);
    if (!made) return this->optimizer(optimizer_for(core, *dummy), from, placement);
    made->moved_from = from;
    return made;
  }
  auto result = optim::make_optimizer_core(std::move(optimizer), moved_from);
  if (core.state.use_distributed() || core.deepspeed) {
    result->before_step = StepChecks(/*checks=*/core.options.drift_check > 0);
  }
  if (places(core, placement)) {
    optim::move_optimizer_state(*result->optimizer, state::tensor_device(core.state.device()));
  }
  follow_megatron(core, *result);
  add(result);
  return result;
}

std::shared_ptr<optim::SchedulerCore> Preparer::scheduler(optim::SchedulerParts parts) const {
  const auto& core = core_;
  if (!parts.keeper && !parts.ours && !parts.step && !parts.step_with_metric) {
    throw ArgumentError("There is no scheduler to prepare: the pointer is empty.");
  }
  for (const auto& known : core.registry.schedulers) {
    if (parts.ours != nullptr && known->parts.ours == parts.ours) return known;
  }
  if (const auto* dummy = dynamic_cast<const DummyScheduler*>(parts.ours)) {
    const auto own = optimizer_of(core, *dummy);
    if (!own) {
      throw StateError(
          "prepare: the optimizer that the DummyScheduler was built on is not prepared. Prepare "
          "them together.");
    }
    if (auto made = made_scheduler(core, *dummy, *own)) return made;
    auto made =
        this->scheduler(optim::scheduler_parts(scheduler_for(core, *dummy, *own->optimizer)));
    made->stepped_in_backward = true;
    core.deepspeed->schedulers.push_back(made);
    return made;
  }
  auto scheduler = std::make_shared<optim::SchedulerCore>();
  scheduler->optimizers = core.registry.optimizers;
  scheduler->stepped_in_backward =
      parts.ours != nullptr && is_stepped_in_backward(core, *parts.ours);
  if (parts.ours != nullptr) {
    if (const auto own = optimizer_of(core, *parts.ours)) {
      scheduler->optimizers = {own};
      if (own->optimizer.get() != &parts.ours->optimizer()) parts.ours->rebind(*own->optimizer);
    } else {
      scheduler->before_first_step = [weak = core.weak_from_this(), ours = parts.ours] {
        if (const auto owner = weak.lock()) check_optimizer(*owner, *ours);
      };
    }
  }
  scheduler->parts = std::move(parts);
  follow_megatron(core, *scheduler);
  const auto& options = core.options;
  const bool split = options.dataloader_config.split_batches;
  scheduler->step_with_optimizer = options.step_scheduler_with_optimizer;
  scheduler->ends_quietly = !split;
  if (!split && options.step_scheduler_per_process) {
    scheduler->steps_per_call = core.state.num_processes();
    const bool follows = scheduler->step_with_optimizer && !scheduler->stepped_in_backward &&
                         !scheduler->parts.step_with_metric;
    if (follows && scheduler->steps_per_call > 1) explain_steps(scheduler->steps_per_call);
  }
  add(scheduler);
  return scheduler;
}

void Preparer::add(const std::shared_ptr<ModelCore>& model) const {
  auto& core = core_;
  if (!model->optimizers) {
    model->optimizers = [weak = core.weak_from_this()] {
      const auto owner = weak.lock();
      return owner ? owner->registry.optimizers
                   : std::vector<std::shared_ptr<optim::OptimizerCore>>();
    };
  }
  if (!add_once(core.registry.models, model)) return;
  for (const auto& optimizer : core.registry.optimizers) {
    step_within_backward(core, optimizer);
    if (model->engine) optimizer->attach(model->engine);
  }
}

void Preparer::add(const std::shared_ptr<optim::OptimizerCore>& optimizer) const {
  auto& core = core_;
  if (core.registry.scaling && !optimizer->scaling) {
    optimizer->scaling = core.registry.scaling;
    core.registry.scaling->add(optimizer);
  }
  if (!add_once(core.registry.optimizers, optimizer)) return;
  step_within_backward(core, optimizer);
  record_steps(core, *optimizer);
  for (const auto& model : core.registry.models) {
    if (model->engine) optimizer->attach(model->engine);
  }
}

void Preparer::add(const std::shared_ptr<optim::SchedulerCore>& scheduler) const {
  add_once(core_.registry.schedulers, scheduler);
}

void Preparer::add(const std::shared_ptr<data::LoaderCore>& loader) const {
  if (!add_once(core_.registry.loaders, loader) || !core_.preemption) return;
  loader->when_batch_done([weak = core_.weak_from_this()] {
    if (!at::GradMode::is_enabled()) return;  // an evaluation is not left in its middle
    if (const auto core = weak.lock()) check_preemption(*core, std::source_location::current());
  });
}

PrepareDataLoaderOptions Preparer::loader_options(std::optional<bool> placement) const {
  const auto& core = core_;
  auto options = prepare_options(core.options.dataloader_config);
  options.device = core.state.device();
  options.put_on_device = places(core, placement);
  options.rng_types = core.options.rng_types;
  if (core.state.parallelism_config() && core.mesh) options.device_mesh = core.mesh->layout();
  return options;
}

}  // namespace accelerate::detail::accelerator
