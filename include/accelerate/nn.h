// accelerate/nn.h - modules in place of those of torch::nn, for speed.
//
//     accelerate::nn::Linear layer(768, 3072);  // where torch::nn::Linear stood
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "accelerate/api.h"

namespace accelerate::nn {

/// A `torch::nn::Linear` in all but speed: fields, names, first values, saved files and printed
/// text are the same. For inputs of three or more dimensions that one runs a product and then
/// another kernel for the bias; here the product adds it.
class ACCELERATE_API LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  /// Shares the parameters of `other`.
  explicit LinearImpl(const torch::nn::LinearImpl& other);
  ~LinearImpl() override;

  /// `input` may have any number of dimensions, the last of `in_features`.
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;
};

TORCH_MODULE(Linear);

}  // namespace accelerate::nn
