// src/quantization/tensors.h - packed weights as tensors: their values and their products.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "accelerate/quantization/functional.h"
#include "quantization/kernels.h"

namespace accelerate::detail::quantization {

[[nodiscard]] FourBitType four_bit_type(std::string_view quant_type);
[[nodiscard]] inline std::int64_t blocks_of(std::int64_t values, std::int64_t blocksize) {
  return (values + blocksize - 1) / blocksize;
}

// What callers have put together, with contiguous tensors. `ArgumentError`, which begins with
// `what`, if sizes, dtypes or devices do not fit together.

void check_blocksize(std::int64_t blocksize, std::int64_t least, const char* what);
/// The state of `values` values, with a map of `codes` codes.
[[nodiscard]] quant::QuantState checked_scales(const char* what, quant::QuantState state,
                                               std::int64_t values, std::int64_t codes,
                                               c10::Device device);
[[nodiscard]] std::pair<at::Tensor, quant::QuantState> checked(const char* what,
                                                               const at::Tensor& packed,
                                                               const quant::QuantState& state);
[[nodiscard]] quant::Int8Weight checked(const char* what, const quant::Int8Weight& weight);
/// The bias of a product is undefined, a number, or one number for each output.
void check_product(const char* what, const at::Tensor& x, const at::Tensor& bias,
                   std::int64_t outputs, c10::Device device);

/// The scales of the blocks as float32.
[[nodiscard]] at::Tensor block_scales(const quant::QuantState& state);
/// The values as `dtype`.
[[nodiscard]] at::Tensor dequantize_4bit(const at::Tensor& packed, const quant::QuantState& state,
                                         at::ScalarType dtype);
[[nodiscard]] at::Tensor dequantize_int8(const quant::Int8Weight& weight, at::ScalarType dtype);

/// `is_finite` becomes false if a value is infinite or NaN; the scale of its row is so, too.
[[nodiscard]] quant::Int8Weight quantize_rows(const at::Tensor& matrix, double threshold,
                                              bool& is_finite);

// Products of rows x [rows, inputs] without gradients. On the CPU a weight is expanded in tiles, or
// not at all for few rows; sums are float32.

/// x * W^T + bias in the dtype of `x`; `bias` may be undefined.
[[nodiscard]] at::Tensor product_4bit(const at::Tensor& x, const at::Tensor& packed,
                                      const quant::QuantState& state, const at::Tensor& bias);
[[nodiscard]] at::Tensor product_int8(const at::Tensor& x, const quant::Int8Weight& weight,
                                      const at::Tensor& bias, double threshold);
/// gradient [rows, outputs] * W, in the dtype of `gradient`.
[[nodiscard]] at::Tensor backward_4bit(const at::Tensor& gradient, const at::Tensor& packed,
                                       const quant::QuantState& state);
[[nodiscard]] at::Tensor backward_int8(const at::Tensor& gradient, const quant::Int8Weight& weight);

/// A fixed weight as autograd sees it. Called on any thread.
class LinearProduct {
 public:
  virtual ~LinearProduct() = default;
  /// The product with rows [rows, inputs], plus `bias`, which may be undefined.
  [[nodiscard]] virtual at::Tensor forward(const at::Tensor& rows,
                                           const at::Tensor& bias) const = 0;
  /// From the gradient [rows, outputs] to that of the rows.
  [[nodiscard]] virtual at::Tensor backward(const at::Tensor& gradient) const = 0;
  /// The matrix [outputs, inputs], for gradients of gradients.
  [[nodiscard]] virtual at::Tensor values(at::ScalarType dtype) const = 0;
  [[nodiscard]] virtual std::int64_t outputs() const = 0;
};
/// The product for `x` of any number of dimensions, recorded for backward; autocast does not touch
/// it. `bias` may be undefined.
[[nodiscard]] at::Tensor differentiable_product(std::shared_ptr<const LinearProduct> weight,
                                                const at::Tensor& x, const at::Tensor& bias);

}  // namespace accelerate::detail::quantization
