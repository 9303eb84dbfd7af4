#include "accelerator/gradient_watch.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "accelerator/model_registry.h"
#include "core/log.h"
#include "core/text.h"
#include "parallel/own_backward.h"

namespace accelerate::detail::accelerator {
namespace {

using torch::autograd::variable_list;

/// Whether any model has strayed: steps look at nothing else.
std::atomic<bool> any_stray = false;

class Hook final : public torch::autograd::FunctionPostHook {
 public:
  explicit Hook(std::weak_ptr<ModelCore> model) : model_(std::move(model)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    if (!parallel::own_backward_runs()) note();
    return outputs;
  }

 private:
  void note() const {
    const auto model = model_.lock();
    if (!model || !model->synchronizes) return;
    model->strayed = true;
    any_stray = true;
  }

  std::weak_ptr<ModelCore> model_;
};

bool holds(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  return std::ranges::any_of(optimizer.param_groups(), [&](const auto& group) {
    return std::ranges::any_of(group.params(),
                               [&](const at::Tensor& one) { return one.is_same(parameter); });
  });
}

}  // namespace

GradientWatch::GradientWatch(const std::shared_ptr<ModelCore>& model) : model_(model) { renew(); }

GradientWatch::~GradientWatch() { stop(); }

void GradientWatch::stop() {
  if (accumulator_) accumulator_->del_post_hook(hook_);
  accumulator_.reset();
  parameter_ = at::Tensor();
}

void GradientWatch::renew() {
  stop();
  const auto model = model_.lock();
  if (!model) return;
  // The last one: heads are used where parts of a body are not.
  for (const auto& entry : model->module->named_parameters()) {
    if (!entry.value().requires_grad()) continue;
    parameter_ = entry.value();
    name_ = entry.key();
  }
  if (parameter_.defined()) accumulator_ = torch::autograd::impl::grad_accumulator(parameter_);
  if (accumulator_) hook_ = accumulator_->add_post_hook(std::make_unique<Hook>(model_));
}

void warn_of_strays(const torch::optim::Optimizer& optimizer) {
  if (!any_stray) return;
  std::vector<std::shared_ptr<ModelCore>> models;
  list_model_registry(models);
  bool left = false;
  for (const auto& model : models) {
    if (!model->strayed || !model->watch) continue;
    const auto& parameter = model->watch->parameter();
    if (!holds(optimizer, parameter)) {
      left = true;
      continue;
    }
    model->strayed = false;
    if (!parameter.grad().defined()) continue;
    warn_once(
        str("step: the gradients of a prepared model with ", model->module->parameters().size(),
            " parameters (the last one is '", model->watch->name(),
            "') were not averaged over the processes, whose parameters drift apart from now on: "
            "they come from loss.backward(). Call accelerator.backward(loss), or put the call "
            "under no_sync(model) where each process shall keep its own."));
  }
  any_stray = left;
}

}  // namespace accelerate::detail::accelerator
