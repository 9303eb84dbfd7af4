// accelerate/nn/linear.h - a Linear layer and the activation behind it.
//
//     nn::Linear up(768, 3072, nn::Activation::kGeluTanh);  // torch::gelu(linear(x), "tanh")
//     nn::Linear down(3072, 768);
//     y = down(up(x));
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>

#include "accelerate/api.h"

namespace accelerate::nn {

enum class Activation : std::uint8_t {
  kNone,
  kRelu,
  /// torch::gelu(x)
  kGelu,
  /// torch::gelu(x, "tanh")
  kGeluTanh,
  kSilu,
};

/// A faster `torch::nn::Linear` with the same fields, names, initial values and saved files, and
/// the same printed text without an activation. For inputs of three or more dimensions LibTorch
/// runs a matrix product and a second kernel for the bias; here the product adds the bias.
///
/// With an activation, one kernel of a GPU computes the gradients of activation and bias.
class ACCELERATE_API LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  LinearImpl(const torch::nn::LinearOptions& options, Activation activation);
  LinearImpl(std::int64_t in_features, std::int64_t out_features, Activation activation);
  /// Shares the parameters of `other`.
  explicit LinearImpl(const torch::nn::LinearImpl& other,
                      Activation activation = Activation::kNone);
  ~LinearImpl() override;

  /// `input` may have any number of dimensions; the last one has size `in_features`.
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

  [[nodiscard]] Activation activation() const noexcept { return activation_; }
  void pretty_print(std::ostream& stream) const override;
  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  Activation activation_ = Activation::kNone;
};
TORCH_MODULE(Linear);

}  // namespace accelerate::nn
