// accelerate/nn/swiglu.h - the gated feed-forward part of Llama.
//
//     nn::SwiGLU mlp(768, 2048);
//     x = x + mlp(norm(x));
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "accelerate/api.h"
#include "accelerate/nn/linear.h"

namespace accelerate::nn {

struct SwiGLUOptions {
  bool bias = false;

  bool operator==(const SwiGLUOptions&) const = default;
};

/// down_proj(silu(gate_proj(x)) * up_proj(x)), with the names of Llama. One kernel of a GPU
/// computes the product of both, and one its gradients.
class ACCELERATE_API SwiGLUImpl : public torch::nn::Cloneable<SwiGLUImpl> {
 public:
  SwiGLUImpl(std::int64_t features, std::int64_t hidden_features,
             const SwiGLUOptions& options = {});
  ~SwiGLUImpl() override;
  void reset() override;

  [[nodiscard]] at::Tensor forward(const at::Tensor& x);

  std::int64_t features, hidden_features;
  SwiGLUOptions options;
  Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(SwiGLU);

}  // namespace accelerate::nn
