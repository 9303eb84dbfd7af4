// src/lazy/trigger.h - calls for the bytes of a managed storage before an operator uses them.
//
// torch::nn has no hooks around a forward, but every operator passes by LibTorch's dispatcher. An
// operator with a marked tensor among its arguments (see `mark`) comes to a fallback here, which
// looks its storage up, pins it, moves the other arguments to its device, and lets the operator go
// on. What `pin` throws comes out of the operator. Operators that only make a view need no bytes
// and are not stopped. Operators without marked tensors never come here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "accelerate/api.h"

namespace accelerate::detail::lazy {

enum class Access : std::uint8_t { kRead, kWrite };

/// A storage whose bytes come and go; what the trigger knows of it. Called on any thread.
class ManagedStorage {
 public:
  virtual ~ManagedStorage() = default;

  /// Brings the bytes, and keeps them until `unpin`. Work that this thread queues on the current
  /// stream from now on sees them. If it throws, nothing is pinned.
  virtual void pin(Access access) = 0;
  virtual void unpin() noexcept = 0;
  /// Where operators on it compute.
  [[nodiscard]] virtual c10::Device device() const = 0;
};

/// The trigger calls `managed` for the storage from now on. Installs the fallback if it is the
/// first; it stays installed, because views with the mark may outlive all that is managed.
ACCELERATE_API void manage_storage(const c10::StorageImpl& storage,
                                   std::shared_ptr<ManagedStorage> managed);
void forget_storage(const c10::StorageImpl& storage) noexcept;
/// Null for a tensor that is not managed.
[[nodiscard]] ACCELERATE_API std::shared_ptr<ManagedStorage> find_managed(const at::Tensor& tensor);

/// While it lives, operators of this thread whose arguments are on several devices get them on the
/// one where the last managed parameter was used: for a model that is spread over devices.
class ACCELERATE_API OneDevicePerOperator {
 public:
  OneDevicePerOperator();
  ~OneDevicePerOperator();
  OneDevicePerOperator(const OneDevicePerOperator&) = delete;
  OneDevicePerOperator& operator=(const OneDevicePerOperator&) = delete;

 private:
  bool before_;
};

/// What the factory functions of this thread (torch::empty, ...) use where no device is given.
struct FactoryDevice {
  std::optional<c10::Device> device = std::nullopt;
  /// Also those that give defined values: zeros, ones, full, arange, tensor.
  bool all_factories = true;
};
/// Returns the one before.
FactoryDevice exchange_factory_device(const FactoryDevice& wanted);

}  // namespace accelerate::detail::lazy
