#include "accelerate/accelerator.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/join.h"
#include "accelerate/memory.h"
#include "accelerator/accelerator_core.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "training/clip_grad.h"
#include "training/gradient_watch.h"
#include "training/living_models.h"

namespace accelerate {

using detail::str;

Accelerator::Accelerator(const AcceleratorOptions& options)
    : core_(detail::make_accelerator_core(options)) {}

Accelerator::~Accelerator() = default;

const AcceleratorOptions& Accelerator::options() const { return core_->options; }

void Accelerator::forget_prepared() {
  core_->models.clear();
  core_->optimizers.clear();
  core_->schedulers.clear();
  core_->loaders.clear();
  core_->step = 0;
  clear_device_cache(/*garbage_collection=*/true);
}

// ---- a step -------------------------------------------------------------------------------------

void Accelerator::count_batch() {
  if (gradient_state_.sync_with_dataloader() && gradient_state_.end_of_dataloader()) {
    core_->step = 0;
    gradient_state_._set_sync_gradients(true);
    return;
  }
  ++core_->step;
  gradient_state_._set_sync_gradients(core_->step % gradient_state_.num_steps() == 0);
}

std::optional<bool> Accelerator::averages_this_batch() const {
  const bool averages = gradient_state_.sync_gradients() || gradient_state_.sync_each_batch();
  return averages ? std::nullopt : std::optional(false);
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

void run_autograd(const at::Tensor& loss, const BackwardOptions& options) {
  torch::autograd::variable_list gradients;
  if (options.gradient.defined()) gradients.push_back(options.gradient);
  torch::autograd::backward({loss}, gradients, options.retain_graph, options.create_graph,
                            options.inputs);
}

/// Whether backward, which adds gradients to `inputs` alone where there are any, comes to a model.
bool is_asked_for(const detail::ModelCore& model, const std::vector<at::Tensor>& inputs) {
  if (inputs.empty()) return true;
  std::size_t trained = 0;
  std::size_t asked = 0;
  for (const auto& parameter : model.module->parameters()) {
    if (!parameter.requires_grad()) continue;
    ++trained;
    if (std::ranges::any_of(inputs, [&](const auto& one) { return one.is_same(parameter); })) {
      ++asked;
    }
  }
  if (asked == 0 || asked == trained) return asked > 0;
  throw ArgumentError(
      str("backward: inputs has ", asked, " of the ", trained,
          " trained parameters of a prepared model, whose gradients are averaged all at once. Name "
          "all of them or none, or put the call under no_sync."));
}

/// Which tensor the gradient is and how often it was written to: whether one has come shows here.
detail::GradientMark mark_of(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined()) return {};
  return {gradient.unsafeGetTensorImpl(), gradient._version()};
}

/// Where an error ended a backward some processes may wait for what others have never sent.
void check_finished(const detail::AcceleratorCore& core) {
  const bool any =
      std::ranges::any_of(core.reached, [](const auto* one) { return one->unfinished; });
  if (!any) return;
  throw StateError(
      "backward: an error ended the last one in the middle of averaging gradients, which cannot be "
      "taken up again. Give the model back (free_memory) and prepare it anew.");
}

bool is_own(const detail::AcceleratorCore& core, const detail::ModelCore* model) {
  return std::ranges::any_of(core.models, [&](const auto& own) { return own.get() == model; });
}

/// A module that was prepared several times is averaged once: as this accelerator has prepared it,
/// or else as it was last.
bool is_superseded(const detail::AcceleratorCore& core, std::size_t index) {
  const auto* const model = core.living[index].get();
  for (std::size_t i = 0; i < core.living.size(); ++i) {
    const auto* const other = core.living[i].get();
    if (i == index || other->module != model->module) continue;
    const bool own = is_own(core, model);
    if (own == is_own(core, other) ? index < i : !own) return true;
  }
  return false;
}

/// Recomputed parts hide their parameters, but all steps of a static graph are of the same model:
/// the only one, or null.
detail::ModelCore* only_static(const detail::AcceleratorCore& core) {
  detail::ModelCore* only = nullptr;
  const bool any_own =
      std::ranges::any_of(core.candidates, [&](const auto* one) { return is_own(core, one); });
  for (auto* model : core.candidates) {
    if (any_own && !is_own(core, model)) continue;
    if (only != nullptr) return nullptr;
    only = model;
  }
  return only != nullptr && only->parallel->is_static() ? only : nullptr;
}

/// The models whose gradients the next backward averages, armed for it: any of the process, since
/// all that counts is whether the loss depends on it.
void arm(detail::AcceleratorCore& core, const at::Tensor& loss,
         const std::vector<at::Tensor>& inputs) {
  detail::living_models(core.living);
  for (std::size_t i = 0; i < core.living.size(); ++i) {
    auto* const model = core.living[i].get();
    if (model->averages && !is_superseded(core, i)) core.candidates.push_back(model);
  }
  if (core.candidates.empty()) return;
  auto& leaves = core.leaves;
  leaves.walk(loss);
  for (auto* model : core.candidates) {
    if (model->parallel->reached_by(leaves)) core.reached.push_back(model);
  }
  if (core.reached.empty()) {
    if (auto* model = only_static(core)) core.reached.push_back(model);
  }
  for (const auto* model : core.candidates) {
    if (std::ranges::find(core.reached, model) != core.reached.end()) continue;
    for (auto& parameter : model->module->parameters()) {
      const auto mark = mark_of(parameter);
      core.unseen.emplace_back(std::move(parameter), mark);
    }
  }
  std::erase_if(core.reached, [&](const auto* model) { return !is_asked_for(*model, inputs); });
  check_finished(core);
  for (auto* model : core.reached) core.averaged.push_back(model->parallel.get());
  if (core.join != nullptr) core.join->announce(core.averaged, leaves);
  for (auto* parallel : core.averaged) parallel->before_backward(loss, leaves);
}

/// What a backward knows of models, which it keeps alive, is forgotten with it.
class BackwardScope {
 public:
  explicit BackwardScope(detail::AcceleratorCore& core) : core_(core) { clear(); }
  ~BackwardScope() { clear(); }
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;

 private:
  void clear() {
    core_.averaged.clear();
    core_.reached.clear();
    core_.candidates.clear();
    core_.unseen.clear();
    core_.living.clear();
  }
  detail::AcceleratorCore& core_;
};

/// Models that the loss was not seen to depend on must have got no gradient.
void check_unseen(const detail::AcceleratorCore& core) {
  const auto changed = std::ranges::find_if(
      core.unseen, [](const auto& one) { return mark_of(one.first) != one.second; });
  if (changed == core.unseen.end()) return;
  throw ArgumentError(detail::str(
      "backward: a prepared model got gradients that were not averaged (a parameter of shape ",
      changed->first.sizes(),
      "), since the graph of the loss does not show its parameters: parts that are computed "
      "again in backward hide them. Set static_graph of DistributedDataParallelKwargs and "
      "prepare one model, or let one part be computed in the plain way."));
}

}  // namespace

void Accelerator::backward(const at::Tensor& loss, const BackwardOptions& options,
                           std::source_location where) {
  check_loss(loss, options);
  const detail::AtCallSite here(where);
  at::Tensor scaled = loss;
  if (const auto steps = gradient_state_.num_steps(); steps > 1) scaled = scaled / steps;
  if (core_->scaling) scaled = core_->scaling->scale(scaled);
  const BackwardScope scope(*core_);
  arm(*core_, scaled, options.inputs);
  try {
    const detail::OwnBackward own;
    run_autograd(scaled, options);
  } catch (...) {
    for (auto* model : core_->reached) model->unfinished = true;
    throw;
  }
  for (auto* model : core_->reached) {
    model->parallel->after_backward();
    // What came before was averaged along with it.
    model->strayed = false;
  }
  check_unseen(*core_);
}

void Accelerator::unscale_gradients() {
  if (!core_->scaling) return;
  for (const auto& optimizer : core_->optimizers) core_->scaling->unscale(*optimizer);
}

void Accelerator::unscale_gradients(const AcceleratedOptimizer& optimizer) {
  if (!optimizer) detail::refuse_empty_optimizer();
  if (core_->scaling) core_->scaling->unscale(*optimizer._core());
}

namespace {

void check_complete(const detail::AcceleratorCore& core, const char* what) {
  if (!core.scaling || core.gradient_state.sync_gradients()) return;
  throw StateError(str(what,
                       ": with float16 gradients can be clipped only where they are complete, or "
                       "scaled and unscaled ones would be added. Guard the call: if "
                       "(accelerator.sync_gradients()) ..."));
}

}  // namespace

at::Tensor Accelerator::clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                                        double norm_type) {
  check_complete(*core_, "clip_grad_norm_");
  unscale_gradients();
  return detail::clip_grad_norm_(parameters, max_norm, norm_type);
}

void Accelerator::clip_grad_value_(std::span<const at::Tensor> parameters, double clip_value) {
  check_complete(*core_, "clip_grad_value_");
  unscale_gradients();
  detail::clip_grad_value_(parameters, clip_value);
}

AutocastScope Accelerator::autocast(const std::optional<AutocastKwargs>& autocast_handler) const {
  const auto& cast = core_->cast;
  if (!cast) return AutocastScope();
  return AutocastScope(cast->device_type, cast->dtype, autocast_handler.value_or(cast->kwargs));
}

bool Accelerator::optimizer_step_was_skipped() const {
  return std::ranges::any_of(core_->optimizers,
                             [](const auto& one) { return one->step_was_skipped; });
}

GradScaler* Accelerator::scaler() const {
  return core_->scaling ? &core_->scaling->scaler() : nullptr;
}

// ---- uneven inputs ------------------------------------------------------------------------------

namespace {

/// Tells all loaders of data by index whether to even their batches, and takes that back.
class EvenBatchesScope {
 public:
  EvenBatchesScope(const std::vector<std::shared_ptr<detail::AnyPreparedLoader>>& loaders,
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
  std::vector<std::pair<std::shared_ptr<detail::AnyPreparedLoader>, bool>> changed_;
};

/// Lets backward know of the scope while it lasts.
class JoinInProgress {
 public:
  JoinInProgress(detail::AcceleratorCore& core, detail::JoinScope& scope) : core_(core) {
    if (core.join != nullptr) {
      throw StateError("join_uneven_inputs: another one is in progress. They cannot be nested.");
    }
    core.join = &scope;
  }
  ~JoinInProgress() { core_.join = nullptr; }
  JoinInProgress(const JoinInProgress&) = delete;
  JoinInProgress& operator=(const JoinInProgress&) = delete;

 private:
  detail::AcceleratorCore& core_;
};

}  // namespace

void Accelerator::join(std::span<const std::shared_ptr<detail::ModelCore>> models,
                       const JoinOptions& options, const std::function<void()>& f,
                       std::source_location where) {
  if (!use_distributed()) {
    f();
    return;
  }
  const EvenBatchesScope evened(core_->loaders, options.even_batches);
  if (options.even_batches.value_or(even_batches())) {
    f();
    return;
  }
  // In the order in which backward takes them.
  std::vector<detail::DataParallel*> joined;
  std::vector<std::shared_ptr<detail::ModelCore>> living;
  detail::living_models(living);
  for (const auto& model : living) {
    const bool wanted = std::ranges::find(models, model) != models.end();
    if (wanted) joined.push_back(model->parallel.get());
  }
  if (joined.empty()) {
    detail::warn(
        "join_uneven_inputs: none of the models averages gradients, so that there is nothing to "
        "join.");
    f();
    return;
  }
  const detail::AtCallSite here(where);
  detail::JoinScope scope(std::move(joined));
  {
    const JoinInProgress in_progress(*core_, scope);
    f();
  }
  scope.finish();
}

// ---- agreement ----------------------------------------------------------------------------------

bool Accelerator::agree_to_stop(bool stop, std::source_location where) const {
  if (!use_distributed()) return stop;
  const auto flag = at::full({1}, stop ? 1 : 0, at::TensorOptions(at::kInt).device(device()));
  return accelerate::reduce(flag, Reduction::kMax, 1.0, where).item<int>() != 0;
}

bool Accelerator::check_trigger(std::source_location where) {
  const bool raised = agree_to_stop(trigger_, where);
  if (raised) trigger_ = false;
  return raised;
}

// ---- what is the case ---------------------------------------------------------------------------

bool Accelerator::multi_device() const {
  return use_distributed() && distributed_type() != DistributedType::kMultiCpu;
}

bool Accelerator::should_save_model() const {
  return core_->project.save_on_each_node ? is_local_main_process() : is_main_process();
}

void Accelerator::set_even_batches(bool even) {
  core_->options.dataloader_config.even_batches = even;
}

const std::optional<std::filesystem::path>& Accelerator::project_dir() const {
  return core_->project.project_dir;
}
const std::optional<std::filesystem::path>& Accelerator::logging_dir() const {
  return core_->project.logging_dir;
}
std::int64_t Accelerator::save_iteration() const { return core_->project.iteration; }

std::optional<MeshLayout> Accelerator::torch_device_mesh() const {
  const auto config = parallelism_config();
  return config ? config->mesh() : std::nullopt;
}

namespace {

std::int64_t rank_in(const Accelerator& accelerator, const char* dimension) {
  if (!accelerator.parallelism_config()) {
    throw StateError(str("There is no ", dimension,
                         " rank without a parallelism_config. Give one to the first "
                         "`Accelerator`."));
  }
  const auto mesh = accelerator.torch_device_mesh();
  if (!mesh || !mesh->has(dimension)) return 0;
  return mesh->local_rank(dimension, accelerator.process_index());
}

}  // namespace

std::int64_t Accelerator::tensor_parallel_rank() const { return rank_in(*this, "tp"); }
std::int64_t Accelerator::context_parallel_rank() const { return rank_in(*this, "cp"); }
std::int64_t Accelerator::data_parallel_rank() const { return rank_in(*this, "dp_replicate"); }
std::int64_t Accelerator::data_parallel_shard_rank() const { return rank_in(*this, "dp_shard"); }

}  // namespace accelerate
