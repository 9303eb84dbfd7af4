// accelerate/parallel/context_parallel.h - attention over a sequence that several processes share.
//
//     // cp_size 2: each process holds half of the sequence.
//     auto split = accelerator.maybe_context_parallel({.buffers = {x, y}, .buffer_seq_dims = {1,
//     1}}); accelerator.backward(loss(model(x), y));
//
// Within the scope `at::scaled_dot_product_attention` sees the whole sequence, in models that were
// written for one process too. Part of accelerate/parallel.h; docs/parallelism.md describes it.
//
// The sequence is in head-tail order: of 2 * P chunks process r holds the chunks r and 2 * P - 1 -
// r. With causal attention all processes then have equally much to compute.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

struct ContextParallelAttentionOptions {
  /// A position sees itself and what comes before it; all positions of the sequence if false.
  bool is_causal = false;
  /// Unset: 1 / sqrt(width).
  std::optional<double> scale = std::nullopt;
  /// Keys and values have fewer heads than queries, by a whole factor.
  bool enable_gqa = false;
  /// allgather: keys and values of all processes at once. alltoall: block by block around the ring,
  /// in the memory of two blocks. Unset: that of the run's `cp_handler`, else allgather.
  std::optional<std::string> cp_comm_strategy = std::nullopt;
  /// Null: the cp dimension of the run's mesh.
  c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr;
};

/// Collective in the group, and so is its backward. `at::scaled_dot_product_attention` over the
/// sequence of all processes: [batch, heads, length of this process, width], or three dimensions
/// without heads. Blocks are put together in float32 (float64 for float64). Under autocast inputs
/// are cast as for `at::scaled_dot_product_attention`. There is no dropout.
///
/// Throws `ArgumentError` for shapes that do not fit, `StateError` without a group.
[[nodiscard]] ACCELERATE_API at::Tensor context_parallel_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const ContextParallelAttentionOptions& options = {},
    std::source_location where = std::source_location::current());

/// A copy of the part of this process of a tensor along its dimension `dim`, in head-tail order.
/// Throws `ArgumentError` if its length is no multiple of twice the size of the group.
[[nodiscard]] ACCELERATE_API at::Tensor context_parallel_shard(
    const at::Tensor& tensor, std::int64_t dim,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group = nullptr);

/// Collective. The reverse: the whole tensor in its own order, on all processes. The result does
/// not require grad.
[[nodiscard]] ACCELERATE_API at::Tensor context_parallel_unshard(
    const at::Tensor& tensor, std::int64_t dim,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group = nullptr,
    std::source_location where = std::source_location::current());

}  // namespace accelerate
