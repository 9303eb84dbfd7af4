// src/comm/call_facts.h - what the guard is told about a collective on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
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

/// "recv float32[4] from rank 1"; `peer` is -1 where any rank will do.
[[nodiscard]] std::string message_text(bool sends, const at::Tensor& tensor, int peer);

/// The facts of a call on several tensors, which are added one after the other.
struct GatheredFacts {
  const char* kind = "";
  int reduction = -1;
  int root = -1;
  const char* dtype = "";
  std::vector<std::int64_t> sizes = {};  ///< of the first tensor
  int tensors = 0;
  std::uint64_t content = 0;
  std::int64_t elements = 0;  ///< of all tensors
  std::string more = {};
  std::size_t shown = 0;  ///< how much of `more` is whole tensors

  void about(const at::Tensor& tensor) {
    if (tensors++ > 0) return also(tensor);
    dtype = dtype_literal(tensor.scalar_type());
    elements = tensor.numel();
    sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  }
  /// A call that this one is made of.
  void about(const CallFacts& call);
  /// Good as long as these are.
  [[nodiscard]] CallFacts all() const {
    return {.kind = kind,
            .dtype = dtype,
            .sizes = sizes,
            .reduction = reduction,
            .root = root,
            .content = content,
            .more = more.c_str()};
  }

 private:
  void also(const at::Tensor& tensor);
  void show(const std::string& next, const char* what);
};

}  // namespace accelerate::detail
