// accelerate/nn.h - for the forward of a model: faster drop-in replacements for modules of
// torch::nn, and activations that backward computes again.
//
//     accelerate::nn::Linear layer(768, 3072);          // instead of torch::nn::Linear
//     x = accelerate::activation_checkpoint(block, x);  // instead of block(x)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "accelerate/api.h"
#include "accelerate/nn/activation_checkpoint.h"
#include "accelerate/nn/lora_linear.h"

namespace accelerate::nn {

/// A faster `torch::nn::Linear` with the same fields, names, initial values, saved files and
/// printed text. For inputs of three or more dimensions LibTorch runs a matrix product and a second
/// kernel for the bias; here the product adds the bias.
class ACCELERATE_API LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  /// Shares the parameters of `other`.
  explicit LinearImpl(const torch::nn::LinearImpl& other);
  ~LinearImpl() override;

  /// `input` may have any number of dimensions; the last one has size `in_features`.
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;
};

TORCH_MODULE(Linear);

}  // namespace accelerate::nn
