// accelerate/accelerator/refused_members.h - members of Python's `Accelerator` that are not
// available yet, or not in C++.
//
// Part of accelerate/accelerator.h. Each throws `UnsupportedError` that says why.
#pragma once

#include <ATen/core/Tensor.h>

#include "accelerate/api.h"

namespace accelerate {

namespace detail::accelerator {
/// Throws `UnsupportedError` that says why there is no such member, or when it comes.
[[noreturn]] ACCELERATE_API void refuse_member(const char* name);
}  // namespace detail::accelerator

class ACCELERATE_API RefusedMembers {
 public:
  [[noreturn]] void lomo_backward(const at::Tensor& loss, double learning_rate);

 protected:
  RefusedMembers() = default;
  ~RefusedMembers() = default;
};

}  // namespace accelerate
