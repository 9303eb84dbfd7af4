// src/state/tensor_device.h - devices as tensors name theirs.
#pragma once

#include <c10/core/Device.h>

namespace accelerate::detail::state {

/// The CPU without an index. Processes on CPUs have cpu:0, cpu:1, ..., as in Python, which Torch
/// takes for other devices than that of tensors, and would copy them.
[[nodiscard]] inline c10::Device tensor_device(c10::Device device) {
  return device.is_cpu() ? c10::Device(c10::kCPU) : device;
}

}  // namespace accelerate::detail::state
