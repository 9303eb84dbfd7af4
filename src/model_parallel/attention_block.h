// src/model_parallel/attention_block.h - attention to a block of keys, in a form in which blocks
// can be put together.
//
// The attention of a query to all keys is the mean of its attention to each block, weighted by
// exp(log_sum) of the block: `merge`. The gradients of a block need the result over all blocks, not
// that of the block.
#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate::detail::model_parallel {

/// Attention of some queries.
struct PartialAttention {
  at::Tensor out;      // [batch, heads, queries, width]
  at::Tensor log_sum;  // [batch, heads, queries]: log of the sum of exp(scores)
};

/// The type in which blocks are put together: float64 for float64, else float32.
[[nodiscard]] at::ScalarType accumulation_type(const at::Tensor& tensor);

/// Keys and values may have fewer heads than queries, which divide theirs. If `causal`, query i
/// sees the keys up to i. Fused kernels on the CPU, and on GPUs in 16 bits; else matrix products.
[[nodiscard]] PartialAttention attend_block(const at::Tensor& query, const at::Tensor& key,
                                            const at::Tensor& value, bool causal, double scale);

/// Takes the attention of the same queries to another block into `all`, which are tensors of
/// `accumulation_type`, or views of them.
void merge(const PartialAttention& all, const PartialAttention& block);

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

/// What the block adds to the gradients, given the gradient of the result over all blocks.
[[nodiscard]] AttentionGradients block_gradients(const at::Tensor& gradient,
                                                 const PartialAttention& all,
                                                 const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, bool causal,
                                                 double scale);

}  // namespace accelerate::detail::model_parallel
