#include "accelerate/big_modeling/hooks.h"

#include <ATen/Functions.h>

#include "accelerate/operations/tensors.h"
#include "accelerate/tree/ivalue.h"

namespace accelerate {

ModelHook::~ModelHook() = default;
void ModelHook::init_hook(torch::nn::Module&) {}
ModelArgs ModelHook::pre_forward(torch::nn::Module&, ModelArgs args) { return args; }
c10::IValue ModelHook::post_forward(torch::nn::Module&, c10::IValue output) { return output; }
void ModelHook::detach_hook(torch::nn::Module&) {}

SequentialHook::SequentialHook(std::vector<std::shared_ptr<ModelHook>> hooks)
    : hooks_(std::move(hooks)) {}

void SequentialHook::init_hook(torch::nn::Module& module) {
  for (const auto& hook : hooks_) hook->init_hook(module);
}

ModelArgs SequentialHook::pre_forward(torch::nn::Module& module, ModelArgs args) {
  for (const auto& hook : hooks_) args = hook->pre_forward(module, std::move(args));
  return args;
}

c10::IValue SequentialHook::post_forward(torch::nn::Module& module, c10::IValue output) {
  for (const auto& hook : hooks_) output = hook->post_forward(module, std::move(output));
  return output;
}

void SequentialHook::detach_hook(torch::nn::Module& module) {
  for (const auto& hook : hooks_) hook->detach_hook(module);
}

bool SequentialHook::no_grad() const {
  for (const auto& hook : hooks_) {
    if (hook->no_grad()) return true;
  }
  return false;
}

void AlignDevicesHook::init_hook(torch::nn::Module& module) {
  if (!options_.execution_device) return;
  const auto move = [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensor.set_data(tensor.detach().to(*options_.execution_device));
  };
  for (const auto& tensor : module.parameters(options_.place_submodules)) move(tensor);
  for (const auto& tensor : module.buffers(options_.place_submodules)) move(tensor);
}

ModelArgs AlignDevicesHook::pre_forward(torch::nn::Module&, ModelArgs args) {
  if (options_.io_same_device) input_device_ = find_device(args);
  if (!options_.execution_device) return args;
  return send_to_device(std::move(args), *options_.execution_device);
}

c10::IValue AlignDevicesHook::post_forward(torch::nn::Module&, c10::IValue output) {
  if (!options_.io_same_device || !input_device_) return output;
  return send_to_device(std::move(output), *input_device_);
}

}  // namespace accelerate
