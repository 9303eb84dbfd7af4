// accelerate/nn/normalization.h - layer and RMS norm, also of a sum.
//
//     nn::LayerNorm norm(torch::nn::LayerNormOptions({768}));
//     y = norm(x);
//     std::tie(y, x) = norm->forward_add(attended, x);  // x = attended + x; y = norm(x)
//
// Numbers are those of at::layer_norm and at::rms_norm. Under autocast the result has its 16-bit
// dtype (at::layer_norm: float32, which the next product converts again); statistics and parameters
// are float32, and the result is rounded once. A GPU computes norm and sum by one kernel.
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::nn {

/// A `torch::nn::LayerNorm` with the same fields, names, initial values, saved files and printed
/// text.
class ACCELERATE_API LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  ~LayerNormImpl() override;

  /// The last dimensions of `input` are those of `normalized_shape`.
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);
  /// {norm(x + residual), x + residual}. Throws `ArgumentError` if the shapes differ.
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> forward_add(const at::Tensor& x,
                                                              const at::Tensor& residual);

  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  explicit LayerNormImpl(const torch::nn::LayerNormImpl& other);
};
TORCH_MODULE(LayerNorm);

struct RMSNormOptions {
  std::vector<std::int64_t> normalized_shape = {};
  /// Unset: the difference between 1 and the next number of the dtype of the input.
  std::optional<double> eps = std::nullopt;
  bool elementwise_affine = true;

  bool operator==(const RMSNormOptions&) const = default;
};

/// `torch.nn.RMSNorm` of PyTorch, which LibTorch has not: the parameter `weight` begins as ones.
class ACCELERATE_API RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  /// Throws `ArgumentError` for an empty `normalized_shape`.
  explicit RMSNormImpl(RMSNormOptions options);
  RMSNormImpl(std::int64_t width, std::optional<double> eps);
  ~RMSNormImpl() override;
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  [[nodiscard]] at::Tensor forward(const at::Tensor& input);
  /// {norm(x + residual), x + residual}. Throws `ArgumentError` if the shapes differ.
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> forward_add(const at::Tensor& x,
                                                              const at::Tensor& residual);

  RMSNormOptions options;
  at::Tensor weight;
};
TORCH_MODULE(RMSNorm);

}  // namespace accelerate::nn
