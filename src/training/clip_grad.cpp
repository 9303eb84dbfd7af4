#include "training/clip_grad.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using at::Tensor;

/// Tensors of one device and dtype, which one kernel processes together.
using Batches = std::vector<std::vector<Tensor>>;

std::vector<Tensor>& batch_for(Batches& batches, const Tensor& tensor) {
  for (auto& batch : batches) {
    if (batch[0].device() == tensor.device() && batch[0].scalar_type() == tensor.scalar_type()) {
      return batch;
    }
  }
  return batches.emplace_back();
}

Batches batches_of(std::vector<Tensor> tensors) {
  Batches batches;
  for (auto& tensor : tensors) batch_for(batches, tensor).push_back(std::move(tensor));
  return batches;
}

std::vector<Tensor> gradients_of(std::span<const Tensor> parameters) {
  std::vector<Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    if (!parameter.defined()) continue;
    if (const auto& gradient = parameter.grad(); gradient.defined()) gradients.push_back(gradient);
  }
  return gradients;
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

Tensor norm_of(const Batches& batches, c10::Device device, double norm_type) {
  std::vector<Tensor> norms;
  for (const auto& batch : batches) {
    for (auto& norm : at::_foreach_norm(batch, norm_type)) {
      norms.push_back(norm.device() == device ? std::move(norm)
                                              : norm.to(device, norm.scalar_type()));
    }
  }
  return at::linalg_vector_norm(at::stack(norms), norm_type);
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
  auto norm =
      norm_of(batches_of({tensors.begin(), tensors.end()}), tensors.front().device(), norm_type);
  if (error_if_nonfinite) require_finite(norm, norm_type);
  return norm;
}

Tensor clip_grad_norm_(std::span<const Tensor> parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  require_limit("max_norm", max_norm);
  require_norm_type(norm_type);
  auto gradients = gradients_of(parameters);
  if (gradients.empty()) return at::zeros({});
  require_strided(gradients);
  require_floating(gradients, /*complex_too=*/true);
  const auto device = gradients.front().device();
  auto batches = batches_of(std::move(gradients));
  auto norm = norm_of(batches, device, norm_type);
  if (error_if_nonfinite) require_finite(norm, norm_type);
  // Multiply even if the factor is 1: reading it would wait for the device. The product with
  // max_norm is not in place, which would round max_norm to bfloat16 first.
  const auto factor = norm.add(1e-6).reciprocal_().mul(max_norm).clamp_max_(1.0);
  for (auto& batch : batches) {
    const auto on_device = batch[0].device();
    at::_foreach_mul_(batch,
                      on_device == device ? factor : factor.to(on_device, factor.scalar_type()));
  }
  return norm;
}

void clip_grad_value_(std::span<const Tensor> parameters, double clip_value) {
  const at::NoGradGuard no_grad;
  require_limit("clip_value", clip_value);
  auto gradients = gradients_of(parameters);
  require_strided(gradients);
  require_floating(gradients, /*complex_too=*/false);
  for (auto& batch : batches_of(std::move(gradients))) {
    at::_foreach_clamp_min_(batch, -clip_value);
    at::_foreach_clamp_max_(batch, clip_value);
  }
}

}  // namespace accelerate::detail
