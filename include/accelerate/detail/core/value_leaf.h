// accelerate/detail/core/value_leaf.h - opaque leaves of a `Value`.
//
// Included by accelerate/value.h; include that.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate::detail::inline core {

/// An opaque leaf of a `Value`, defined outside core: a tensor, or the description of one.
class ACCELERATE_API ValueLeaf {
 public:
  virtual ~ValueLeaf();
  [[nodiscard]] virtual bool is_tensor() const { return false; }
  /// Its name in messages, for example "tensor".
  [[nodiscard]] virtual std::string_view kind_name() const = 0;
  [[nodiscard]] virtual bool equals(const ValueLeaf& other) const = 0;
  [[nodiscard]] virtual std::string repr() const = 0;
};

[[nodiscard]] ACCELERATE_API std::shared_ptr<const ValueLeaf> tensor_leaf(const at::Tensor& tensor);

}  // namespace accelerate::detail::inline core
