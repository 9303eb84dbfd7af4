// Blocks in 4 bits on a GPU.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <ranges>

#include "quantization/gpu_kernels.h"
#include "quantization/gpu_launch.h"
#include "quantization/gpu_sources.h"
#include "quantization/tensors.h"

namespace accelerate::detail::quantization {
namespace {

using quant::QuantState;

/// A weight that is expanded at once; of a larger one, parts.
constexpr std::int64_t kMostExpandedBytes = std::int64_t{256} << 20;

GpuTable gpu_table(std::span<const float> values) {
  GpuTable table{};
  std::ranges::copy(values, table.value);
  return table;
}

bool is_power_of_two(std::int64_t number) {
  return number > 0 && std::has_single_bit(static_cast<std::uint64_t>(number));
}

int log2_of(std::int64_t power) { return std::countr_zero(static_cast<std::uint64_t>(power)); }

/// Codes and scales as kernels read them.
class GpuBlocks {
 public:
  /// nullopt if they are on several devices, or not of the sizes and dtypes that kernels take.
  static std::optional<GpuBlocks> read(const at::Tensor& packed, const QuantState& state) {
    GpuBlocks blocks;
    blocks.values_ = c10::multiply_integers(state.shape);
    blocks.table_ = gpu_table(table_of(four_bit_type(state.quant_type)));
    const auto count = ceil_div(blocks.values_, state.blocksize);
    const bool is_nested = state.nested();
    const auto on_device = [&](const at::Tensor& tensor, at::ScalarType dtype, std::int64_t size) {
      return tensor.device() == packed.device() && tensor.scalar_type() == dtype &&
             tensor.numel() == size;
    };
    if (blocks.values_ == 0 || !is_power_of_two(state.blocksize) || state.blocksize < 8 ||
        packed.nbytes() != static_cast<std::size_t>((blocks.values_ + 1) / 2) ||
        !on_device(state.absmax, is_nested ? at::kByte : at::kFloat, count)) {
      return std::nullopt;
    }
    blocks.packed_ = for_gpu(packed);
    blocks.absmax_ = for_gpu(state.absmax);
    blocks.scales_ = {.absmax = blocks.absmax_.const_data_ptr(), .shift = log2_of(state.blocksize)};
    if (!is_nested) return blocks;
    const auto& nested = *state.state2;
    if (nested.nested() || !state.offset || !is_power_of_two(nested.blocksize) ||
        !on_device(nested.code, at::kFloat, 256) ||
        !on_device(nested.absmax, at::kFloat, ceil_div(count, nested.blocksize))) {
      return std::nullopt;
    }
    blocks.map_ = for_gpu(nested.code);
    blocks.nested_ = for_gpu(nested.absmax);
    blocks.scales_.map = blocks.map_.const_data_ptr<float>();
    blocks.scales_.nested = blocks.nested_.const_data_ptr<float>();
    blocks.scales_.offset = *state.offset;
    blocks.scales_.nested_shift = log2_of(nested.blocksize);
    return blocks;
  }

  /// Values `first`, a multiple of 8, up to `first + count`.
  [[nodiscard]] at::Tensor expand(std::int64_t first, std::int64_t count,
                                  at::ScalarType dtype) const {
    constexpr std::int64_t kValues = 8 * 4 * 256;  // of a thread block
    auto out = at::empty({count}, packed_.options().dtype(dtype));
    gpu_kernel(GpuText::kBlocks, "expand_4bit", dtype)
        .launch({.blocks = ceil_div(count, kValues), .threads = 256}, packed_.const_data_ptr(),
                scales_, table_, static_cast<long long>(first), static_cast<long long>(count),
                out.mutable_data_ptr());
    return out;
  }

  [[nodiscard]] at::Tensor multiply(const at::Tensor& x, const at::Tensor& bias,
                                    std::int64_t outputs) const;

  [[nodiscard]] std::int64_t values() const { return values_; }
  /// True if blocks have at least 64 values, so that `multiply` takes them.
  [[nodiscard]] bool are_wide() const { return scales_.shift >= 6; }

 private:
  std::int64_t values_ = 0;
  at::Tensor packed_, absmax_, map_, nested_;
  GpuScales scales_;
  GpuTable table_{};
};

/// Of a thread block of `product_4bit`.
struct ProductThreads {
  int threads;
  int team_warps;
  int shared_bytes;
  bool is_staged;
};

/// 32 warps in teams: those that need the fewest steps after each other. A tile costs about a step
/// more for its sums.
int team_warps_for(std::int64_t tiles, std::int64_t steps) {
  const auto thread_blocks = state::device_kernel_maker()->multiprocessors();
  int best = 0;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  // There are barriers for 15 teams.
  for (int warps = 32; warps >= 4; warps /= 2) {
    const auto cost = ceil_div(tiles, thread_blocks * (32 / warps)) * (ceil_div(steps, warps) + 1);
    if (cost < least) best = warps, least = cost;
  }
  return best;
}

/// With two blocks per step: inputs are staged if there is room.
ProductThreads many_threads(const at::Tensor& x, std::int64_t outputs, bool is_nested) {
  constexpr int kThreads = 1024;
  constexpr int kAreas = 2 * (kThreads / 32) * 4 * (16 + 4) * static_cast<int>(sizeof(float));
  const int bytes = 256 * 256 + kAreas + (is_nested ? 256 * 4 : 0);
  const auto inputs = x.size(1);
  const auto of_inputs = x.size(0) * (inputs + 16) * 2;
  const bool is_staged = bytes + of_inputs <= shared_bytes_on(x);
  return {.threads = kThreads,
          .team_warps = team_warps_for(ceil_div(outputs, 16), inputs / 128),
          .shared_bytes = bytes + (is_staged ? static_cast<int>(of_inputs) : 0),
          .is_staged = is_staged};
}

ProductThreads few_threads(std::int64_t tiles, const GpuVariant& variant) {
  // Two areas of sums, and the tables.
  const int bytes_per_warp =
      2 * 8 * variant.column_tiles * (16 * variant.row_tiles + 4) * static_cast<int>(sizeof(float));
  const int table_bytes = 256 * 32 * 4 + (variant.is_nested ? 256 * 4 : 0);
  const int threads = threads_for(tiles, bytes_per_warp);
  return {.threads = threads,
          .team_warps = threads / 32,
          .shared_bytes = table_bytes + threads / 32 * bytes_per_warp,
          .is_staged = false};
}

/// For 1 to 16 rows of float16 or bfloat16 inputs.
at::Tensor GpuBlocks::multiply(const at::Tensor& x, const at::Tensor& bias,
                               std::int64_t outputs) const {
  const auto rows = x.size(0);
  const auto inputs = x.size(1);
  const auto from = for_gpu(x);
  const auto added = bias.defined() ? for_gpu(bias.to(x.scalar_type())) : at::Tensor();
  auto y = at::empty({rows, outputs}, x.options());
  // 16 bytes per load where the columns of a matrix instruction allow two blocks at once.
  GpuVariant variant{.split = rows <= 4 && inputs % 128 == 0 ? 2 : 1,
                     .column_tiles = rows <= 8 ? 1 : 2,
                     .row_tiles = rows <= 4 ? 1 : 2,
                     .is_nested = scales_.nested != nullptr};
  const auto tiles = ceil_div(outputs, 16 * variant.row_tiles);
  const auto threads = variant.split == 2 ? many_threads(from, outputs, variant.is_nested)
                                          : few_threads(tiles, variant);
  variant.is_staged = threads.is_staged;
  gpu_kernel(GpuText::kProduct4bit, "product_4bit", x.scalar_type(), variant)
      .launch({.blocks = tiles,
               .threads = threads.threads,
               .shared_bytes = threads.shared_bytes,
               .is_persistent = true},
              packed_.const_data_ptr(), scales_, table_, from.const_data_ptr(),
              added.defined() ? added.const_data_ptr() : nullptr, y.mutable_data_ptr(),
              static_cast<int>(rows), static_cast<int>(inputs), static_cast<int>(outputs),
              log2_of(threads.team_warps));
  return y;
}

at::Tensor product_expanded(const at::Tensor& x, const GpuBlocks& weight, const at::Tensor& bias,
                            std::int64_t outputs) {
  const auto inputs = x.size(1);
  const auto dtype = x.scalar_type();
  const auto size = kMostExpandedBytes / (inputs * static_cast<std::int64_t>(x.element_size()));
  const auto product = [&](std::int64_t begin, std::int64_t count) {
    const auto values = weight.expand(begin * inputs, count * inputs, dtype);
    return at::linear(x, values.view({count, inputs}),
                      bias.defined() ? std::optional(bias.narrow(0, begin, count)) : std::nullopt);
  };
  if (outputs <= size) return product(0, outputs);
  auto y = at::empty({x.size(0), outputs}, x.options());
  const auto part = std::max<std::int64_t>(8, size / 8 * 8);
  for (std::int64_t begin = 0; begin < outputs; begin += part) {
    const auto count = std::min(part, outputs - begin);
    y.narrow(1, begin, count).copy_(product(begin, count));
  }
  return y;
}

}  // namespace

std::optional<std::pair<at::Tensor, at::Tensor>> quantize_4bit_on_gpu(const at::Tensor& tensor,
                                                                      FourBitType type,
                                                                      std::int64_t blocksize,
                                                                      bool& is_finite) {
  if (!has_gpu_kernels(tensor) || !is_gpu_value(tensor.scalar_type())) return std::nullopt;
  const c10::DeviceGuard on(tensor.device());
  const auto values = for_gpu(tensor.detach());
  const auto count = values.numel();
  auto packed = at::empty({(count + 1) / 2, 1}, values.options().dtype(at::kByte));
  auto absmax = at::empty({ceil_div(count, blocksize)}, values.options().dtype(at::kFloat));
  auto status = at::zeros({1}, values.options().dtype(at::kInt));
  const auto lanes = std::min<std::int64_t>(32, blocksize / 8);  // of a block
  gpu_kernel(GpuText::kBlocks, "quantize_4bit", values.scalar_type())
      .launch({.blocks = ceil_div(absmax.numel() * lanes, 256), .threads = 256},
              values.const_data_ptr(), static_cast<long long>(count), log2_of(blocksize),
              gpu_table(thresholds_of(type)), type == FourBitType::kNf4 ? 1 : 0,
              packed.mutable_data_ptr(), absmax.mutable_data_ptr(), status.mutable_data_ptr());
  is_finite = status.item<int>() == 0;
  return std::pair(std::move(packed), std::move(absmax));
}

std::optional<at::Tensor> expand_4bit_on_gpu(const at::Tensor& packed, const QuantState& state,
                                             at::ScalarType dtype) {
  if (!has_gpu_kernels(packed) || !is_gpu_value(dtype)) return std::nullopt;
  const c10::DeviceGuard on(packed.device());
  const auto blocks = GpuBlocks::read(packed, state);
  if (!blocks) return std::nullopt;
  return blocks->expand(0, blocks->values(), dtype).view(state.shape);
}

std::optional<at::Tensor> product_4bit_on_gpu(const at::Tensor& x, const at::Tensor& packed,
                                              const QuantState& state, const at::Tensor& bias) {
  if (!has_gpu_kernels(x) || !is_gpu_value(x.scalar_type()) || packed.device() != x.device() ||
      (bias.defined() && bias.device() != x.device())) {
    return std::nullopt;
  }
  const c10::DeviceGuard on(x.device());
  const auto blocks = GpuBlocks::read(packed, state);
  if (!blocks) return std::nullopt;
  const auto outputs = state.shape[0];
  const auto inputs = state.shape[1];
  constexpr std::int64_t kMostBlocks = std::numeric_limits<int>::max();
  if (x.size(0) <= kMostGpuRows && x.scalar_type() != at::kFloat && blocks->are_wide() &&
      inputs % 64 == 0 && outputs * (inputs / 64) <= kMostBlocks && has_matrix_instructions(x)) {
    return blocks->multiply(x, bias, outputs);
  }
  return product_expanded(x, *blocks, bias, outputs);
}

}  // namespace accelerate::detail::quantization
