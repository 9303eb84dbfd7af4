#include "parallel/power_sgd.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate::detail::parallel {
namespace {

std::int64_t rank_of(const at::Tensor& matrix, const PowerSgdOptions& options) {
  return std::min({matrix.size(-2), matrix.size(-1), options.matrix_approximation_rank});
}

/// The columns of each matrix, in place, at right angles and of length 1.
void orthogonalize(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  const bool in_16_bits =
      matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  if (columns > 2 && !in_16_bits) {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
    return;
  }
  for (std::int64_t i = 0; i < columns; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    auto length = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true);
    if (epsilon != 0) length.add_(epsilon);
    column.div_(length);
    if (i + 1 == columns) break;
    const auto rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(1, /*keepdim=*/true) * column);
  }
}

}  // namespace

std::uint32_t NumpyRandom::below_a_billion() {
  // As many bits as the largest wanted number has; what is above it is drawn again.
  constexpr std::uint32_t kMask = (1U << 30) - 1;
  while (true) {
    const auto drawn = static_cast<std::uint32_t>(engine_()) & kMask;
    if (drawn < 1'000'000'000) return drawn;
  }
}

PowerSgd::PowerSgd(c10::intrusive_ptr<c10d::ProcessGroup> group, const PowerSgdOptions& options,
                   bool batched)
    : group_(std::move(group)),
      options_(options),
      batched_(batched),
      random_(static_cast<std::uint32_t>(options.random_seed)) {}

void PowerSgd::sum(at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> tensors{tensor};
  group_->allreduce(tensors)->wait();
}

void PowerSgd::average(c10d::GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  if (iter_ < options_.start_iter) {
    at::Tensor buffer = bucket.getBuffer();
    buffer.div_(group_->getSize());
    sum(buffer);
  } else {
    auto& memory = memory_[bucket.getIndex()];
    if (batched_) {
      average_as_square(bucket, memory);
    } else {
      average_layers(bucket, memory);
    }
    if (!options_.warm_start) memory.p = memory.q = at::Tensor();
  }
  count(bucket.isLast());
}

void PowerSgd::average_layers(c10d::GradBucket& bucket, Memory& memory) {
  at::Tensor buffer = bucket.getBuffer();
  at::Tensor wanted;
  if (options_.use_error_feedback) {
    if (memory.error.defined()) buffer.add_(memory.error);
    wanted = buffer.clone();
  }

  std::vector<at::Tensor> matrices, others;
  std::int64_t p_size = 0, q_size = 0;
  for (const auto& gradient : bucket.getGradients()) {
    const auto elements = gradient.numel();
    elements_before_ += elements;
    if (gradient.dim() > 0 && elements > 0) {
      const auto matrix = gradient.view({gradient.size(0), -1});
      const auto rank = rank_of(matrix, options_);
      const auto thin = (matrix.size(0) + matrix.size(1)) * rank;
      if (static_cast<double>(thin) * options_.min_compression_rate <
          static_cast<double>(elements)) {
        matrices.push_back(matrix);
        p_size += matrix.size(0) * rank;
        q_size += matrix.size(1) * rank;
        elements_after_ += thin;
        continue;
      }
    }
    others.push_back(gradient);
    elements_after_ += elements;
  }
  report(bucket.isLast());

  const bool begins = !memory.p.defined();
  if (begins) {
    memory.p = at::empty({p_size}, buffer.options());
    memory.q = at::empty({q_size}, buffer.options());
  }
  auto stacks = stacks_of(matrices);
  std::int64_t p_at = 0, q_at = 0;
  for (auto& stack : stacks) {
    const auto rank = rank_of(stack.matrices, options_);
    const auto place = [&](const at::Tensor& whole, std::int64_t& at, std::int64_t rows) {
      const auto size = stack.matrices.size(0) * rows * rank;
      at += size;
      return whole.narrow(0, at - size, size).view({stack.matrices.size(0), rows, rank});
    };
    stack.p = place(memory.p, p_at, stack.matrices.size(1));
    stack.q = place(memory.q, q_at, stack.matrices.size(2));
  }

  if (begins) {
    // Drawn also where nothing is compressed, as in Python: the next bucket's seed depends on it.
    auto generator = at::detail::createCPUGenerator(random_.below_a_billion());
    for (auto& stack : stacks) fill_random(stack.q, generator);
  }
  for (auto& stack : stacks) {
    orthogonalize(stack.q, options_.orthogonalization_epsilon);
    at::bmm_out(stack.p, stack.matrices, stack.q);
  }

  if (!others.empty()) {
    std::vector<at::Tensor> flat;
    for (const auto& other : others) flat.push_back(other.view(-1));
    auto all = at::cat(flat);
    sum(all);
    all.div_(group_->getSize());
    std::int64_t begin = 0;
    for (const auto& one : flat) {
      one.copy_(all.narrow(0, begin, one.numel()));
      begin += one.numel();
    }
  }

  sum(memory.p);
  for (auto& stack : stacks) {
    orthogonalize(stack.p, options_.orthogonalization_epsilon);
    at::bmm_out(stack.q, stack.matrices.transpose(1, 2), stack.p);
  }
  sum(memory.q);
  memory.q.div_(group_->getSize());
  for (auto& stack : stacks) {
    at::bmm_out(stack.matrices, stack.p, stack.q.transpose(1, 2));
    if (stack.sources.size() == 1) continue;  // a view: it is in place already
    for (std::size_t i = 0; i < stack.sources.size(); ++i) {
      stack.sources[i].copy_(stack.matrices[static_cast<std::int64_t>(i)]);
    }
  }
  if (options_.use_error_feedback) memory.error = wanted - buffer;
}

std::vector<PowerSgd::Stack> PowerSgd::stacks_of(const std::vector<at::Tensor>& matrices) const {
  // Matrices of one shape stand together, shapes in the order of their first: the random numbers
  // are dealt in this order.
  std::vector<std::vector<at::Tensor>> by_shape;
  for (const auto& matrix : matrices) {
    const auto same = std::ranges::find_if(
        by_shape, [&](const auto& others) { return others[0].sizes() == matrix.sizes(); });
    if (same != by_shape.end()) {
      same->push_back(matrix);
    } else {
      by_shape.push_back({matrix});
    }
  }
  std::vector<Stack> stacks;
  for (auto& same : by_shape) {
    if (options_.batch_tensors_with_same_shape && same.size() > 1) {
      stacks.push_back({.matrices = at::stack(same), .p = {}, .q = {}, .sources = same});
      continue;
    }
    for (auto& matrix : same) {
      stacks.push_back({.matrices = matrix.unsqueeze(0), .p = {}, .q = {}, .sources = {matrix}});
    }
  }
  return stacks;
}

/// The whole bucket as one square, filled up with zeros.
void PowerSgd::average_as_square(c10d::GradBucket& bucket, Memory& memory) {
  at::Tensor buffer = bucket.getBuffer();
  const auto length = buffer.numel();
  const auto side = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(length))));
  const auto rank = options_.matrix_approximation_rank;
  if (rank > side) {
    throw ConfigError(str("comm_state_option has matrix_approximation_rank = ", rank,
                          ", but a bucket of gradients makes a square of only ", side, " x ", side,
                          ". Choose a smaller one."));
  }
  elements_before_ += length;
  elements_after_ += side * rank * 2;
  report(bucket.isLast());

  auto square = at::zeros({1, side, side}, buffer.options());
  const auto flat = square.view(-1);
  flat.narrow(0, 0, length).copy_(buffer);
  at::Tensor wanted;
  if (options_.use_error_feedback) {
    if (memory.error.defined()) flat.add_(memory.error);
    wanted = flat.clone();
  }
  if (!memory.p.defined()) {
    memory.p = at::empty({1, side, rank}, buffer.options());
    memory.q = at::empty({1, side, rank}, buffer.options());
    auto generator = at::detail::createCPUGenerator(random_.below_a_billion());
    fill_random(memory.q, generator);
  }
  // Python's has no epsilon here.
  orthogonalize(memory.q, 0);
  at::bmm_out(memory.p, square, memory.q);
  sum(memory.p);
  orthogonalize(memory.p, 0);
  at::bmm_out(memory.q, square.transpose(1, 2), memory.p);
  sum(memory.q);
  memory.q.div_(group_->getSize());
  at::bmm_out(square, memory.p, memory.q.transpose(1, 2));
  if (options_.use_error_feedback) memory.error = wanted - flat;
  buffer.copy_(flat.narrow(0, 0, length));
}

/// From the CPU, so that all devices begin alike.
void PowerSgd::fill_random(at::Tensor tensor, at::Generator& generator) const {
  tensor.copy_(at::randn(tensor.sizes(), generator, at::TensorOptions(tensor.scalar_type())));
}

void PowerSgd::report(bool is_last) {
  if (!is_last || iter_ < next_report_) return;
  const double rate = elements_after_ > 0 ? static_cast<double>(elements_before_) /
                                                static_cast<double>(elements_after_)
                                          : 0;
  info(str("PowerSGD after ", iter_, " steps: ", elements_before_, " elements travelled as ",
           elements_after_, ", ", rate, " times fewer."));
  next_report_ = iter_ + options_.stats_logging_frequency;
}

void PowerSgd::count(bool is_last) {
  if (is_last) ++iter_;
}

}  // namespace accelerate::detail::parallel
