// src/model_parallel/ring_attention.h - attention over a sequence of which each rank of a group
// holds a part: keys and values come past each rank, block by block, and gradients travel back with
// them.
//
// In head-tail order the sequence is cut into 2 * P chunks, and rank r holds the chunks r and
// 2 * P - 1 - r: in causal attention each rank then has the same number of scores to compute.
#pragma once

#include <ATen/core/Tensor.h>

#include "accelerate/api.h"
#include "model_parallel/sequence_messages.h"

namespace accelerate::detail::model_parallel {

/// How one call of ring attention is computed.
struct Ring final : torch::CustomClassHolder {
  GroupHandle group;
  /// Keys and values of all ranks are gathered at once; else they pass by, one block at a time.
  bool gathers = true;
  bool causal = false;
  double scale = 1.0;
};

/// Collective in the group, and so is its backward. Query, key and value of this rank, of four
/// dimensions: [batch, heads, local length, width]. If causal, lengths are even and equal, and the
/// sequence lies in head-tail order.
[[nodiscard]] at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const c10::intrusive_ptr<Ring>& ring);

}  // namespace accelerate::detail::model_parallel
