// src/state/accelerator_backend.h - the interface between the library and the GPU.
//
// libaccelerate.so links torch_cpu alone. What needs CUDA is in libaccelerate_cuda.so, which is
// opened when the library is loaded and a GPU driver is present, and which answers through this
// interface. Callers of `accelerator_backend()` must handle nullptr.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "accelerate/api.h"
#include "state/process_group.h"

namespace accelerate::detail::state {

struct DeviceCapability {
  int major = 0;
  int minor = 0;
};

class AcceleratorBackend {
 public:
  virtual ~AcceleratorBackend() = default;

  [[nodiscard]] virtual c10::DeviceType type() const = 0;
  /// Devices this process can see. Never 0: without a device there is no backend.
  [[nodiscard]] virtual int device_count() const = 0;
  virtual void set_device(int index) = 0;
  [[nodiscard]] virtual int current_device() const = 0;
  [[nodiscard]] virtual std::string device_name(int index) const = 0;
  /// "0000:01:00.0", as the kernel and NVML spell it.
  [[nodiscard]] virtual std::string pci_bus_id(int index) const = 0;
  [[nodiscard]] virtual DeviceCapability capability(int index) const = 0;

  virtual void empty_cache() = 0;
  virtual void synchronize(int index) = 0;
  [[nodiscard]] virtual std::int64_t allocated_bytes(int index) const = 0;
  /// Pins whole pages of the host, so that copies from them are fast and run beside other work.
  /// Returns false if the driver refuses.
  [[nodiscard]] virtual bool pin_memory(void* address, std::size_t bytes) noexcept = 0;
  virtual void unpin_memory(void* address) noexcept = 0;
  /// True while the current stream of this thread records a graph instead of running.
  [[nodiscard]] virtual bool is_capturing() const = 0;
  /// Bytes that this process can allocate: free ones of the device and unused ones of its cache.
  [[nodiscard]] virtual std::int64_t free_bytes(int index) const = 0;
  /// True once this process holds a CUDA context: forking is no longer safe.
  [[nodiscard]] virtual bool context_exists() const = 0;

  /// A NCCL group; one device per process.
  [[nodiscard]] virtual c10::intrusive_ptr<c10d::Backend> make_nccl(
      const c10::intrusive_ptr<c10d::Store>& store, const ProcessGroupOptions& options,
      std::shared_ptr<comm::DeviceCallGuard> guard) = 0;
};

/// The GPU of this process, or nullptr: no driver, no device, or no companion library.
[[nodiscard]] AcceleratorBackend* accelerator_backend() noexcept;

/// The number of a GPU; of one without a number, which is that of a process alone, the current one.
/// There is a backend.
[[nodiscard]] int gpu_index(c10::Device device);

/// For tests: puts `backend` in its place until it is called with nullptr.
ACCELERATE_API void replace_accelerator_backend(AcceleratorBackend* backend) noexcept;

/// Why `accelerator_backend()` is nullptr, in words for an error message.
[[nodiscard]] std::string why_no_accelerator();

}  // namespace accelerate::detail::state

/// What libaccelerate_cuda.so exports. Returns nullptr when no device can be used.
extern "C" accelerate::detail::state::AcceleratorBackend* accelerate_cuda_backend();
