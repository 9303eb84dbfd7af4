#include "accelerate/accelerator.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/errors.h"
#include "accelerate/memory.h"
#include "accelerator/accelerator_core.h"
#include "accelerator/batch_count.h"
#include "accelerator/deepspeed_run.h"
#include "accelerator/model_registry.h"
#include "accelerator/pipeline_models.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "model_parallel/context_parallel.h"
#include "modeling/checkpoint_marks.h"
#include "optim/clip_grad.h"
#include "parallel/join.h"
#include "parallel/reached_leaves.h"
#include "state/step_recording.h"

namespace accelerate {

using detail::str;

Accelerator::Accelerator(const AcceleratorOptions& options)
    : CheckpointMembers(detail::accelerator::make_accelerator_core(options)),
      TrackingMembers(*core_),
      StepMembers(core_) {
  core_->before_exit = [this] { finish_trackers(); };
}

Accelerator::~Accelerator() { core_->before_exit = nullptr; }

void Accelerator::end_training() {
  wait_for_save_state();
  finish_trackers();
  state_.destroy_process_group();
}

void Accelerator::forget_prepared() {
  core_->registry.forget_prepared();
  if (core_->deepspeed) core_->registry.scaling = nullptr;
  core_->registry.scaling_state = nullptr;
  core_->deepspeed = nullptr;
  core_->deepspeed_num_steps = std::nullopt;
  core_->step = 0;
  core_->run_state.buffers = {};
  clear_device_cache(/*garbage_collection=*/true);
}

// ---- without effect unless something was configured ---------------------------------------------

ContextParallelScope Accelerator::maybe_context_parallel(
    const ContextParallelOptions& options) const {
  const auto config = parallelism_config();
  if (config && config->cp_enabled()) {
    return ContextParallelScope(detail::model_parallel::enter_context_parallel(
        {options.buffers, options.buffer_seq_dims, options.no_restore_buffers},
        torch_device_mesh()->get_group("cp"), *config->cp_handler->cp_comm_strategy));
  }
  detail::warn_once(
      "Context parallel training is not enabled: maybe_context_parallel has no effect. To enable "
      "it, set cp_size of the parallelism_config.");
  return {};
}

bool Accelerator::shares_sequences() const {
  const auto config = parallelism_config();
  return config && config->sp_enabled();
}

void Accelerator::save_instead(const std::shared_ptr<detail::data::LoaderCore>& loader,
                               const detail::data::LoaderCore& other) const {
  for (auto& one : core_->registry.loaders) {
    if (one.get() == &other) one = loader;
  }
}

// ---- a step -------------------------------------------------------------------------------------

void Accelerator::count_batch() {
  const auto count = [core = core_] {
    detail::accelerator::set_count(*core, detail::accelerator::next_count(*core));
  };
  detail::state::StepRecording::batch_counted = true;
  if (auto* const recording = detail::state::StepRecording::current()) {
    if (!recording->is_open()) return;  // a replay has counted it
    recording->before_replay(count);
  }
  count();
}

std::int64_t Accelerator::gradient_accumulation_steps() const { return core_->num_steps(); }

void Accelerator::set_gradient_accumulation_steps(std::int64_t steps) {
  gradient_state_.set_num_steps(steps);
  if (core_->deepspeed_num_steps) core_->deepspeed_num_steps = steps;
}

std::optional<bool> Accelerator::synchronizes_this_batch() const {
  const bool synchronizes = gradient_state_.sync_gradients() || gradient_state_.sync_each_batch();
  return synchronizes ? std::nullopt : std::optional(false);
}

namespace {

void check_loss(const at::Tensor& loss, const BackwardOptions& options) {
  if (!loss.defined())
    throw ArgumentError("backward: there is no loss: the tensor is not defined.");
  if (!loss.requires_grad()) {
    throw ArgumentError(
        "backward: the loss does not depend on anything that is trained. Was it computed under "
        "NoGradGuard, detached, or are all parameters frozen?");
  }
  if (loss.numel() != 1 && !options.gradient.defined()) {
    throw ArgumentError(
        detail::str("backward: the loss has shape ", loss.sizes(),
                    ". Reduce it to one number, by mean() say, or give its gradient "
                    "(BackwardOptions::gradient)."));
  }
}

/// Warns of modules that are marked for activation checkpointing and take part in the loss, though
/// their model has not asked for marks in its forward.
void check_marks(const at::Tensor& loss) {
  const auto unasked = detail::modeling::unasked_marks();
  if (unasked.empty()) return;
  detail::parallel::ReachedLeaves leaves;
  leaves.walk(loss);
  const auto takes_part = [&](const std::weak_ptr<torch::nn::Module>& one) {
    const auto module = one.lock();
    return module != nullptr &&
           std::ranges::any_of(module->parameters(),
                               [&](const at::Tensor& each) { return leaves.contains(each); });
  };
  for (const auto& marks : unasked) {
    if (std::ranges::none_of(marks->modules, takes_part)) continue;
    detail::modeling::forget_unasked_marks(*marks);
    detail::warn(str("backward: ", marks->modules.size(),
                     " modules are marked for activation checkpointing (the first one is ",
                     marks->shown,
                     "), but the forward of the model has kept all activations: it did not ask for "
                     "the mark. Call the modules by accelerate::maybe_activation_checkpoint(block, "
                     "x) instead of block(x) there, or turn activation_checkpointing off."));
  }
}

void run_autograd(const at::Tensor& loss, const BackwardOptions& options) {
  const auto inputs =
      options.inputs.empty() ? std::nullopt : std::optional<at::TensorList>(options.inputs);
  loss.backward(options.gradient, options.retain_graph, options.create_graph, inputs);
}

}  // namespace

void Accelerator::backward(const at::Tensor& loss, const BackwardOptions& options,
                           std::source_location where) {
  if (detail::accelerator::steps_by_megatron(*core_)) return;  // `model(x, y)` has done it
  check_loss(loss, options);
  check_marks(loss);
  const detail::AtCallSite here(where);
  at::Tensor scaled = loss;
  if (const auto steps = core_->num_steps(); steps > 1) scaled = scaled / steps;
  if (core_->registry.scaling) scaled = core_->registry.scaling->scale(scaled);
  core_->backward.run({.loss = scaled,
                       .inputs = options.inputs,
                       .own = core_->registry.models,
                       .join = core_->join},
                      [&] { run_autograd(scaled, options); });
  if (core_->deepspeed) detail::accelerator::step_in_backward(*core_);
}

void Accelerator::unscale_gradients() {
  if (!scaler()) return;
  for (const auto& optimizer : core_->registry.optimizers)
    core_->registry.scaling->unscale(*optimizer);
}

void Accelerator::unscale_gradients(const AcceleratedOptimizer& optimizer) {
  if (!optimizer) detail::refuse_empty("optimizer");
  if (scaler() != nullptr) core_->registry.scaling->unscale(*optimizer._core());
}

namespace {

void check_complete(const detail::accelerator::AcceleratorCore& core, const char* what) {
  if (!core.registry.scaling || core.gradient_state.sync_gradients()) return;
  throw StateError(str(what,
                       ": with float16 gradients can be clipped only where they are complete, or "
                       "scaled and unscaled ones would be added. Guard the call: if "
                       "(accelerator.sync_gradients()) ..."));
}

}  // namespace

at::Tensor Accelerator::clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                                        double norm_type) {
  if (core_->deepspeed) return core_->deepspeed->steps.clip_grad_norm_(max_norm);
  check_complete(*core_, "clip_grad_norm_");
  unscale_gradients();
  return detail::optim::clip_grad_norm_(parameters, max_norm, norm_type,
                                        /*error_if_nonfinite=*/false,
                                        detail::accelerator::list_engines());
}

void Accelerator::clip_grad_value_(std::span<const at::Tensor> parameters, double clip_value) {
  if (core_->deepspeed) {
    throw UnsupportedError(
        "DeepSpeed does not support `clip_grad_value_`: backward has stepped already. Set "
        "gradient_clipping of the DeepSpeed configuration, which clips the norm.");
  }
  check_complete(*core_, "clip_grad_value_");
  unscale_gradients();
  detail::optim::clip_grad_value_(parameters, clip_value, detail::accelerator::list_engines());
}

AutocastScope Accelerator::autocast(const std::optional<AutocastKwargs>& autocast_handler) const {
  const auto& cast = core_->cast;
  if (!cast) return AutocastScope();
  return AutocastScope(cast->device_type, cast->dtype, autocast_handler.value_or(cast->kwargs));
}

bool Accelerator::optimizer_step_was_skipped() const {
  return std::ranges::any_of(core_->registry.optimizers,
                             [](const auto& one) { return one->step_was_skipped; });
}

GradScaler* Accelerator::scaler() const {
  // That of DeepSpeed follows its own rules, within backward.
  if (!core_->registry.scaling || core_->deepspeed) return nullptr;
  return &core_->registry.scaling->scaler();
}

// ---- uneven inputs ------------------------------------------------------------------------------

namespace {

/// Tells all loaders of data by index whether to even their batches, and takes that back.
class EvenBatchesScope {
 public:
  EvenBatchesScope(const std::vector<std::shared_ptr<detail::data::LoaderCore>>& loaders,
                   std::optional<bool> even) {
    if (!even) return;
    bool others = false;
    for (const auto& loader : loaders) {
      if (const auto before = loader->exchange_even_batches(*even)) {
        changed_.emplace_back(loader, *before);
      } else {
        others = true;
      }
    }
    if (others) {
      detail::warn(
          "join_uneven_inputs: even_batches is changed for prepared loaders of data by index only; "
          "others stay as they are.");
    }
  }
  ~EvenBatchesScope() {
    for (const auto& [loader, before] : changed_) loader->exchange_even_batches(before);
  }
  EvenBatchesScope(const EvenBatchesScope&) = delete;
  EvenBatchesScope& operator=(const EvenBatchesScope&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<detail::data::LoaderCore>, bool>> changed_;
};

/// While it lives, backward announces itself to the scope.
class JoinInProgress {
 public:
  JoinInProgress(detail::accelerator::AcceleratorCore& core, detail::parallel::JoinScope& scope)
      : core_(core) {
    if (core.join != nullptr) {
      throw StateError("join_uneven_inputs: another one is in progress. They cannot be nested.");
    }
    core.join = &scope;
  }
  ~JoinInProgress() { core_.join = nullptr; }
  JoinInProgress(const JoinInProgress&) = delete;
  JoinInProgress& operator=(const JoinInProgress&) = delete;

 private:
  detail::accelerator::AcceleratorCore& core_;
};

}  // namespace

void Accelerator::join(std::span<const std::shared_ptr<detail::accelerator::ModelCore>> models,
                       const JoinOptions& options, const std::function<void()>& f,
                       std::source_location where) {
  if (!use_distributed()) {
    f();
    return;
  }
  const EvenBatchesScope evened(core_->registry.loaders, options.even_batches);
  if (options.even_batches.value_or(even_batches())) {
    f();
    return;
  }
  // In the order in which backward takes them.
  std::vector<detail::parallel::Joinable*> joined;
  std::vector<std::shared_ptr<detail::accelerator::ModelCore>> prepared;
  detail::accelerator::list_model_registry(prepared);
  for (const auto& model : prepared) {
    if (std::ranges::find(models, model) == models.end()) continue;
    auto* const joinable = model->engine->joinable();
    if (joinable == nullptr) {
      throw UnsupportedError(
          "join_uneven_inputs: each process has a part of the model only, and one without data "
          "cannot take part in what the parts send each other. Let all processes have the same "
          "number of batches: set even_batches.");
    }
    joined.push_back(joinable);
  }
  if (joined.empty()) {
    detail::warn(
        "join_uneven_inputs: none of the models averages gradients, so that there is nothing to "
        "join.");
    f();
    return;
  }
  const detail::AtCallSite here(where);
  detail::parallel::JoinScope scope(std::move(joined));
  {
    const JoinInProgress in_progress(*core_, scope);
    f();
  }
  scope.finish();
  if (!core_->preemption) return;
  const auto counts = accelerate::gather_object(std::vector{core_->backward.synchronized()}, where);
  core_->backward.set_synchronized(*std::ranges::max_element(counts));
}

}  // namespace accelerate
