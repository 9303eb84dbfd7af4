// src/parallel/in_place_average.h - averages gradients in place, after backward.
//
// c10d::Reducer copies each gradient into a bucket and back, and sends buckets during backward. On
// one host a message through shared memory takes less time than these copies, and less than a
// second thread costs the first one. So large gradients are averaged in place, small ones are
// copied together, and all go in one message after backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace accelerate::detail::parallel {

class InPlaceAverage {
 public:
  /// Returns true if the group uses shared memory and all tensors are on the CPU and of one dtype.
  /// The result is the same on all processes of a group.
  [[nodiscard]] static bool suits(const std::vector<at::Tensor>& parameters,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  InPlaceAverage(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group);

  /// Collective.
  void average();

 private:
  std::vector<at::Tensor> small_;
  std::vector<at::Tensor> large_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Tensor together_;                // the gradients of `small_`, concatenated
  std::vector<at::Tensor> sent_ = {};  // kept for its memory
};

}  // namespace accelerate::detail::parallel
