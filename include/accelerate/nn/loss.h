// accelerate/nn/loss.h - cross entropy that keeps no float32 copy of the logits.
//
//     auto loss = nn::cross_entropy(logits.flatten(0, 1), target.flatten());
//
// Compute it in the forward of the model: a prepared model under mixed precision converts what it
// returns to float32, so that the copy would be made before the loss is computed.
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/modules/loss.h>
#include <torch/nn/options/loss.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "accelerate/api.h"

namespace accelerate::nn {

/// By the words of PyTorch: weight, ignore_index, reduction, label_smoothing.
using CrossEntropyOptions = torch::nn::CrossEntropyLossOptions;

/// The numbers of `torch::nn::functional::cross_entropy`: a float32 loss under autocast, else one
/// of the dtype of `logits`.
///
/// For 16-bit or float32 logits [N, C] on a GPU, class indices [N] and no class weights, one kernel
/// computes the loss from the logits, and backward turns them into their gradient, in place if they
/// are not used elsewhere. Then `retain_graph` is needed, as always, for a second backward.
[[nodiscard]] ACCELERATE_API at::Tensor cross_entropy(const at::Tensor& logits,
                                                      const at::Tensor& target,
                                                      const CrossEntropyOptions& options = {});

/// `cross_entropy` as a module, with the fields, names and printed text of
/// `torch::nn::CrossEntropyLoss`.
class ACCELERATE_API CrossEntropyLossImpl : public torch::nn::CrossEntropyLossImpl {
 public:
  explicit CrossEntropyLossImpl(const CrossEntropyOptions& options = {});
  ~CrossEntropyLossImpl() override;

  [[nodiscard]] at::Tensor forward(const at::Tensor& logits, const at::Tensor& target);
  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  explicit CrossEntropyLossImpl(const torch::nn::CrossEntropyLossImpl& other);
};
TORCH_MODULE(CrossEntropyLoss);

}  // namespace accelerate::nn
