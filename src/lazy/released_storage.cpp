#include "lazy/released_storage.h"

#include <ATen/Functions.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "modeling/tensors.h"

namespace accelerate::detail::lazy {
namespace {

// LibTorch can forbid accesses, but before 2.15 it has no way back. An explicit instantiation may
// name a private member.
template <auto Member>
struct PrivateMember {
  friend auto forbidden_flag() { return Member; }
};
auto forbidden_flag();
template struct PrivateMember<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

template <class Storage>
void permit(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    storage.*forbidden_flag() = false;
  }
}

struct OpenTensorImpl : c10::TensorImpl {
  static auto keys() { return &OpenTensorImpl::key_set_; }
};

}  // namespace

void mark(c10::TensorImpl& tensor) {
  tensor.*OpenTensorImpl::keys() = tensor.key_set().add(kLazyKey);
}

void unmark(c10::TensorImpl& tensor) {
  tensor.*OpenTensorImpl::keys() = tensor.key_set().remove(kLazyKey);
}

void forbid(c10::StorageImpl& storage, const std::string& message) {
  const auto device = storage.device();
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void allow(c10::StorageImpl& storage, c10::DataPtr bytes) {
  permit(storage);
  storage.set_data_ptr_noswap(std::move(bytes));
}

bool is_forbidden(const c10::StorageImpl& storage) { return storage.*forbidden_flag(); }

c10::intrusive_ptr<c10::StorageImpl> make_empty_storage(std::size_t bytes, c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes),
      c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()), /*resizable=*/false);
}

void rebind(const at::Tensor& tensor, const c10::intrusive_ptr<c10::StorageImpl>& storage,
            const std::string& name) {
  const at::AutoDispatchBelowADInplaceOrView below;
  // `set_data` asks an operator whether the types fit; the caller may hold the lock of `pin`.
  const c10::impl::ExcludeDispatchKeyGuard no_trigger(kLazyKey);
  const auto like = at::TensorOptions(tensor.dtype()).device(storage->device());
  const auto data = at::empty({0}, like).set_(c10::Storage(storage), tensor.storage_offset(),
                                              tensor.sizes(), tensor.strides());
  modeling::replace_data(tensor, data, name);
}

}  // namespace accelerate::detail::lazy
