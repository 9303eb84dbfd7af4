#include "accelerate/nn/lora_linear.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <cmath>
#include <string_view>

#include "accelerate/errors.h"
#include "core/text.h"
#include "modeling/tensors.h"

namespace accelerate::nn {
namespace {

bool is_of_adapter(std::string_view name) {
  for (const std::string_view part : {"lora_A.weight", "lora_B.weight"}) {
    if (name == part || (name.ends_with(part) && name[name.size() - part.size() - 1] == '.')) {
      return true;
    }
  }
  return false;
}

}  // namespace

LoraFactorImpl::LoraFactorImpl(std::int64_t rows, std::int64_t columns) {
  weight = register_parameter("weight", at::empty({rows, columns}));
}

LoraLinearImpl::LoraLinearImpl(std::int64_t in_features, std::int64_t out_features,
                               const LoraOptions& options)
    : torch::nn::LinearImpl(torch::nn::LinearOptions(in_features, out_features).bias(options.bias)),
      lora_(options) {
  if (options.r < 1 || !(options.lora_dropout >= 0 && options.lora_dropout < 1)) {
    throw ArgumentError(
        detail::str("LoraOptions has r = ", options.r, " and lora_dropout = ", options.lora_dropout,
                    ". Give a rank of at least 1 and a dropout from 0 to below 1."));
  }
  lora_A = register_module("lora_A", LoraFactor(options.r, in_features));
  lora_B = register_module("lora_B", LoraFactor(out_features, options.r));
  weight.set_requires_grad(false);
  if (bias.defined()) bias.set_requires_grad(false);
  if (!lora_A->weight.is_meta()) reset_adapter();
}

LoraLinearImpl::~LoraLinearImpl() = default;

/// The clone of a module around this one puts other children here, past the members.
void LoraLinearImpl::find_factors() {
  const auto factors = children();
  if (factors.front() == lora_A.ptr()) return;
  lora_A = LoraFactor(std::dynamic_pointer_cast<LoraFactorImpl>(factors.front()));
  lora_B = LoraFactor(std::dynamic_pointer_cast<LoraFactorImpl>(factors.back()));
}

std::shared_ptr<torch::nn::Module> LoraLinearImpl::clone(
    const std::optional<c10::Device>& device) const {
  const at::NoGradGuard no_grad;
  auto copy =
      std::make_shared<LoraLinearImpl>(options.in_features(), options.out_features(), lora_);
  copy->train(is_training());
  const auto parameters = copy->named_parameters();
  for (const auto& item : named_parameters()) {
    const auto& from = item.value();
    auto to = parameters[item.key()];
    to.set_data(device && from.device() != *device ? from.to(*device) : from.clone());
    to.set_requires_grad(from.requires_grad());
  }
  return copy;
}

void LoraLinearImpl::reset_adapter() {
  const at::NoGradGuard no_grad;
  find_factors();
  for (const auto& factor : {lora_A, lora_B}) {
    if (!factor->weight.is_meta()) continue;
    detail::modeling::replace_data(
        factor->weight,
        at::empty(factor->weight.sizes(), factor->weight.options().device(at::kCPU)), "an adapter");
  }
  torch::nn::init::kaiming_uniform_(lora_A->weight, std::sqrt(5.0));
  lora_B->weight.zero_();
}

at::Tensor LoraLinearImpl::forward(const at::Tensor& input) {
  find_factors();
  const auto base = at::linear(input, weight, bias);
  auto x = input.to(lora_A->weight.scalar_type());
  if (lora_.lora_dropout > 0) x = at::dropout(x, lora_.lora_dropout, is_training());
  const auto scale = lora_.lora_alpha / static_cast<double>(lora_.r);
  const auto update = at::linear(at::linear(x, lora_A->weight), lora_B->weight) * scale;
  return base + update.to(base.scalar_type());
}

std::vector<at::Tensor> mark_only_lora_as_trainable(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    auto* const layer = dynamic_cast<LoraLinearImpl*>(module.get());
    if (layer == nullptr) continue;
    const auto factors = layer->named_parameters();
    if (factors["lora_A.weight"].is_meta()) layer->reset_adapter();
  }
  std::vector<at::Tensor> trained;
  for (const auto& item : model.named_parameters()) {
    const bool is_trained = is_of_adapter(item.key());
    item.value().set_requires_grad(is_trained);
    if (is_trained) trained.push_back(item.value());
  }
  if (trained.empty()) {
    throw ArgumentError(
        "The model has no adapters. Build it with accelerate::nn::LoraLinear in place of "
        "torch::nn::Linear.");
  }
  return trained;
}

StateDict lora_state_dict(const torch::nn::Module& model) {
  StateDict adapters("Tensor");
  for (const auto& item : model.named_parameters()) {
    if (is_of_adapter(item.key())) adapters.insert(item.key(), item.value());
  }
  return adapters;
}

}  // namespace accelerate::nn
