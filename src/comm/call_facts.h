// src/comm/call_facts.h - describes a collective on tensors to the guard.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/guard.h"

namespace accelerate::detail::comm {

/// The name of a dtype as a static string, for example "float32".
[[nodiscard]] const char* dtype_literal(at::ScalarType dtype);

/// How many bytes the elements of `tensor` take. Unlike `nbytes()` it takes tensors that are not
/// dense, which are refused only after they are described.
[[nodiscard]] inline std::int64_t byte_count(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

/// The facts of a call on one tensor, which must outlive them.
[[nodiscard]] inline CallFacts facts_of(const char* kind, const at::Tensor& tensor,
                                        int reduction = -1, int root = -1) {
  const auto sizes = tensor.sizes();
  return {.kind = kind,
          .dtype = dtype_literal(tensor.scalar_type()),
          .sizes = {sizes.data(), sizes.size()},
          .reduction = reduction,
          .root = root,
          .bytes = byte_count(tensor)};
}

/// "recv float32[4] from rank 1"; `peer` -1 means any rank.
[[nodiscard]] std::string message_text(bool sends, const at::Tensor& tensor, int peer);

/// Collects the facts of a call on several tensors.
struct CallFactsBuilder {
  const char* kind = "";
  int reduction = -1;
  int root = -1;
  const char* dtype = "";
  std::vector<std::int64_t> sizes = {};  ///< of the first tensor
  int tensors = 0;
  std::uint64_t content = 0;
  std::int64_t elements = 0;  ///< of all tensors
  std::int64_t bytes = 0;     ///< of all tensors
  std::string more = {};
  std::size_t shown = 0;  ///< the length of the part of `more` that lists whole tensors

  void add(const at::Tensor& tensor) {
    bytes += byte_count(tensor);
    if (tensors++ > 0) return add_next(tensor);
    dtype = dtype_literal(tensor.scalar_type());
    elements = tensor.numel();
    sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  }
  /// Adds a call that is part of this one.
  void add(const CallFacts& call);
  /// Refers to this object, which must outlive the result.
  [[nodiscard]] CallFacts facts() const {
    return {.kind = kind,
            .dtype = dtype,
            .sizes = sizes,
            .reduction = reduction,
            .root = root,
            .content = content,
            .more = more.c_str(),
            .bytes = bytes};
  }

 private:
  void add_next(const at::Tensor& tensor);
  void append(const std::string& next, const char* what);
};

}  // namespace accelerate::detail::comm
