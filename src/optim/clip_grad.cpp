#include "optim/clip_grad.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "parallel/engine.h"
#include "state/tensor_batches.h"

namespace accelerate::detail::optim {
namespace {

using at::Tensor;
using state::ClearedAtEnd;
using state::TensorBatches;

/// The lists of one call, whose memory the next call uses again.
struct Lists {
  std::vector<Tensor> gradients;
  std::vector<Tensor> norms;
  TensorBatches batches;

  void clear() noexcept {
    gradients.clear();
    norms.clear();
    batches.clear();
  }
};

void add_gradients(std::span<const Tensor> parameters, std::vector<Tensor>& gradients) {
  for (const auto& parameter : parameters) {
    if (!parameter.defined()) continue;
    if (const auto& gradient = parameter.grad(); gradient.defined()) gradients.push_back(gradient);
  }
}

/// Errors number the gradients from 0; parameters without gradient are not counted.
void require_strided(std::span<const Tensor> tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].layout() == at::kStrided) continue;
    throw ArgumentError(detail::str(
        "Gradient ", i, " of shape ", tensors[i].sizes(), " has layout ", tensors[i].layout(),
        ", which cannot be clipped. Make it dense, for example with an Embedding of "
        "sparse(false), or leave its parameter out."));
  }
}

void require_floating(std::span<const Tensor> tensors, bool complex_too) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_floating_point() || (complex_too && tensors[i].is_complex())) continue;
    throw ArgumentError(detail::str("Gradient ", i, " of shape ", tensors[i].sizes(), " is of ",
                                    tensors[i].scalar_type(), "; only ",
                                    complex_too ? "floating-point and complex" : "floating-point",
                                    " gradients can be clipped this way."));
  }
}

void require_limit(const char* name, double limit) {
  if (limit >= 0) return;
  throw ArgumentError(detail::str(name, " is ", limit, "; it must be 0 or more."));
}

void require_norm_type(double norm_type) {
  if (!std::isnan(norm_type)) return;
  throw ArgumentError(
      "norm_type is NaN. Give the order of the norm, for example 2, 1 or infinity.");
}

/// `norms` is empty, and so it is afterwards.
Tensor norm_of(TensorBatches& batches, c10::Device device, double norm_type,
               std::vector<Tensor>& norms) {
  for (const auto& batch : batches) {
    for (auto& norm : at::_foreach_norm(batch, norm_type)) {
      norms.push_back(norm.device() == device ? std::move(norm)
                                              : norm.to(device, norm.scalar_type()));
    }
  }
  auto norm = at::linalg_vector_norm(at::stack(norms), norm_type);
  norms.clear();
  return norm;
}

void require_finite(const Tensor& norm, double norm_type) {
  if (norm.isfinite().item<bool>()) return;
  throw StateError(
      detail::str("The norm of order ", norm_type, " of the gradients is ", norm.item<double>(),
                  ", so they cannot be clipped. Find the step that produced it, or set "
                  "error_if_nonfinite to false to continue with non-finite gradients."));
}

}  // namespace

Tensor get_total_norm(std::span<const Tensor> tensors, double norm_type, bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  require_norm_type(norm_type);
  if (tensors.empty()) return at::zeros({});
  require_strided(tensors);
  require_floating(tensors, /*complex_too=*/true);
  // Engines call this in the middle of a call below: these lists are its own.
  Lists lists;
  for (const auto& tensor : tensors) lists.batches.add(tensor);
  auto norm = norm_of(lists.batches, tensors.front().device(), norm_type, lists.norms);
  if (error_if_nonfinite) require_finite(norm, norm_type);
  return norm;
}

namespace {

struct Sharded {
  parallel::Engine* engine;
  parallel::GradientShards shards;
};

/// Gradients whose norm over all processes an engine finds; all others are added to `whole`.
std::vector<Sharded> sharded_gradients(std::span<const Tensor> parameters,
                                       std::span<const std::shared_ptr<parallel::Engine>> engines,
                                       std::vector<Tensor>& whole) {
  std::vector<Sharded> result;
  std::vector<Tensor> rest;
  for (const auto& engine : engines) {
    auto shards = engine->shards_of(parameters);
    if (!shards) continue;
    if (rest.empty()) rest.assign(parameters.begin(), parameters.end());
    bool any = false;
    for (std::size_t i = 0; i < rest.size(); ++i) {
      if (!shards->sharded[i]) continue;
      any = true;
      rest[i] = Tensor();
    }
    // Also without a shard on this process: its engine communicates.
    if (any) result.push_back({engine.get(), *std::move(shards)});
  }
  add_gradients(result.empty() ? parameters : std::span<const Tensor>(rest), whole);
  return result;
}

void scale(TensorBatches& batches, const Tensor& factor) {
  for (auto& batch : batches) {
    const auto device = batch[0].device();
    at::_foreach_mul_(batch,
                      device == factor.device() ? factor : factor.to(device, factor.scalar_type()));
  }
}

}  // namespace

Tensor clip_grad_norm_(std::span<const Tensor> parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite,
                       std::span<const std::shared_ptr<parallel::Engine>> engines) {
  const at::NoGradGuard no_grad;
  require_limit("max_norm", max_norm);
  require_norm_type(norm_type);
  thread_local Lists lists;
  const ClearedAtEnd clearing(lists);
  auto& [gradients, norms, batches] = lists;
  auto sharded = sharded_gradients(parameters, engines, gradients);
  if (gradients.empty() && sharded.empty()) return at::zeros({});
  require_strided(gradients);
  require_floating(gradients, /*complex_too=*/true);
  if (!gradients.empty()) {
    const auto device = gradients.front().device();
    for (auto& gradient : gradients) batches.add(std::move(gradient));
    norms.push_back(norm_of(batches, device, norm_type, norms));
  }
  for (auto& [engine, shards] : sharded) {
    norms.push_back(engine->norm_over_processes(shards, norm_type));
    for (auto& shard : shards.gradients) batches.add(shard);
  }
  for (auto& norm : norms) norm = norm.to(norms[0].device(), norms[0].scalar_type());
  auto norm = norms.size() == 1 ? norms[0] : at::linalg_vector_norm(at::stack(norms), norm_type);
  if (error_if_nonfinite) require_finite(norm, norm_type);
  // Multiply even if the factor is 1: reading it would wait for the device. The product with
  // max_norm is not in place, which would round max_norm to bfloat16 first.
  scale(batches, norm.add(1e-6).reciprocal_().mul(max_norm).clamp_max_(1.0));
  return norm;
}

void clip_grad_value_(std::span<const Tensor> parameters, double clip_value,
                      std::span<const std::shared_ptr<parallel::Engine>> engines) {
  const at::NoGradGuard no_grad;
  require_limit("clip_value", clip_value);
  thread_local Lists lists;
  const ClearedAtEnd clearing(lists);
  auto& gradients = lists.gradients;
  for (auto& [engine, shards] : sharded_gradients(parameters, engines, gradients)) {
    gradients.insert(gradients.end(), shards.gradients.begin(), shards.gradients.end());
  }
  require_strided(gradients);
  require_floating(gradients, /*complex_too=*/false);
  for (auto& gradient : gradients) lists.batches.add(std::move(gradient));
  for (auto& batch : lists.batches) {
    at::_foreach_clamp_min_(batch, -clip_value);
    at::_foreach_clamp_max_(batch, clip_value);
  }
}

}  // namespace accelerate::detail::optim
