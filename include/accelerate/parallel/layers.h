// accelerate/parallel/layers.h - layers of which each process has a part.
//
//     nn::ColumnParallelLinear up(768, 3072, group, {.gather_output = false});
//     nn::RowParallelLinear down(3072, 768, group, {.input_is_parallel = true});
//     y = down(torch::gelu(up(x)));                       // as two torch::nn::Linear
//
// Part of accelerate/parallel.h. `group` is that of "tp" in a mesh; null, or one process, gives the
// whole layer. A layer draws the numbers of the whole one from Torch's generator and keeps its
// part: with the same seed a model begins alike, however it is cut. All calls are collective.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

#include "accelerate/api.h"
#include "accelerate/parallel/regions.h"

namespace accelerate::nn {

struct ColumnParallelLinearOptions {
  bool bias = true;
  /// All processes get the whole result; else each the part of its outputs.
  bool gather_output = true;
  /// The input is cut along its sequence.
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 1;
  /// `forward` leaves the bias to the caller, who adds `bias` of the layer, for example together
  /// with what comes next. Needs `gather_output` off, since `bias` is that of the part.
  bool skip_bias_add = false;
};

/// A Linear whose outputs are divided: `weight` is [out / t, in], `bias` [out / t].
class ACCELERATE_API ColumnParallelLinearImpl
    : public torch::nn::Cloneable<ColumnParallelLinearImpl> {
 public:
  /// Throws `ArgumentError` if `out_features` cannot be divided among the processes, and for
  /// `skip_bias_add` with `gather_output`.
  ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                           ProcessGroupPtr group, const ColumnParallelLinearOptions& options = {});
  ~ColumnParallelLinearImpl() override;
  /// New values: those of a whole new layer.
  void reset() override;
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

  std::int64_t in_features, out_features;
  ColumnParallelLinearOptions options;
  at::Tensor weight, bias;

 private:
  ProcessGroupPtr group_;
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  bool bias = true;
  /// Each process gives the part of the input for its weights; else all give the whole input.
  bool input_is_parallel = false;
  /// The result is cut along its sequence.
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 1;
  /// `forward` leaves the bias to the caller, who adds `bias` of the layer.
  bool skip_bias_add = false;
};

/// A Linear whose inputs are divided: `weight` is [out, in / t]. `bias` is whole, and added to the
/// sum of the parts.
class ACCELERATE_API RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl> {
 public:
  /// Throws `ArgumentError` if `in_features` cannot be divided among the processes.
  RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, ProcessGroupPtr group,
                        const RowParallelLinearOptions& options = {});
  ~RowParallelLinearImpl() override;
  void reset() override;
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

  std::int64_t in_features, out_features;
  RowParallelLinearOptions options;
  at::Tensor weight, bias;

 private:
  ProcessGroupPtr group_;
};
TORCH_MODULE(RowParallelLinear);

/// An Embedding whose rows are divided: `weight` is [num_embeddings / t, embedding_dim].
class ACCELERATE_API VocabParallelEmbeddingImpl
    : public torch::nn::Cloneable<VocabParallelEmbeddingImpl> {
 public:
  /// Throws `ArgumentError` if `num_embeddings` cannot be divided among the processes:
  /// `padded_vocab_size` gives one that can.
  VocabParallelEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim,
                             ProcessGroupPtr group);
  ~VocabParallelEmbeddingImpl() override;
  void reset() override;
  /// Throws `ArgumentError` for ids on the CPU that are not in the vocabulary.
  [[nodiscard]] at::Tensor forward(const at::Tensor& ids);

  std::int64_t num_embeddings, embedding_dim;
  at::Tensor weight;

 private:
  ProcessGroupPtr group_;
};
TORCH_MODULE(VocabParallelEmbedding);

/// `vocab_size` rounded up to a multiple of `divisible_by` for each of `tp_size` processes, as
/// Megatron does: 50257 for 2 processes is 50432.
[[nodiscard]] ACCELERATE_API std::int64_t padded_vocab_size(std::int64_t vocab_size,
                                                            std::int64_t tp_size,
                                                            std::int64_t divisible_by = 128);

struct VocabParallelCrossEntropyOptions {
  /// As that of torch::nn::CrossEntropyLoss.
  double label_smoothing = 0;
  /// Scores behind so many are those of padding, and get no probability. Unset: there are none.
  std::optional<std::int64_t> vocab_size = std::nullopt;
  /// The loss of this target is 0.
  std::int64_t ignore_index = -100;
};

/// Collective. The cross entropy of each target, in float32 (in double for double): `logits` are
/// the scores of the part of the vocabulary that this process has, [..., vocabulary / t], `target`
/// [...] is whole and the same on all processes. The scores of the other processes are not needed:
/// three numbers per target travel.
[[nodiscard]] ACCELERATE_API at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& target, const ProcessGroupPtr& group,
    const VocabParallelCrossEntropyOptions& options = {});

/// Dropout of an activation of which each process has a part along `dim`. The mask is drawn for the
/// whole activation and cut, so that it does not depend on the number of processes, whose
/// generators must be in the same state. Outside of such regions use torch::dropout.
[[nodiscard]] ACCELERATE_API at::Tensor parallel_dropout(const at::Tensor& x, double p,
                                                         bool training, std::int64_t dim,
                                                         const ProcessGroupPtr& group);

}  // namespace accelerate::nn
