// src/state/device_kernel.h - functions of a device that are compiled while the program runs.
//
// For operators that LibTorch has not. Sources are texts of CUDA C++ without includes, compiled for
// the device at hand by the compiler that comes with LibTorch (no nvcc); what is compiled is kept
// in a folder of the user. A backend that can compile has `DeviceKernelMaker` as a second base
// class.
//
//     static const auto kernel = device_kernel_maker()->make_kernel(kSource, "add");
//     kernel->launch({.blocks = 100}, x.const_data_ptr(), y.mutable_data_ptr(), count);
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "accelerate/api.h"

namespace accelerate::detail::state {

/// How many threads run a kernel.
struct KernelGrid {
  std::int64_t blocks = 1;
  std::int64_t blocks_y = 1;
  int threads = 256;
  int shared_bytes = 0;
  /// Launches no more blocks than the device runs at once. For kernels whose blocks walk over their
  /// work in steps of the number of blocks.
  bool is_persistent = false;
};

/// A function for whatever device is current when it is launched.
class DeviceKernel {
 public:
  virtual ~DeviceKernel() = default;

  /// Gives the kernel to the current stream of the current device, also while that is recorded. The
  /// arguments must have the types of the parameters: pointers, int, long long, float, or
  /// structures of these. Does nothing for a grid without blocks.
  ///
  /// The first launch on a device loads the kernel, or compiles it. Throws `UnsupportedError` with
  /// the compiler's text if it cannot be compiled.
  template <class... Arguments>
  void launch(const KernelGrid& grid, Arguments... arguments) const {
    static_assert((std::is_trivially_copyable_v<Arguments> && ...));
    std::array<void*, sizeof...(Arguments)> pointers{
        const_cast<void*>(static_cast<const void*>(&arguments))...};
    launch_with(grid, pointers.data());
  }

 protected:
  virtual void launch_with(const KernelGrid& grid, void** arguments) const = 0;
};

class ACCELERATE_API DeviceKernelMaker {
 public:
  virtual ~DeviceKernelMaker() = default;
  /// False if the compiler cannot be loaded.
  [[nodiscard]] virtual bool can_compile() noexcept = 0;
  /// The function `name` (extern "C") of a source. Sources that are equal are compiled once per
  /// process and device; results are kept for other processes of the user.
  [[nodiscard]] virtual std::shared_ptr<const DeviceKernel> make_kernel(
      std::string source, const std::string& name) = 0;
  /// Of the current device.
  [[nodiscard]] virtual int multiprocessors() = 0;
};

/// nullptr without a GPU, or if its backend cannot compile.
[[nodiscard]] DeviceKernelMaker* device_kernel_maker() noexcept;

}  // namespace accelerate::detail::state
