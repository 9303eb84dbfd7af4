#include "model_parallel/layer_rules.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::model_parallel {
namespace {

/// An operator of a backward, on a weight that a forward has saved. A forward that backward
/// computes again records gradients.
bool in_backward() {
  return !at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() >= 0;
}

std::string_view plain_name(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  name.remove_prefix(name.find("::") + 2);
  return name;
}

bool is_copy(std::string_view name) {
  constexpr auto kCopies =
      std::to_array<std::string_view>({"to", "_to_copy", "clone", "contiguous"});
  return std::ranges::find(kCopies, name) != kCopies.end();
}

/// The bytes go elsewhere, or a new tensor takes the shape only.
bool leaves_elements(std::string_view name) {
  return name == "copy_" || name == "set_" || name.ends_with("_like") || name.starts_with("new_");
}

/// A tensor in another type, say, is used as the tensor itself is.
void copy_with_rule(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                    const at::Tensor& tensor) {
  const auto rule = lazy::find_rule(tensor);
  op.callBoxed(stack);
  const auto result = stack.back().toTensor();
  if (!result.is_same(tensor)) lazy::set_rule(result, rule);
}

bool returns_tensors(const c10::OperatorHandle& op) {
  return std::ranges::any_of(op.schema().returns(), [](const auto& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get());
  });
}

at::Tensor product(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(input, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor plus(const at::Tensor& x, const at::Tensor& bias) {
  // Autocast gives products in fewer bits.
  return bias.defined() ? x + bias.to(x.scalar_type()) : x;
}

at::Tensor reduced(const LayerCut& cut, const at::Tensor& partial) {
  const auto region = cut.sequence.enabled ? reduce_scatter_along(cut.sequence.dim) : kReduce;
  return pass(partial, region, cut.group, "sum of " + cut.name);
}

void check_rows_input(const LayerCut& cut, const at::Tensor& input, std::int64_t columns) {
  if (input.dim() > 0 && input.size(-1) == columns) return;
  const bool whole = input.dim() > 0 && input.size(-1) == columns * cut.group->getSize();
  throw ArgumentError(detail::str(
      "The layer '", cut.name, "' is cut by its inputs: each process has ", columns,
      " of them, but the input has shape ", input.sizes(), ". ",
      whole ? "It is whole: the layer before is not cut. Cut that by 'colwise', or this one by "
              "'rowwise_rep'."
            : "Cut the layer before by 'colwise', and let shapes in forward follow the tensors "
              "(-1) instead of the whole model."));
}

}  // namespace

at::Tensor column_linear(const LayerCut& cut, const at::Tensor& input, const at::Tensor& weight,
                         const at::Tensor& bias) {
  const auto x = pass(input, cut.sequence.enabled ? gather_sequence_along(cut.sequence.dim) : kCopy,
                      cut.group, "input of " + cut.name);
  if (!cut.gathers) return product(x, weight, bias);
  return plus(pass(product(x, weight, {}), gather_along(-1), cut.group, "columns of " + cut.name),
              bias);
}

at::Tensor row_linear(const LayerCut& cut, const at::Tensor& input, const at::Tensor& weight,
                      const at::Tensor& bias) {
  auto x = input;
  if (cut.takes_input) x = pass(x, scatter_along(-1), cut.group, "input of " + cut.name);
  check_rows_input(cut, x, weight.size(1));
  const auto sum = reduced(cut, product(x, weight, {}));
  if (!bias.defined() || !cut.sequence.enabled) return plus(sum, bias);
  return plus(sum, pass(bias, kCopy, cut.group, "bias of " + cut.name));
}

at::Tensor vocab_embedding(const LayerCut& cut, const at::Tensor& ids, const at::Tensor& weight,
                           std::int64_t padding_idx, std::int64_t whole_rows) {
  const auto rows = weight.size(0);
  const auto first = cut.group->getRank() * rows;
  if (ids.is_cpu() && ids.numel() > 0) {
    const auto [least, most] = ids.aminmax();
    if (least.item<std::int64_t>() < 0 || most.item<std::int64_t>() >= whole_rows) {
      throw ArgumentError(detail::str(
          "The ids of the embedding '", cut.name, "' are between ", least.item<std::int64_t>(),
          " and ", most.item<std::int64_t>(), ", but it has ", whole_rows, " rows."));
    }
  }
  if (!ids.is_cpu()) {
    at::_assert_async(ids.ge(0).logical_and(ids.lt(whole_rows)).all(),
                      detail::str("The ids of the embedding '", cut.name, "' must be from 0 to ",
                                  whole_rows - 1, "."));
  }
  const auto elsewhere = ids.lt(first).logical_or(ids.ge(first + rows));
  const bool pads_here = padding_idx >= first && padding_idx < first + rows;
  const auto partial = at::embedding(weight, (ids - first).masked_fill(elsewhere, 0),
                                     pads_here ? padding_idx - first : -1)
                           .masked_fill(elsewhere.unsqueeze(-1), 0);
  return reduced(cut, partial);
}

// ---- rules --------------------------------------------------------------------------------------

const std::pair<WeightUse, LayerCut>* WeightRule::use_of(bool as_embedding) const {
  for (const auto& use : uses_) {
    const bool is_linear = use.first == WeightUse::kColumns || use.first == WeightUse::kRows;
    if (is_linear != as_embedding) return &use;
  }
  return nullptr;
}

at::Tensor WeightRule::linear(const at::Tensor& input, const at::Tensor& transposed,
                              const at::Tensor& bias) const {
  const auto weight = transposed.t();
  const auto* use = use_of(/*as_embedding=*/false);
  if (use == nullptr && uses_.front().first == WeightUse::kVocabulary) {
    // A head that uses the weight of an embedding: as `colwise_rep`.
    auto cut = uses_.front().second;
    cut.gathers = true;
    return column_linear(cut, input, weight, bias);
  }
  if (use == nullptr) {
    throw UnsupportedError(
        detail::str("The embedding '", uses_.front().second.name,
                    "' is cut by its columns, but a product uses its weight too. Cut it "
                    "by 'embedding_rowwise'."));
  }
  const auto& [kind, cut] = *use;
  return kind == WeightUse::kColumns ? column_linear(cut, input, weight, bias)
                                     : row_linear(cut, input, weight, bias);
}

at::Tensor WeightRule::embedding(const at::Tensor& weight, const torch::jit::Stack& stack,
                                 std::size_t first) const {
  const auto* const use = use_of(/*as_embedding=*/true);
  const auto& cut = use == nullptr ? uses_.front().second : use->second;
  const auto& ids = stack[first + 1].toTensor();
  const auto padding_idx = stack[first + 2].toInt();
  if (stack[first + 3].toBool() || stack[first + 4].toBool()) {
    throw UnsupportedError(
        detail::str("The embedding '", cut.name,
                    "' is cut over processes, where scale_grad_by_freq and sparse "
                    "gradients do not work. Turn them off."));
  }
  if (use != nullptr && use->first == WeightUse::kEmbeddingColumns) {
    const auto columns = at::embedding(weight, ids, padding_idx);
    if (!cut.gathers) return columns;
    return pass(columns, gather_along(-1), cut.group, "columns of " + cut.name);
  }
  return vocab_embedding(cut, ids, weight, padding_idx, whole_rows_);
}

bool WeightRule::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                     std::size_t argument) {
  const auto name = plain_name(op);
  if (in_backward() || leaves_elements(name) || !returns_tensors(op)) return false;
  const auto count = op.schema().arguments().size();
  const auto first = stack.size() - count;
  const auto tensor = [&](std::size_t i) {
    return stack[first + i].isTensor() ? stack[first + i].toTensor() : at::Tensor();
  };
  const auto weight = tensor(argument);
  const auto is_whole = [&](const at::Tensor& one) { return one.sizes() == sizes_; };
  const auto is_transposed = [&] {
    return weight.dim() == 2 && is_whole(weight.t()) && weight.t().is_contiguous();
  };
  const bool is_recorded = at::GradMode::is_enabled() && weight.requires_grad();
  if (is_copy(name)) {
    if (!is_recorded || argument != 0) return false;
    copy_with_rule(op, stack, weight);
    return true;
  }
  at::Tensor result;
  if (name == "linear" && argument == 1 && is_whole(weight)) {
    result = linear(tensor(0), weight.t(), tensor(2));
  } else if ((name == "matmul" || name == "mm") && argument == 1 && is_transposed()) {
    result = linear(tensor(0), weight, {});
  } else if (name == "addmm" && argument == 2 && is_transposed() &&
             stack[first + 3].toScalar().equal(1) && stack[first + 4].toScalar().equal(1)) {
    result = linear(tensor(1), weight, tensor(0));
  } else if (name == "embedding" && argument == 0 && is_whole(weight)) {
    result = embedding(weight, stack, first);
  } else if (name == "embedding_renorm_" || is_recorded) {
    throw UnsupportedError(detail::str(
        "The operator ", op.schema().name(), " uses the weight of '", uses_.front().second.name,
        "', of which each process has a part only, so that its result would differ from that "
        "of the whole weight. Leave the layer out of the plan (tensor parallelism cuts weights "
        "that linear, matmul, addmm and embedding use), or compute under torch::NoGradGuard if "
        "a part is what you want."));
  } else {
    return false;
  }
  torch::jit::drop(stack, count);
  stack.emplace_back(std::move(result));
  return true;
}

bool SummedGradientRule::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                             std::size_t argument) {
  const auto name = plain_name(op);
  if (!at::GradMode::is_enabled() || leaves_elements(name) || !returns_tensors(op)) return false;
  if (of_rows_ && (name == "linear" || name == "addmm")) return false;
  const auto count = op.schema().arguments().size();
  if (of_rows_ && is_copy(name)) {
    // The product that takes the copy sums its gradient.
    const auto bias = stack[stack.size() - count].toTensor();
    if (argument != 0 || !bias.requires_grad()) return false;
    copy_with_rule(op, stack, bias);
    return true;
  }
  bool any = false;
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (!stack[i].isTensor()) continue;
    const auto tensor = stack[i].toTensor();
    const auto rule = std::dynamic_pointer_cast<SummedGradientRule>(lazy::find_rule(tensor));
    if (!rule || !tensor.requires_grad()) continue;
    stack[i] = pass(tensor, kCopy, rule->group_, rule->name_);
    any = true;
  }
  if (any) op.callBoxed(stack);
  return any;
}

}  // namespace accelerate::detail::model_parallel
