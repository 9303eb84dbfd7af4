#include "quantization/gpu_launch.h"

#include <ATen/ATen.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "core/text.h"
#include "quantization/gpu_sources.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::quantization {
namespace {

const char* gpu_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return "float";
  return dtype == at::kHalf ? "Half" : "Bfloat";
}

std::string gpu_text(GpuText text) {
  switch (text) {
    case GpuText::kBlocks:
      return std::string(kGpuBlocks);
    case GpuText::kProduct4bit:
      return std::string(kGpuProduct4bit);
    case GpuText::kRows:
      return str(kGpuFinish, kGpuRows);
    case GpuText::kProduct8bit:
      return str(kGpuFinish, kGpuProduct8bit);
  }
  return {};
}

std::string gpu_source(GpuText text, at::ScalarType dtype, const GpuVariant& variant) {
  std::string constants;
  const auto add = [&](const char* type_and_name, auto value) {
    constants += str("constexpr ", type_and_name, " = ", value, ";\n");
  };
  if (variant.column_tiles != 0) add("int kColumnTiles", variant.column_tiles);
  if (text == GpuText::kProduct4bit) {
    add("int kSplit", variant.split);
    add("int kRowTiles", variant.row_tiles);
    add("bool kNested", variant.is_nested);
    add("bool kStaged", variant.is_staged);
  }
  return str(kGpuTypes, "\nusing Value = ", gpu_type(dtype), ";\n", constants, gpu_text(text));
}

}  // namespace

const state::DeviceKernel& gpu_kernel(GpuText text, std::string_view name, at::ScalarType dtype,
                                      const GpuVariant& variant) {
  using Key = std::tuple<std::string_view, at::ScalarType, GpuVariant>;
  static std::mutex mutex;
  // Not destroyed: threads may launch kernels while the program ends.
  static auto& kernels = *new std::map<Key, std::shared_ptr<const state::DeviceKernel>>;
  const std::lock_guard lock(mutex);
  auto& kernel = kernels[Key(name, dtype, variant)];
  if (!kernel) {
    kernel = state::device_kernel_maker()->make_kernel(gpu_source(text, dtype, variant),
                                                       std::string(name));
  }
  return *kernel;
}

bool has_gpu_kernels(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.numel() > 0 && state::device_kernel_maker() != nullptr;
}

bool is_gpu_value(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

bool has_matrix_instructions(const at::Tensor& tensor) {
  return state::accelerator_backend()->capability(tensor.get_device()).major >= 8;
}

int shared_bytes_on(const at::Tensor& tensor) {
  const auto [major, minor] = state::accelerator_backend()->capability(tensor.get_device());
  if (major == 9 || major == 10) return 227 << 10;
  return (major == 8 && (minor == 0 || minor == 7) ? 163 : 99) << 10;
}

at::Tensor for_gpu(const at::Tensor& tensor) {
  auto result = tensor.contiguous();
  constexpr std::uintptr_t kBytes = 16;
  if (reinterpret_cast<std::uintptr_t>(result.const_data_ptr()) % kBytes == 0) return result;
  return result.clone();
}

int threads_for(std::int64_t blocks, int bytes_per_warp) {
  constexpr int kMost = 512;
  // Every GPU with matrix instructions has 99 KB for a thread block; 33 are for tables.
  constexpr int kMostBytes = 66 << 10;
  const bool has_room = blocks <= state::device_kernel_maker()->multiprocessors();
  return has_room && kMost / 32 * bytes_per_warp <= kMostBytes ? kMost : kMost / 2;
}

}  // namespace accelerate::detail::quantization
