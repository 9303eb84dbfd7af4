// accelerate/operations/tensor_information.h - shape and dtype of a tensor, without the tensor.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/tree_walk.h"
#include "accelerate/value.h"

namespace accelerate {

struct TensorInformation {
  std::vector<std::int64_t> shape = {};
  /// `Undefined` stands for a tensor that is absent.
  at::ScalarType dtype = at::ScalarType::Undefined;

  bool operator==(const TensorInformation&) const = default;
  /// A value holds it as it is.
  ACCELERATE_API explicit operator Value() const;
};

namespace detail::comm {

/// What a value holds, or null when it holds something else.
[[nodiscard]] ACCELERATE_API const TensorInformation* tensor_information(const Value& value);

}  // namespace detail::comm

template <class T>
[[nodiscard]] constexpr bool is_torch_tensor(const T& x) {
  if constexpr (std::same_as<T, Value>) return x.is_tensor();
  return std::same_as<T, at::Tensor>;
}

template <class T>
[[nodiscard]] bool is_tensor_information([[maybe_unused]] const T& x) {
  if constexpr (std::same_as<T, Value>) return detail::comm::tensor_information(x) != nullptr;
  return std::same_as<T, TensorInformation>;
}

namespace tree {
template <>
struct HeldInValue<TensorInformation> {
  static const TensorInformation* get(const Value& value) {
    return accelerate::detail::comm::tensor_information(value);
  }
};
}  // namespace tree

}  // namespace accelerate
