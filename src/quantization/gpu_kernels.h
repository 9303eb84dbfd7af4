// src/quantization/gpu_kernels.h - packed weights on a GPU, by kernels of our own.
//
// Codes, scales and values have the bits that the CPU gives. The functions launch on the current
// stream and return nullopt for tensors that no kernel takes: those on a CPU, on a GPU whose
// kernels cannot be compiled, of other dtypes, without elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "accelerate/quantization/functional.h"
#include "quantization/kernels.h"

namespace accelerate::detail::quantization {

/// Waits for the result. The packed codes [(n + 1) / 2, 1] and the scales of a tensor; `is_finite`
/// becomes false if a value is infinite or NaN.
[[nodiscard]] std::optional<std::pair<at::Tensor, at::Tensor>> quantize_4bit_on_gpu(
    const at::Tensor& tensor, FourBitType type, std::int64_t blocksize, bool& is_finite);
/// Waits for the result. See `quantize_rows`.
[[nodiscard]] std::optional<quant::Int8Weight> quantize_rows_on_gpu(const at::Tensor& matrix,
                                                                    double threshold,
                                                                    bool& is_finite);

/// The values as `dtype`, in the shape of `state`.
[[nodiscard]] std::optional<at::Tensor> expand_4bit_on_gpu(const at::Tensor& packed,
                                                           const quant::QuantState& state,
                                                           at::ScalarType dtype);
[[nodiscard]] std::optional<at::Tensor> expand_8bit_on_gpu(const quant::Int8Weight& weight,
                                                           at::ScalarType dtype);

/// x * W^T + bias in the dtype of `x`; `bias` may be undefined. Up to 16 rows are multiplied with
/// the codes; for more the weight is expanded, in parts if it is large.
[[nodiscard]] std::optional<at::Tensor> product_4bit_on_gpu(const at::Tensor& x,
                                                            const at::Tensor& packed,
                                                            const quant::QuantState& state,
                                                            const at::Tensor& bias);
/// LLM.int8, without waiting for the outliers that it finds.
[[nodiscard]] std::optional<at::Tensor> product_int8_on_gpu(const at::Tensor& x,
                                                            const quant::Int8Weight& weight,
                                                            const at::Tensor& bias,
                                                            double threshold);

}  // namespace accelerate::detail::quantization
