#include "accelerate/parallel/layers.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "model_parallel/layer_rules.h"
#include "model_parallel/parameter_part.h"

namespace accelerate::nn {

using detail::model_parallel::is_alone;
using detail::model_parallel::LayerCut;
using detail::model_parallel::ParameterPart;
using detail::model_parallel::SummedGradientRule;

namespace {

/// The part of this process of a parameter of a whole layer, registered with the module.
at::Tensor add_part(torch::nn::Module& module, const char* name, const at::Tensor& whole,
                    std::optional<std::int64_t> dim, const ProcessGroupPtr& group) {
  if (!whole.defined()) return module.register_parameter(name, {}, /*requires_grad=*/false);
  if (is_alone(group) || !dim) return module.register_parameter(name, whole.detach());
  auto part = std::make_shared<ParameterPart>();
  part->group = group;
  part->name = name;
  part->sizes = whole.sizes().vec();
  part->dim = dim;
  detail::model_parallel::check_divisible(*part);
  auto parameter = module.register_parameter(name, part->cut(whole.detach()));
  detail::model_parallel::set_part(parameter, std::move(part));
  return parameter;
}

LayerCut cut_of(const char* name, const ProcessGroupPtr& group, bool sequence_parallel,
                std::int64_t sequence_dim) {
  return {.group = group,
          .name = name,
          .sequence = {.enabled = sequence_parallel, .dim = sequence_dim}};
}

torch::nn::LinearImpl whole_linear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::LinearImpl(torch::nn::LinearOptions(in, out).bias(bias));
}

}  // namespace

// ---- columns ------------------------------------------------------------------------------------

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in, std::int64_t out,
                                                   ProcessGroupPtr group,
                                                   const ColumnParallelLinearOptions& chosen)
    : in_features(in), out_features(out), options(chosen), group_(std::move(group)) {
  if (options.skip_bias_add && options.bias && options.gather_output) {
    throw ArgumentError(
        "ColumnParallelLinear: skip_bias_add leaves the bias to the caller, but each process has "
        "its part only, which does not fit a gathered output. Set gather_output = false.");
  }
  ColumnParallelLinearImpl::reset();
}

ColumnParallelLinearImpl::~ColumnParallelLinearImpl() = default;

void ColumnParallelLinearImpl::reset() {
  const auto whole = whole_linear(in_features, out_features, options.bias);
  weight = add_part(*this, "weight", whole.weight, 0, group_);
  bias = add_part(*this, "bias", whole.bias, 0, group_);
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  const auto added = options.skip_bias_add ? at::Tensor() : bias;
  if (is_alone(group_)) return at::linear(input, weight, added);
  const auto y = detail::model_parallel::column_linear(
      cut_of("ColumnParallelLinear", group_, options.sequence_parallel, options.sequence_dim),
      input, weight, added);
  return options.gather_output ? gather_from_region(y, -1, group_) : y;
}

// ---- rows ---------------------------------------------------------------------------------------

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in, std::int64_t out,
                                             ProcessGroupPtr group,
                                             const RowParallelLinearOptions& chosen)
    : in_features(in), out_features(out), options(chosen), group_(std::move(group)) {
  RowParallelLinearImpl::reset();
}

RowParallelLinearImpl::~RowParallelLinearImpl() = default;

void RowParallelLinearImpl::reset() {
  const auto whole = whole_linear(in_features, out_features, options.bias);
  weight = add_part(*this, "weight", whole.weight, 1, group_);
  bias = add_part(*this, "bias", whole.bias, std::nullopt, group_);
  if (is_alone(group_) || !bias.defined()) return;
  if (!options.skip_bias_add || !options.sequence_parallel) return;
  // The caller adds it to a part of the sequence.
  auto known = std::make_shared<ParameterPart>();
  known->group = group_;
  known->name = "bias";
  known->sizes = bias.sizes().vec();
  known->rule = std::make_shared<SummedGradientRule>(group_, "bias of RowParallelLinear",
                                                     /*of_rows=*/false);
  detail::model_parallel::set_part(bias, std::move(known));
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  const auto added = options.skip_bias_add ? at::Tensor() : bias;
  if (is_alone(group_)) return at::linear(input, weight, added);
  auto cut = cut_of("RowParallelLinear", group_, options.sequence_parallel, options.sequence_dim);
  cut.takes_input = !options.input_is_parallel;
  return detail::model_parallel::row_linear(cut, input, weight, added);
}

// ---- vocabulary ---------------------------------------------------------------------------------

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(std::int64_t rows, std::int64_t columns,
                                                       ProcessGroupPtr group)
    : num_embeddings(rows), embedding_dim(columns), group_(std::move(group)) {
  VocabParallelEmbeddingImpl::reset();
}

VocabParallelEmbeddingImpl::~VocabParallelEmbeddingImpl() = default;

void VocabParallelEmbeddingImpl::reset() {
  const torch::nn::EmbeddingImpl whole(torch::nn::EmbeddingOptions(num_embeddings, embedding_dim));
  weight = add_part(*this, "weight", whole.weight, 0, group_);
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& ids) {
  if (is_alone(group_)) return at::embedding(weight, ids);
  return detail::model_parallel::vocab_embedding(cut_of("VocabParallelEmbedding", group_, false, 1),
                                                 ids, weight, -1, num_embeddings);
}

std::int64_t padded_vocab_size(std::int64_t vocab_size, std::int64_t tp_size,
                               std::int64_t divisible_by) {
  if (vocab_size < 1 || tp_size < 1 || divisible_by < 1) {
    throw ArgumentError(detail::str("padded_vocab_size: vocab_size ", vocab_size, ", tp_size ",
                                    tp_size, " and divisible_by ", divisible_by,
                                    " must be 1 or more."));
  }
  const auto multiple = tp_size * divisible_by;
  return (vocab_size + multiple - 1) / multiple * multiple;
}

at::Tensor parallel_dropout(const at::Tensor& x, double p, bool training, std::int64_t dim,
                            const ProcessGroupPtr& group) {
  if (is_alone(group) || !training || p == 0) return at::dropout(x, p, training);
  auto sizes = x.sizes().vec();
  auto& size = sizes[static_cast<std::size_t>(dim < 0 ? dim + x.dim() : dim)];
  const auto share = size;
  size *= group->getSize();
  const auto mask = at::dropout(at::ones(sizes, x.options().requires_grad(false)), p, true);
  return x * mask.narrow(dim, group->getRank() * share, share);
}

}  // namespace accelerate::nn
