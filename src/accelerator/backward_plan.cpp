#include "accelerator/backward_plan.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerator/model_registry.h"
#include "core/text.h"
#include "fp8/delayed_scaling.h"
#include "parallel/join.h"
#include "parallel/own_backward.h"

namespace accelerate::detail::accelerator {
namespace {

/// Whether backward, which adds gradients to `inputs` alone if there are any, comes to a model.
bool is_asked_for(const ModelCore& model, const std::vector<at::Tensor>& inputs) {
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

bool is_own(const BackwardCall& call, const ModelCore* model) {
  return std::ranges::any_of(call.own, [&](const auto& own) { return own.get() == model; });
}

}  // namespace

/// Forgets the models of a backward, which it keeps alive, at its end.
class BackwardPlan::Cleared {
 public:
  explicit Cleared(BackwardPlan& plan) : plan_(plan) { plan_.clear(); }
  ~Cleared() { plan_.clear(); }
  Cleared(const Cleared&) = delete;
  Cleared& operator=(const Cleared&) = delete;

 private:
  BackwardPlan& plan_;
};

void BackwardPlan::clear() {
  joined_.clear();
  local_.clear();
  reached_.clear();
  candidates_.clear();
  unseen_.clear();
  models_.clear();
}

void BackwardPlan::run(const BackwardCall& call, c10::function_ref<void()> autograd) {
  const Cleared cleared(*this);
  arm(call);
  try {
    const parallel::OwnBackward own;
    autograd();
  } catch (...) {
    for (auto* model : reached_) model->unfinished = true;
    for (auto* model : local_) model->unfinished = true;
    throw;
  }
  for (auto* model : reached_) {
    model->engine->after_backward();
    // Gradients of earlier passes were averaged along with these.
    model->strayed = false;
  }
  for (auto* model : local_) model->engine->after_backward();
  for (const auto& model : call.own) {
    if (!model->delayed_scaling) continue;
    model->delayed_scaling->update(fp8::DelayedScaling::kBackward);
  }
  if (!reached_.empty()) ++synchronized_;
  check_unseen();
}

void BackwardPlan::arm(const BackwardCall& call) {
  find_reached(call);
  if (reached_.empty() && local_.empty()) return;
  check_finished();
  if (call.join != nullptr) {
    for (auto* model : reached_) {
      if (auto* joinable = model->engine->joinable()) joined_.push_back(joinable);
    }
    call.join->announce(joined_, leaves_);
  }
  const auto pass = [&](bool synchronizes) {
    return parallel::BackwardPass{
        .loss = call.loss, .leaves = leaves_, .synchronizes = synchronizes};
  };
  for (auto* model : reached_) model->engine->before_backward(pass(true));
  for (auto* model : local_) model->engine->before_backward(pass(false));
}

void BackwardPlan::find_reached(const BackwardCall& call) {
  list_model_registry(models_);
  bool local = false;
  for (std::size_t i = 0; i < models_.size(); ++i) {
    auto* const model = models_[i].get();
    if (is_superseded(call, i)) continue;
    if (model->synchronizes) candidates_.push_back(model);
    if (!model->synchronizes && model->engine->wants_local_backward()) local = true;
  }
  if (candidates_.empty() && !local) return;
  leaves_.walk(call.loss);
  for (auto* model : candidates_) {
    if (model->engine->reached_by(leaves_)) reached_.push_back(model);
  }
  for (std::size_t i = 0; local && i < models_.size(); ++i) {
    auto* const model = models_[i].get();
    if (model->synchronizes || !model->engine->wants_local_backward()) continue;
    if (!is_superseded(call, i) && model->engine->reached_by(leaves_)) local_.push_back(model);
  }
  if (reached_.empty() && local_.empty()) {
    if (auto* model = only_static(call)) reached_.push_back(model);
  }
  for (const auto* model : candidates_) {
    if (std::ranges::find(reached_, model) != reached_.end()) continue;
    for (auto& parameter : model->module->parameters()) {
      const auto mark = mark_of(parameter);
      unseen_.emplace_back(std::move(parameter), mark);
    }
  }
  std::erase_if(reached_, [&](const auto* model) { return !is_asked_for(*model, call.inputs); });
}

/// A module that was prepared several times is trained once: as this accelerator has prepared it,
/// or else as it was prepared last.
bool BackwardPlan::is_superseded(const BackwardCall& call, std::size_t index) const {
  const auto* const model = models_[index].get();
  for (std::size_t i = 0; i < models_.size(); ++i) {
    const auto* const other = models_[i].get();
    if (i == index || other->module != model->module) continue;
    const bool own = is_own(call, model);
    if (own == is_own(call, other) ? index < i : !own) return true;
  }
  return false;
}

/// Recomputed parts hide their parameters, but all steps of a static graph train the same model:
/// the only one, or null.
ModelCore* BackwardPlan::only_static(const BackwardCall& call) const {
  ModelCore* only = nullptr;
  const bool any_own =
      std::ranges::any_of(candidates_, [&](const auto* one) { return is_own(call, one); });
  for (auto* model : candidates_) {
    if (any_own && !is_own(call, model)) continue;
    if (only != nullptr) return nullptr;
    only = model;
  }
  return only != nullptr && only->engine->is_static() ? only : nullptr;
}

/// Whether a gradient has come shows here.
BackwardPlan::GradientMark BackwardPlan::mark_of(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined()) return {};
  return {gradient.unsafeGetTensorImpl(), gradient._version()};
}

/// After an error in a backward some processes may wait for what others have never sent.
void BackwardPlan::check_finished() const {
  const auto unfinished = [](const auto* one) { return one->unfinished; };
  if (!std::ranges::any_of(reached_, unfinished) && !std::ranges::any_of(local_, unfinished)) {
    return;
  }
  const bool is_sharded = std::ranges::any_of(models_, [&](const auto& one) {
    return unfinished(one.get()) && (one->engine->is_sharded() || one->engine->divides_states());
  });
  throw StateError(str(
      "backward: an error ended the last one in the middle of averaging gradients, which cannot "
      "be taken up again. ",
      is_sharded ? "The model still has the weights of the last step: keep them (get_state_dict "
                   "or save_state), give the model back (free_memory), build a new one, prepare "
                   "it and load them (load_state_dict or load_state)."
                 : "Give the model back (free_memory) and prepare it anew."));
}

/// Models that the loss was not seen to depend on must have got no gradient.
void BackwardPlan::check_unseen() const {
  const auto changed = std::ranges::find_if(
      unseen_, [](const auto& one) { return mark_of(one.first) != one.second; });
  if (changed == unseen_.end()) return;
  throw ArgumentError(detail::str(
      "backward: a prepared model got gradients that were not averaged (a parameter of shape ",
      changed->first.sizes(),
      "), since the graph of the loss does not show its parameters: parts that are computed "
      "again in backward hide them. Use activation_checkpoint, which hides none, or set "
      "static_graph of DistributedDataParallelKwargs and prepare one model."));
}

}  // namespace accelerate::detail::accelerator
