#include "parallel/in_place_average.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace accelerate::detail::parallel {
namespace {

// Gradients of this size or more are sent in place: that costs less than two copies.
constexpr std::size_t kLargeBytes = 64 << 10;

/// The gradient of a parameter; zeros are put there if this process has none.
const at::Tensor& gradient_of(const at::Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  if (!gradient.defined()) gradient = at::zeros_like(parameter);
  return gradient;
}

/// Calls `f(gradient, its part of together)`.
template <class F>
void for_each_part(const std::vector<at::Tensor>& parameters, const at::Tensor& together, F&& f) {
  std::int64_t begin = 0;
  for (const auto& parameter : parameters) {
    const auto length = parameter.numel();
    f(gradient_of(parameter), together.narrow(0, begin, length).view(parameter.sizes()));
    begin += length;
  }
}

}  // namespace

bool InPlaceAverage::suits(const std::vector<at::Tensor>& parameters,
                           const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const bool all_alike = std::ranges::all_of(parameters, [&](const at::Tensor& one) {
    return one.is_cpu() && one.layout() == at::kStrided && one.is_floating_point() &&
           one.scalar_type() == parameters[0].scalar_type();
  });
  return all_alike && group->getBackend(at::kCPU)->getBackendName() == "shm";
}

InPlaceAverage::InPlaceAverage(std::vector<at::Tensor> parameters,
                               c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {
  std::int64_t length = 0;
  for (auto& parameter : parameters) {
    if (parameter.nbytes() >= kLargeBytes) {
      large_.push_back(std::move(parameter));
    } else {
      length += parameter.numel();
      small_.push_back(std::move(parameter));
    }
  }
  if (length > 0) together_ = at::empty({length}, small_[0].options().requires_grad(false));
}

void InPlaceAverage::average() {
  const at::NoGradGuard no_grad;
  if (together_.defined()) {
    for_each_part(small_, together_,
                  [](const auto& gradient, const auto& part) { part.copy_(gradient); });
    sent_.push_back(together_);
  }
  for (const auto& parameter : large_) {
    const auto& gradient = gradient_of(parameter);
    // One that a graph goes through (create_graph) is written to like any other tensor, below.
    sent_.push_back(gradient.requires_grad() ? gradient.detach().clone() : gradient);
  }
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  options.asyncOp = false;
  group_->allreduce_coalesced(sent_, options)->wait();
  if (together_.defined()) {
    for_each_part(small_, together_,
                  [](const auto& gradient, const auto& part) { gradient.copy_(part); });
  }
  const auto first = sent_.size() - large_.size();
  for (std::size_t i = 0; i < large_.size(); ++i) {
    const auto& gradient = large_[i].grad();
    if (!gradient.is_same(sent_[first + i])) gradient.copy_(sent_[first + i]);
  }
  sent_.clear();
}

}  // namespace accelerate::detail::parallel
