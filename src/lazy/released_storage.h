// src/lazy/released_storage.h - storages without bytes, and the mark on tensors that use them.
//
// The only file that reaches into LibTorch's private members. A released storage keeps its size, so
// that operators which only make a view work as ever, and throws a text of ours on every access to
// its bytes. (A null pointer alone is not enough: many kernels would read address 0.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <string>

#include "modeling/lazy_key.h"

namespace accelerate::detail::lazy {

using modeling::is_marked;
using modeling::kLazyKey;
/// Enabled for a thread by a scope: every operator of the thread passes by.
inline constexpr auto kModeKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Operators on the tensor, and on views that are made from now on, pass by the trigger. `set_data`
/// takes the mark off.
void mark(c10::TensorImpl& tensor);
void unmark(c10::TensorImpl& tensor);

/// Drops the bytes. From now on every access to them throws `message`.
void forbid(c10::StorageImpl& storage, const std::string& message);
/// Gives the storage bytes; accesses work again.
void allow(c10::StorageImpl& storage, c10::DataPtr bytes);

/// Accesses to its bytes throw: `forbid` was called last.
[[nodiscard]] bool is_forbidden(const c10::StorageImpl& storage);

/// A storage on `device` that has no bytes yet: `forbid` or `allow` follows.
[[nodiscard]] c10::intrusive_ptr<c10::StorageImpl> make_empty_storage(std::size_t bytes,
                                                                      c10::Device device);
/// Gives `tensor` another storage, with the sizes, strides and offset that it has; `name` is for
/// messages. See `modeling::replace_data`.
void rebind(const at::Tensor& tensor, const c10::intrusive_ptr<c10::StorageImpl>& storage,
            const std::string& name);

}  // namespace accelerate::detail::lazy
