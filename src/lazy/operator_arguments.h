// src/lazy/operator_arguments.h - the tensors among the arguments of an operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace accelerate::detail::lazy {

/// Calls `f(tensor)` for the tensors in an argument.
template <class F>
void for_each_tensor(const c10::IValue& argument, const F& f) {
  if (argument.isTensor()) {
    f(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorList()) f(tensor);
  } else if (argument.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor : argument.toOptionalTensorList()) {
      if (tensor) f(*tensor);
    }
  }
}

}  // namespace accelerate::detail::lazy
