// src/model_parallel/layer_rules.h - what layers compute of which a process has a part.
//
// The functions are used by the layers of accelerate::nn; the rules do the same where an operator
// of a stock layer uses a parameter that a plan has cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lazy/operator_rule.h"
#include "model_parallel/regions.h"

namespace accelerate::detail::model_parallel {

/// Activations between layers are cut along their sequence.
struct SequenceCut {
  bool enabled = false;
  std::int64_t dim = 1;
};

/// How a linear layer or an embedding is cut; `name` goes with its messages.
struct LayerCut {
  ProcessGroupPtr group;
  std::string name = {};
  SequenceCut sequence = {};
  /// Columns: the results of all processes are joined. The bias is whole then.
  bool gathers = false;
  /// Rows: each process gets the whole input and takes its part.
  bool takes_input = false;
};

/// Rows of the weight, that is columns of the product: [out / t, in]. `bias` may be undefined.
[[nodiscard]] at::Tensor column_linear(const LayerCut& cut, const at::Tensor& input,
                                       const at::Tensor& weight, const at::Tensor& bias);
/// [out, in / t]; the bias is whole and added to the sum.
[[nodiscard]] at::Tensor row_linear(const LayerCut& cut, const at::Tensor& input,
                                    const at::Tensor& weight, const at::Tensor& bias);

/// Rows of an embedding: [vocabulary / t, width]. `first` is the id of the first one.
[[nodiscard]] at::Tensor vocab_embedding(const LayerCut& cut, const at::Tensor& ids,
                                         const at::Tensor& weight, std::int64_t padding_idx,
                                         std::int64_t whole_rows);

/// What a cut weight is used for.
enum class WeightUse : std::uint8_t { kColumns, kRows, kVocabulary, kEmbeddingColumns };

/// For a weight, by `WeightUse` and the sizes that this process has. A weight that is tied has
/// several uses.
class WeightRule final : public lazy::OperatorRule {
 public:
  WeightRule(std::vector<std::int64_t> local_sizes, std::int64_t whole_rows)
      : sizes_(std::move(local_sizes)), whole_rows_(whole_rows) {}

  void add(WeightUse use, LayerCut cut) { uses_.emplace_back(use, std::move(cut)); }
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::size_t argument) override;

 private:
  [[nodiscard]] const std::pair<WeightUse, LayerCut>* use_of(bool as_embedding) const;
  [[nodiscard]] at::Tensor linear(const at::Tensor& input, const at::Tensor& transposed,
                                  const at::Tensor& bias) const;
  [[nodiscard]] at::Tensor embedding(const at::Tensor& weight, const torch::jit::Stack& stack,
                                     std::size_t first) const;

  std::vector<std::int64_t> sizes_;
  std::int64_t whole_rows_;
  std::vector<std::pair<WeightUse, LayerCut>> uses_;
};

/// For a parameter that all processes have whole and use on different parts of a sequence: backward
/// sums its gradients.
class SummedGradientRule final : public lazy::OperatorRule {
 public:
  /// `of_rows`: the bias of a layer whose weight has a rule, which adds it in one operator.
  SummedGradientRule(ProcessGroupPtr group, std::string name, bool of_rows)
      : group_(std::move(group)), name_(std::move(name)), of_rows_(of_rows) {}
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::size_t argument) override;

 private:
  ProcessGroupPtr group_;
  std::string name_;
  bool of_rows_;
};

}  // namespace accelerate::detail::model_parallel
