// src/comm/shm_tensors.h - tensors as the memory that the shared-memory backend works on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "comm/shm_collectives.h"

namespace accelerate::detail::comm {

/// Throws `UnsupportedError` if the dtype does not support the reduction.
[[nodiscard]] ShmArithmetic arithmetic_of(const char* kind, const at::Tensor& tensor,
                                          const c10d::ReduceOp& reduction);

/// The memory of the tensors of a call: their own, or a copy if they are not contiguous.
///
/// Tensors that are not dense or not on the CPU are refused with `ArgumentError`.
class ShmMemory {
 public:
  [[nodiscard]] ShmInput in(const char* kind, const at::Tensor& tensor);
  [[nodiscard]] ShmOutput out(const char* kind, const at::Tensor& tensor);
  [[nodiscard]] ShmOutput in_and_out(const char* kind, const at::Tensor& tensor);

  /// Of all tensors together.
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  /// Copies results into the tensors that are not contiguous. Keeps all tensors alive.
  [[nodiscard]] std::function<void()> copy_back() &&;

 private:
  [[nodiscard]] ShmOutput writable(const at::Tensor& tensor, at::Tensor dense);

  std::vector<at::Tensor> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
  std::int64_t bytes_ = 0;
};

}  // namespace accelerate::detail::comm
