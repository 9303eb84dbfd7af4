// cuda/device_kernels.h - kernels compiled by NVRTC.
//
// NVRTC and the driver are opened when the first kernel is made, by the library that LibTorch opens
// them with: nothing is linked.
#pragma once

#include <memory>
#include <string>

#include "state/device_kernel.h"

namespace accelerate::detail::cuda {

/// False if NVRTC is not beside LibTorch. The first call opens it.
[[nodiscard]] bool can_compile_kernels() noexcept;

/// See `DeviceKernelMaker::make_kernel`. The caller checks `can_compile_kernels`.
[[nodiscard]] std::shared_ptr<const state::DeviceKernel> make_device_kernel(
    std::string source, const std::string& name);

}  // namespace accelerate::detail::cuda
