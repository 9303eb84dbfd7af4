// accelerate/nn/attention.h - rotary positions, and attention to the tokens before.
//
//     nn::CausalSelfAttention attend({.embed_dim = 768, .num_heads = 12, .rotary_base = 10000});
//     x = x + attend(norm(x));  // [batch, length, 768]
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/nn/linear.h"

namespace accelerate::nn {

struct RotaryEmbeddingOptions {
  /// Width of a head, an even number.
  std::int64_t dim = 0;
  std::int64_t max_positions = 8192;
  double base = 10000;

  bool operator==(const RotaryEmbeddingOptions&) const = default;
};

/// Rotary position embedding as Llama's in Hugging Face Transformers: the two halves of a head are
/// rotated (`rotate_half`). It has no parameters and no buffers. Angles and products are float32,
/// results are rounded once to the dtype of the input.
class ACCELERATE_API RotaryEmbeddingImpl : public torch::nn::Cloneable<RotaryEmbeddingImpl> {
 public:
  /// Throws `ArgumentError` if `dim` is not positive and even, or `max_positions` not positive.
  explicit RotaryEmbeddingImpl(const RotaryEmbeddingOptions& options);
  ~RotaryEmbeddingImpl() override;
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// The rotated `q` and `k`, both [batch, heads, length, dim]; their numbers of heads may differ.
  /// `positions` are int64, [length] or [batch, length], below `max_positions`; undefined: 0, 1,
  /// ... Throws `ArgumentError` for other shapes and for a length above `max_positions`.
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                                          const at::Tensor& positions = {});

  RotaryEmbeddingOptions options;

 private:
  struct Tables;
  std::shared_ptr<Tables> tables_;
};
TORCH_MODULE(RotaryEmbedding);

struct CausalSelfAttentionOptions {
  std::int64_t embed_dim = 0;
  std::int64_t num_heads = 1;
  /// Several heads share a key and a value. Unset: each head has its own.
  std::optional<std::int64_t> num_kv_heads = std::nullopt;
  /// Of the weights of attention, in training.
  double dropout = 0;
  bool bias = true;
  /// Rotates queries and keys. Unset: no rotation.
  std::optional<double> rotary_base = std::nullopt;
  /// With `rotary_base`: positions are below it.
  std::int64_t max_positions = 8192;

  bool operator==(const CausalSelfAttentionOptions&) const = default;
};

/// Self attention of a decoder by `at::scaled_dot_product_attention`. Its parameters have the names
/// and initial values of `torch.nn.MultiheadAttention`: `in_proj_weight` (queries, keys, values),
/// `in_proj_bias`, `out_proj.weight`, `out_proj.bias`. Batches come first.
class ACCELERATE_API CausalSelfAttentionImpl
    : public torch::nn::Cloneable<CausalSelfAttentionImpl> {
 public:
  /// Throws `ArgumentError` if the heads do not divide `embed_dim`, or `num_kv_heads` the heads.
  explicit CausalSelfAttentionImpl(const CausalSelfAttentionOptions& options);
  ~CausalSelfAttentionImpl() override;
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// `x` is [batch, length, embed_dim]. `positions` are for the rotation, see `RotaryEmbedding`.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const at::Tensor& positions = {});

  CausalSelfAttentionOptions options;
  at::Tensor in_proj_weight, in_proj_bias;
  Linear out_proj{nullptr};
  RotaryEmbedding rotary{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TORCH_MODULE(CausalSelfAttention);

}  // namespace accelerate::nn
