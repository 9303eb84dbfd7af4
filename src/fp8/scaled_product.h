// src/fp8/scaled_product.h - tensors in 8 bits with a factor, and products of them.
//
// The emulation is the definition of all numbers here: both factors back in float32, a product in
// float32, one rounding to the type of the result. Kernels of GPUs may differ in the last bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "accelerate/api.h"

namespace accelerate::detail::fp8 {

/// Forward: 3 bits of mantissa, up to 448.
inline constexpr auto kE4m3 = c10::ScalarType::Float8_e4m3fn;
/// Gradients: 2 bits of mantissa, up to 57344.
inline constexpr auto kE5m2 = c10::ScalarType::Float8_e5m2;

/// The largest finite number.
[[nodiscard]] ACCELERATE_API double largest(c10::ScalarType dtype);

/// `values` is the tensor times `scale`, in 8 bits. `scale` is float32: a number, or one number for
/// each row or column.
struct Scaled {
  at::Tensor values;
  at::Tensor scale;

  [[nodiscard]] Scaled t() const;
};

/// The largest magnitude: a number or, with `dim`, one for each line along that dimension.
[[nodiscard]] ACCELERATE_API at::Tensor amax_of(const at::Tensor& tensor,
                                                std::optional<std::int64_t> dim = std::nullopt);
/// The factor that brings `amax` to the largest number of `dtype`, rounded down to a power of two
/// on request.
[[nodiscard]] ACCELERATE_API at::Tensor scale_for(const at::Tensor& amax, c10::ScalarType dtype,
                                                  bool power_of_2);
/// Values beyond the largest number become that number: LibTorch's own conversion makes NaN.
[[nodiscard]] ACCELERATE_API Scaled scaled(const at::Tensor& tensor, const at::Tensor& scale,
                                           c10::ScalarType dtype);

struct ProductOptions {
  at::ScalarType dtype = at::kFloat;
  bool emulate = false;
  /// Of kernels: sums with fewer bits.
  bool fast_accumulation = false;
  /// Pads the inner dimension with zeros to the multiple of 16 that kernels demand. The emulation
  /// takes any size.
  bool pad_inner_dim = false;
};

/// `a` [M, K] times `b` [K, N]. On a CPU always by emulation. Throws `ArgumentError` for sizes that
/// no kernel takes, `UnsupportedError` on a GPU without kernels.
[[nodiscard]] ACCELERATE_API at::Tensor scaled_product(const Scaled& a, const Scaled& b,
                                                       const ProductOptions& options);

}  // namespace accelerate::detail::fp8
