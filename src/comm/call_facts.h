// src/comm/call_facts.h - what the guard is told about a collective on tensors.
#pragma once

#include <ATen/core/Tensor.h>

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

}  // namespace accelerate::detail
