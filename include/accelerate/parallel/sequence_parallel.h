// accelerate/parallel/sequence_parallel.h - Ulysses: each process holds a part of the sequence, and
// for attention a part of the heads over the whole sequence.
//
//     auto [model, optimizer, loader] = accelerator.prepare(net, std::move(adamw), data);
//     auto batches = accelerator.deepspeed_ulysses_dl_adapter(loader, model);
//     for (auto& batch : batches) {  // a part of the sequence
//       auto loss = cross_entropy(model(batch["input_ids"], batch["position_ids"]), ...);
//       accelerator.backward(sp_weighted_loss(loss, batch["shift_labels"]));
//     }
//
// With `sp_size` above 1 prepared models in training mode do so for each call of
// `at::scaled_dot_product_attention`; in evaluation mode each process has whole samples. Part of
// accelerate/parallel.h; docs/parallelism.md describes it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <source_location>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

struct UlyssesAttentionOptions {
  double dropout_p = 0.0;
  /// A position sees itself and what comes before it; all positions of the sequence if false.
  bool is_causal = false;
  /// Unset: 1 / sqrt(width).
  std::optional<double> scale = std::nullopt;
  /// Keys and values have fewer heads than queries, by a whole factor.
  bool enable_gqa = false;
  /// Null: the sp dimension of the run's mesh.
  c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr;
};

/// Collective in the group, and so is its backward. `at::scaled_dot_product_attention` over the
/// sequence whose consecutive parts the processes hold: [batch, heads, length of this process,
/// width], of equal lengths. One message brings the whole sequence of `heads / P` heads to each
/// process, a second one the result back.
///
/// Throws `ArgumentError` for shapes that do not fit: P processes must divide the heads of queries,
/// and divide those of keys or be a multiple of them (each head then goes to several processes);
/// `StateError` without a group.
[[nodiscard]] ACCELERATE_API at::Tensor ulysses_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const UlyssesAttentionOptions& options = {},
    std::source_location where = std::source_location::current());

/// Collective in the group: null means the sp dimension of the run's mesh, and a group of context
/// parallelism will do as well. The mean loss over the tokens of all processes, given the mean over
/// those of this one: the labels that are not -100. The same on all processes.
///
/// Backward through it gives a process P times its part of the gradient, because prepared models
/// average gradients over all processes that share a sequence: together that is the gradient of
/// one process with the whole sequence.
[[nodiscard]] ACCELERATE_API at::Tensor sp_weighted_loss(
    const at::Tensor& loss, const at::Tensor& shift_labels,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group = nullptr,
    std::source_location where = std::source_location::current());

}  // namespace accelerate
