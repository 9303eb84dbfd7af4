// src/comm/call_facts.h - what the guard is told about a collective on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/guard.h"

namespace accelerate::detail {

/// "float32", for ever.
[[nodiscard]] const char* dtype_literal(at::ScalarType dtype);

/// `tensor` must outlive the facts.
[[nodiscard]] inline CallFacts facts_of(const char* kind, const at::Tensor& tensor,
                                        int reduction = -1, int root = -1) {
  const auto sizes = tensor.sizes();
  return {.kind = kind,
          .dtype = dtype_literal(tensor.scalar_type()),
          .sizes = {sizes.data(), sizes.size()},
          .reduction = reduction,
          .root = root};
}

/// The facts of a call on several tensors, which are added one after the other.
struct GatheredFacts {
  const char* kind = "";
  int reduction = -1;
  int root = -1;
  const char* dtype = "";
  std::vector<std::int64_t> sizes = {};

  void about(const at::Tensor& tensor) {
    dtype = dtype_literal(tensor.scalar_type());
    sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  /// Good as long as these are.
  [[nodiscard]] CallFacts all() const {
    return {.kind = kind, .dtype = dtype, .sizes = sizes, .reduction = reduction, .root = root};
  }
};

}  // namespace accelerate::detail
