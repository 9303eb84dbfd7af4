// src/training/in_place_average.h - gradients averaged where they lie, when backward has ended.
//
// c10d::Reducer copies each gradient into a bucket and back, and sends buckets while backward goes
// on. Between processes of one host a message through memory takes less time than those copies, and
// less than a second thread costs the first one: large gradients are averaged in place, small ones
// are put together, all in one message.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace accelerate::detail {

class InPlaceAverage {
 public:
  /// Whether messages of the group go through memory, and all tensors lie on the CPU and are of one
  /// type. The same on all processes of a group.
  [[nodiscard]] static bool suits(const std::vector<at::Tensor>& parameters,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  InPlaceAverage(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group);

  /// Collective.
  void average();

 private:
  std::vector<at::Tensor> small_;
  std::vector<at::Tensor> large_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Tensor together_;                // the gradients of the small ones, one behind the other
  std::vector<at::Tensor> sent_ = {};  // kept for its memory
};

}  // namespace accelerate::detail
