// Rows in 8 bits on a GPU.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>

#include "quantization/gpu_kernels.h"
#include "quantization/gpu_launch.h"
#include "quantization/gpu_sources.h"

namespace accelerate::detail::quantization {
namespace {

using quant::Int8Weight;

/// The most thread blocks in the second dimension of a grid.
constexpr std::int64_t kMostBlocksY = 65535;

struct GpuRows {
  at::Tensor codes;   // int8 [rows, columns]
  at::Tensor scales;  // float32 [rows]
  /// With a threshold: the columns with outliers, and how many they are.
  at::Tensor columns;  // int32 [columns]
  at::Tensor status;   // int32: {number of columns, 1 if a row is not finite}

  [[nodiscard]] const void* listed() const {
    return columns.defined() ? columns.const_data_ptr() : nullptr;
  }
  [[nodiscard]] const void* count() const {
    return columns.defined() ? status.const_data_ptr() : nullptr;
  }
};

/// For a contiguous matrix. `status` is int32 [2]; its second element is written only to become 1.
GpuRows quantize_on_gpu(const at::Tensor& matrix, double threshold, const at::Tensor& status) {
  const auto rows = matrix.size(0);
  const auto columns = static_cast<int>(matrix.size(1));
  const auto dtype = matrix.scalar_type();
  const auto options = matrix.options();
  const bool are_few = rows <= kMostGpuRows;
  GpuRows result{.codes = at::empty(matrix.sizes(), options.dtype(at::kChar)),
                 .scales = at::empty({rows}, options.dtype(at::kFloat)),
                 .columns = {},
                 .status = status};
  at::Tensor flags;
  void* flag_bytes = nullptr;
  void* list = nullptr;
  if (threshold > 0) {
    flags = are_few ? at::empty({columns}, options.dtype(at::kByte))
                    : at::zeros({columns}, options.dtype(at::kByte));
    result.columns = at::empty({columns}, options.dtype(at::kInt));
    flag_bytes = flags.mutable_data_ptr();
    list = result.columns.mutable_data_ptr();
  }
  void* const codes = result.codes.mutable_data_ptr();
  void* const state = status.mutable_data_ptr();
  constexpr int kManyThreads = 1024;
  gpu_kernel(GpuText::kRows, "quantize_rows", dtype)
      .launch({.blocks = rows, .threads = are_few ? kManyThreads : 256}, matrix.const_data_ptr(),
              columns, static_cast<float>(threshold), are_few ? static_cast<int>(rows) : 0, codes,
              result.scales.mutable_data_ptr(), flag_bytes, list, state);
  if (threshold > 0 && !are_few) {
    gpu_kernel(GpuText::kRows, "list_columns", dtype)
        .launch({.blocks = 1, .threads = kManyThreads}, flag_bytes, columns, list, state);
    gpu_kernel(GpuText::kRows, "clear_columns", dtype)
        .launch({.blocks = rows, .threads = 128}, codes, columns, list, state);
  }
  return result;
}

/// How sums become outputs: as the text in gpu_sources_8bit.cpp declares it.
struct GpuFinish {
  const void* row_scales = nullptr;
  const void* scales = nullptr;
  const void* bias = nullptr;
  const void* late_bias = nullptr;
};

struct GpuProduct8bit {
  const at::Tensor& x;
  const GpuRows& rows;
  const at::Tensor& codes;  // of the weight
  GpuFinish finish;

  /// For up to 16 rows from `begin`.
  void multiply_few(std::int64_t begin, std::int64_t count, const at::Tensor& y) const {
    const auto inputs = x.size(1);
    const auto outputs = codes.size(0);
    const GpuVariant variant{.column_tiles = count <= 8 ? 1 : 2};
    const auto tiles = ceil_div(outputs, 16);
    const int bytes_per_warp =
        2 * 8 * variant.column_tiles * (16 + 4) * static_cast<int>(sizeof(int));
    const int threads = threads_for(tiles, bytes_per_warp);
    auto of_rows = finish;
    of_rows.row_scales = rows.scales.const_data_ptr<float>() + begin;
    gpu_kernel(GpuText::kProduct8bit, "product_8bit", x.scalar_type(), variant)
        .launch({.blocks = tiles,
                 .threads = threads,
                 .shared_bytes = threads / 32 * bytes_per_warp,
                 .is_persistent = true},
                codes.const_data_ptr(), rows.codes.const_data_ptr<std::int8_t>() + begin * inputs,
                static_cast<const char*>(x.const_data_ptr()) + begin * inputs * x.element_size(),
                of_rows, rows.listed(), rows.count(),
                static_cast<char*>(y.mutable_data_ptr()) + begin * outputs * y.element_size(),
                static_cast<int>(count), static_cast<int>(inputs), static_cast<int>(outputs));
  }

  void multiply_all(const at::Tensor& y) const {
    const auto sums = at::_int_mm(rows.codes, codes.t());
    gpu_kernel(GpuText::kRows, "finish_8bit", x.scalar_type())
        .launch({.blocks = ceil_div(y.size(1), 64),
                 .blocks_y = ceil_div(y.size(0), 32),
                 .threads = 256},
                sums.const_data_ptr(), x.const_data_ptr(), codes.const_data_ptr(), finish,
                rows.listed(), rows.count(), y.mutable_data_ptr(), static_cast<int>(y.size(0)),
                static_cast<int>(x.size(1)), static_cast<int>(y.size(1)));
  }
};

bool is_on(const at::Tensor& tensor, const at::Tensor& other, at::ScalarType dtype) {
  return tensor.device() == other.device() && tensor.scalar_type() == dtype;
}

}  // namespace

std::optional<Int8Weight> quantize_rows_on_gpu(const at::Tensor& matrix, double threshold,
                                               bool& is_finite) {
  if (!has_gpu_kernels(matrix) || !is_gpu_value(matrix.scalar_type())) return std::nullopt;
  const c10::DeviceGuard on(matrix.device());
  auto rows = quantize_on_gpu(matrix.detach().contiguous(), threshold,
                              at::zeros({2}, matrix.options().dtype(at::kInt)));
  const auto status = rows.status.cpu();
  is_finite = status[1].item<int>() == 0;
  Int8Weight weight{.CB = std::move(rows.codes), .SCB = std::move(rows.scales)};
  if (threshold > 0) {
    weight.outlier_columns = rows.columns.narrow(0, 0, status[0].item<int>()).to(at::kLong);
  }
  return weight;
}

std::optional<at::Tensor> expand_8bit_on_gpu(const Int8Weight& weight, at::ScalarType dtype) {
  if (!has_gpu_kernels(weight.CB) || !is_gpu_value(dtype) ||
      !is_on(weight.SCB, weight.CB, at::kFloat)) {
    return std::nullopt;
  }
  const auto blocks_y = ceil_div(weight.CB.size(1), 2048);
  if (blocks_y > kMostBlocksY) return std::nullopt;
  const c10::DeviceGuard on(weight.CB.device());
  const auto codes = for_gpu(weight.CB);
  const auto scales = weight.SCB.contiguous();
  auto out = at::empty(codes.sizes(), codes.options().dtype(dtype));
  gpu_kernel(GpuText::kRows, "expand_8bit", dtype)
      .launch({.blocks = codes.size(0), .blocks_y = blocks_y, .threads = 256},
              codes.const_data_ptr(), scales.const_data_ptr(), static_cast<int>(codes.size(1)),
              out.mutable_data_ptr());
  return out;
}

std::optional<at::Tensor> product_int8_on_gpu(const at::Tensor& x, const Int8Weight& weight,
                                              const at::Tensor& bias, double threshold) {
  if (!has_gpu_kernels(x) || !is_gpu_value(x.scalar_type()) || weight.CB.numel() == 0 ||
      !is_on(weight.CB, x, at::kChar) || !is_on(weight.SCB, x, at::kFloat) ||
      weight.SCB.numel() != weight.CB.size(0) || (bias.defined() && bias.device() != x.device())) {
    return std::nullopt;
  }
  const auto count = x.size(0);
  const auto inputs = x.size(1);
  const auto outputs = weight.CB.size(0);
  // The limits of LibTorch's product of 8-bit codes, and those of ours.
  const bool by_libtorch =
      count > kMostGpuRows && count <= 32 * kMostBlocksY && inputs % 8 == 0 && outputs % 8 == 0;
  if (!has_matrix_instructions(x) || (!by_libtorch && inputs % 16 != 0)) return std::nullopt;
  const c10::DeviceGuard on(x.device());
  const auto from = x.contiguous();
  const auto codes = for_gpu(weight.CB);
  const auto scales = weight.SCB.contiguous();
  const auto rows = quantize_on_gpu(from, threshold, at::empty({2}, x.options().dtype(at::kInt)));
  const bool bias_inside = bias.defined() && bias.scalar_type() == at::kHalf;
  const auto added = bias.defined()
                         ? bias.to(bias_inside ? at::kHalf : x.scalar_type()).contiguous()
                         : at::Tensor();
  GpuFinish finish{.row_scales = rows.scales.const_data_ptr(), .scales = scales.const_data_ptr()};
  if (added.defined()) (bias_inside ? finish.bias : finish.late_bias) = added.const_data_ptr();
  auto y = at::empty({count, outputs}, x.options());
  const GpuProduct8bit product{.x = from, .rows = rows, .codes = codes, .finish = finish};
  if (by_libtorch) {
    product.multiply_all(y);
    return y;
  }
  for (std::int64_t begin = 0; begin < count; begin += kMostGpuRows) {
    product.multiply_few(begin, std::min(kMostGpuRows, count - begin), y);
  }
  return y;
}

}  // namespace accelerate::detail::quantization
