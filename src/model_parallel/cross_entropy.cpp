// The cross entropy of scores that are cut along the vocabulary.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/parallel/layers.h"
#include "core/text.h"
#include "model_parallel/regions.h"

namespace accelerate::nn {

namespace mp = detail::model_parallel;

namespace {

/// What processes have of a vocabulary.
struct Vocabulary {
  std::int64_t first = 0;
  std::int64_t own = 0;    // scores of this process, those of padding included
  std::int64_t whole = 0;  // without padding
};

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& target, const ProcessGroupPtr& group,
                            const Vocabulary& vocabulary, double smoothing,
                            std::int64_t ignore_index) {
    const auto [first, own, whole] = vocabulary;
    const auto wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    auto scores = logits.to(wide, /*non_blocking=*/false, /*copy=*/true);
    const auto padded = std::clamp<std::int64_t>(whole - first, 0, own);
    if (padded < own) {
      scores.narrow(-1, padded, own - padded).fill_(-std::numeric_limits<double>::infinity());
    }
    auto largest = scores.amax(-1);
    mp::all_reduce(largest, group, "largest score", c10d::ReduceOp::MAX);
    scores.sub_(largest.unsqueeze(-1));

    const auto ignored = target.eq(ignore_index);
    const auto elsewhere =
        target.lt(first).logical_or_(target.ge(first + own)).logical_or_(ignored);
    const auto index = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1);
    // In one message: the score of the target, the sum of exponentials, the sum of scores.
    auto sums = at::stack(
        {scores.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0), scores.exp().sum(-1),
         padded == 0 ? at::zeros_like(largest) : scores.narrow(-1, 0, padded).sum(-1)});
    mp::all_reduce(sums, group, "sums of scores");
    const auto log_sum = sums[1].log();
    auto loss = (log_sum - sums[0]) * (1 - smoothing);
    if (smoothing > 0) loss += (log_sum - sums[2] / whole) * smoothing;

    context->save_for_backward(
        {scores.sub_(log_sum.unsqueeze(-1)).exp_(), index, elsewhere, ignored});
    context->saved_data["smoothing"] = smoothing;
    context->saved_data["whole"] = whole;
    context->saved_data["padded"] = padded;
    context->saved_data["dtype"] = logits.scalar_type();
    return loss.masked_fill_(ignored, 0);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const double smoothing = context->saved_data["smoothing"].toDouble();
    const auto whole = context->saved_data["whole"].toInt();
    const auto padded = context->saved_data["padded"].toInt();
    auto gradient = saved[0].clone();  // the probabilities
    const auto hit = saved[2].logical_not().to(gradient.scalar_type()).mul_(smoothing - 1);
    gradient.scatter_add_(-1, saved[1], hit.unsqueeze(-1));
    if (smoothing > 0 && padded > 0) {
      gradient.narrow(-1, 0, padded).sub_(smoothing / static_cast<double>(whole));
    }
    gradient.mul_(gradients[0].masked_fill(saved[3], 0).unsqueeze(-1));
    const at::Tensor none;
    return {gradient.to(context->saved_data["dtype"].toScalarType()), none, none, none, none, none};
  }
};

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                        const ProcessGroupPtr& group,
                                        const VocabParallelCrossEntropyOptions& options) {
  const std::int64_t processes = mp::is_alone(group) ? 1 : group->getSize();
  const std::int64_t rank = mp::is_alone(group) ? 0 : group->getRank();
  if (logits.dim() == 0 || logits.sizes().slice(0, logits.dim() - 1) != target.sizes()) {
    throw ArgumentError(detail::str(
        "vocab_parallel_cross_entropy: logits have shape ", logits.sizes(), " and targets ",
        target.sizes(), ". Give one target for each row of scores, all dimensions but the last."));
  }
  const auto own = logits.size(-1);
  const auto whole = options.vocab_size.value_or(own * processes);
  if (whole < 1 || whole > own * processes) {
    throw ArgumentError(detail::str("vocab_parallel_cross_entropy: vocab_size is ", whole,
                                    ", but all processes together have ", own * processes,
                                    " scores."));
  }
  if (options.label_smoothing < 0 || options.label_smoothing > 1) {
    throw ArgumentError(detail::str("vocab_parallel_cross_entropy: label_smoothing is ",
                                    options.label_smoothing, ". It must be from 0 to 1."));
  }
  const auto wrong =
      target.ne(options.ignore_index).logical_and(target.lt(0).logical_or(target.ge(whole)));
  if (!target.is_cpu()) {
    at::_assert_async(wrong.any().logical_not(),
                      detail::str("vocab_parallel_cross_entropy: a target is not in the vocabulary "
                                  "of ",
                                  whole, "."));
  } else if (wrong.any().item<bool>()) {
    throw ArgumentError(detail::str("vocab_parallel_cross_entropy: a target is ",
                                    target.masked_select(wrong)[0].item<std::int64_t>(),
                                    ", which is not in the vocabulary of ", whole, "."));
  }
  return CrossEntropy::apply(logits, target, group,
                             Vocabulary{.first = rank * own, .own = own, .whole = whole},
                             options.label_smoothing, options.ignore_index);
}

}  // namespace accelerate::nn
