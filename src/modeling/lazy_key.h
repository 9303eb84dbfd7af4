// src/modeling/lazy_key.h - the mark on tensors whose bytes come and go.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

namespace accelerate::detail::modeling {

/// On managed tensors and views of them (see lazy/released_storage.h). No part of LibTorch uses
/// it. It is above autograd and autocast, so that composite operators that look at raw pointers
/// (cuDNN's RNNs) are seen too.
inline constexpr auto kLazyKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// Only operators may read or write the elements: what a raw pointer changes is lost.
[[nodiscard]] inline bool is_marked(const at::Tensor& tensor) {
  return tensor.key_set().has(kLazyKey);
}

}  // namespace accelerate::detail::modeling
