// src/lazy/operator_rule.h - operators on a parameter that are computed in another way: from packed
// weights, in fewer bits, from a part of the parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>

#include "accelerate/api.h"

namespace accelerate::detail::lazy {

/// Called on any thread.
class OperatorRule {
 public:
  virtual ~OperatorRule() = default;

  /// Returns true if `run` reads the bytes of the parameter: then they are brought first, if the
  /// parameter has a `ManagedStorage`.
  [[nodiscard]] virtual bool reads_bytes() const { return true; }
  /// Returns true if operators that have the parameter in a list ask, too.
  [[nodiscard]] virtual bool takes_lists() const { return false; }
  /// An operator that has the parameter, or a view of it, as its argument number `argument`. Either
  /// puts results on the stack in place of the arguments and returns true, or
  /// leaves the stack as it is and returns false: then the operator runs unchanged.
  ///
  /// Autograd and autocast are below: what `run` computes is recorded and cast. Operators that it
  /// calls do not come here again, those of their backward do; so tensors that it saves for
  /// backward should be aliases without the mark.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                   std::size_t argument) = 0;
};

/// Operators on `parameter` and its views ask `rule` from now on; null takes the rule off. It
/// belongs to the bytes of the parameter: after `set_data` it must be set again.
ACCELERATE_API void set_rule(const at::Tensor& parameter, std::shared_ptr<OperatorRule> rule);
/// Null if there is none.
[[nodiscard]] ACCELERATE_API std::shared_ptr<OperatorRule> find_rule(const at::Tensor& tensor);

}  // namespace accelerate::detail::lazy
