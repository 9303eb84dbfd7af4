#include "parallel/sparse_average.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/operations/objects.h"
#include "parallel/gradient_hooks.h"

namespace accelerate::detail::parallel {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// What a process says about a gradient: how many rows it has, or one of these.
constexpr std::int64_t kNone = -1;
constexpr std::int64_t kDense = -2;

std::int64_t rows_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return kNone;
  return gradient.is_sparse() ? gradient._nnz() : kDense;
}

/// As many rows as any process has, so that all send the same.
at::Tensor padded(const at::Tensor& rows, std::int64_t count) {
  auto shape = rows.sizes().vec();
  shape[0] = count;
  auto result = at::zeros(shape, rows.options());
  result.narrow(0, 0, rows.size(0)).copy_(rows);
  return result;
}

/// The rows of all processes, those of rank 0 first.
at::Tensor gathered(const at::Tensor& own, const std::vector<std::int64_t>& counts,
                    const Group& group) {
  const auto most = std::ranges::max(counts);
  std::vector<at::Tensor> sent{padded(own, most)};
  std::vector<std::vector<at::Tensor>> received(1);
  for (std::size_t i = 0; i < counts.size(); ++i) received[0].push_back(at::empty_like(sent[0]));
  group->allgather(received, sent)->wait();
  for (std::size_t i = 0; i < counts.size(); ++i) {
    received[0][i] = received[0][i].narrow(0, 0, counts[i]);
  }
  return at::cat(received[0]);
}

at::Tensor mean_of(const at::Tensor& parameter, const std::vector<std::int64_t>& counts,
                   const Group& group) {
  auto shape = parameter.sizes().vec();
  shape[0] = 0;
  auto indices = at::empty({0}, parameter.options().dtype(at::kLong).requires_grad(false));
  auto values = at::empty(shape, parameter.options().requires_grad(false));
  if (const auto& gradient = parameter.grad(); gradient.defined()) {
    indices = gradient._indices()[0];
    values = gradient._values() / group->getSize();
  }
  if (std::ranges::max(counts) > 0) {
    indices = gathered(indices, counts, group);
    values = gathered(values, counts, group);
  }
  return at::sparse_coo_tensor(indices.unsqueeze(0), values, parameter.sizes()).coalesce();
}

}  // namespace

std::vector<at::Tensor> sparse_weights(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& part : module.modules()) {
    if (const auto* const one = part->as<torch::nn::EmbeddingImpl>()) {
      if (one->options.sparse()) result.push_back(one->weight);
    } else if (const auto* const bag = part->as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) result.push_back(bag->weight);
    }
  }
  return result;
}

void average_sparse_gradients(const std::vector<at::Tensor>& parameters, const Group& group) {
  if (parameters.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> own;
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined() && gradient.is_sparse()) {
      // Rows that came several times travel once.
      gradient = gradient.sparse_dim() == 1 ? gradient.coalesce() : gradient.to_dense();
    }
    own.push_back(rows_of(gradient));
  }
  const auto all = accelerate::all_gather_object(own, group);
  std::vector<at::Tensor> dense;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    std::vector<std::int64_t> counts;
    for (const auto& one : all) counts.push_back(one.at(i));
    if (std::ranges::count(counts, kNone) == std::ssize(counts)) continue;
    auto& gradient = parameters[i].mutable_grad();
    if (std::ranges::find(counts, kDense) != counts.end()) {
      if (!gradient.defined()) {
        gradient = at::zeros_like(parameters[i]);
      } else if (gradient.is_sparse()) {
        gradient = gradient.to_dense();
      }
      dense.push_back(gradient);
      continue;
    }
    for (auto& count : counts) count = std::max<std::int64_t>(count, 0);
    gradient = mean_of(parameters[i], counts, group);
  }
  if (!dense.empty()) average_gradients(dense, nullptr, group);
}

}  // namespace accelerate::detail::parallel
