#include "accelerate/nn.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>

#include <memory>
#include <optional>

namespace accelerate::nn {

LinearImpl::LinearImpl(const torch::nn::LinearImpl& other) : torch::nn::LinearImpl(other) {}

LinearImpl::~LinearImpl() = default;

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  // If rows are not contiguous, at::linear runs a product and adds the bias with a second kernel.
  if (bias.defined() && input.dim() > 2 && input.layout() == at::kStrided && !input.is_nested() &&
      !input.is_contiguous()) {
    auto shape = input.sizes().vec();
    shape.back() = weight.size(0);
    return at::linear(input.flatten(0, -2), weight, bias).view(shape);
  }
  return at::linear(input, weight, bias);
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(
    const std::optional<c10::Device>& device) const {
  // The base class clones only itself: wrap its clone.
  const auto base = torch::nn::LinearImpl::clone(device);
  return std::make_shared<LinearImpl>(dynamic_cast<const torch::nn::LinearImpl&>(*base));
}

}  // namespace accelerate::nn
