#include "accelerator/gradient_watch.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <utility>

#include "parallel/own_backward.h"

namespace accelerate::detail::accelerator {
namespace {

using torch::autograd::variable_list;

std::atomic<bool> strays = false;

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
    strays = true;
  }

  std::weak_ptr<ModelCore> model_;
};

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

bool any_stray() noexcept { return strays; }

void set_any_stray(bool any) noexcept { strays = any; }

}  // namespace accelerate::detail::accelerator
