// src/quantization/gpu_launch.h - what the callers of GPU kernels have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <string_view>

#include "state/device_kernel.h"

namespace accelerate::detail::quantization {

/// The texts of gpu_sources.h, as they are compiled together.
enum class GpuText { kBlocks, kProduct4bit, kRows, kProduct8bit };

/// The constants of a text; those that it does not use are 0.
struct GpuVariant {
  int split = 0;
  int column_tiles = 0;
  int row_tiles = 0;
  bool is_nested = false;
  bool is_staged = false;

  auto operator<=>(const GpuVariant&) const = default;
};

/// The kernel `name` of a text for values of a dtype.
[[nodiscard]] const state::DeviceKernel& gpu_kernel(GpuText text, std::string_view name,
                                                    at::ScalarType dtype,
                                                    const GpuVariant& variant = {});

/// The most rows of inputs that kernels multiply with codes.
inline constexpr std::int64_t kMostGpuRows = 16;
/// True if kernels can be compiled for the GPU that `tensor` is on, and it has elements.
[[nodiscard]] bool has_gpu_kernels(const at::Tensor& tensor);
/// True for float32, float16 and bfloat16.
[[nodiscard]] bool is_gpu_value(at::ScalarType dtype);
/// True if the GPU of `tensor` has the matrix instructions of the products: Ampere or newer.
[[nodiscard]] bool has_matrix_instructions(const at::Tensor& tensor);

/// The most shared memory of a thread block on the GPU of `tensor`, which has matrix instructions.
[[nodiscard]] int shared_bytes_on(const at::Tensor& tensor);

/// The tensor contiguous, and at an address that kernels can read 16 bytes from at once.
[[nodiscard]] at::Tensor for_gpu(const at::Tensor& tensor);

/// Threads of each of `blocks` thread blocks that divide the work on an output: more if the device
/// has multiprocessors to spare, and shared memory for `bytes_per_warp`.
[[nodiscard]] int threads_for(std::int64_t blocks, int bytes_per_warp);

inline std::int64_t ceil_div(std::int64_t count, std::int64_t size) {
  return (count + size - 1) / size;
}

}  // namespace accelerate::detail::quantization
