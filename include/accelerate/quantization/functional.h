// accelerate/quantization/functional.h - tensors in 8 and 4 bits, as bitsandbytes has them.
//
//     auto [packed, state] = accelerate::quant::quantize_4bit(weight, {.quant_type = "nf4"});
//     auto y = accelerate::quant::linear_4bit(x, packed, state);
//
// The bytes are those of bitsandbytes' CUDA kernels, on every device and for any number of threads.
// docs/quantization.md has the formulas. All functions throw `ArgumentError` for tensors that are
// not of the dtype or size that they take and for a state that does not fit its codes; those that
// quantize, for values that are infinite or NaN.
//
// Part of accelerate/quantization.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"

namespace accelerate::quant {

/// What is needed beside the codes of a tensor to get its values back.
struct QuantState {
  /// The largest magnitude of each block: float32, or codes of `state2`.
  at::Tensor absmax = {};
  /// Of the tensor before.
  std::vector<std::int64_t> shape = {};
  /// The value of each code, float32: 16 or 256.
  at::Tensor code = {};
  /// Of the tensor before; what `dequantize_4bit` and `dequantize_blockwise` return.
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::int64_t blocksize = 64;
  /// "nf4" or "fp4"; empty for `quantize_blockwise`.
  std::string quant_type = {};
  /// With double quantization: what was subtracted from `absmax`, and how the rest was quantized.
  std::optional<float> offset = std::nullopt;
  std::shared_ptr<const QuantState> state2 = nullptr;

  [[nodiscard]] bool nested() const { return state2 != nullptr; }
};

struct Quantize4bitOptions {
  /// A power of two from 32 to 4096.
  std::int64_t blocksize = 64;
  /// Double quantization: the scales of the blocks become 8-bit codes.
  bool compress_statistics = false;
  /// "fp4" or "nf4".
  std::string quant_type = "fp4";
  /// The dtype that the bytes are viewed as.
  c10::ScalarType quant_storage = c10::ScalarType::Byte;
};
using Quant4Options = Quantize4bitOptions;
/// Tensors by name.
using TensorDict = StateDict;
/// The codes of a float16, bfloat16 or float32 tensor, two per byte: a column of bytes, viewed as
/// `quant_storage`.
[[nodiscard]] ACCELERATE_API std::pair<at::Tensor, QuantState> quantize_4bit(
    const at::Tensor& tensor, const Quantize4bitOptions& options = {});
/// The values in the shape and dtype of `state`.
[[nodiscard]] ACCELERATE_API at::Tensor dequantize_4bit(const at::Tensor& packed,
                                                        const QuantState& state);
/// `x` times the transposed weight, plus `bias`: computed in `compute_dtype` (unset: that of `x`)
/// and returned in the dtype of `x`. `bias` is a number or one number for each output. `x` and
/// `bias` get gradients.
[[nodiscard]] ACCELERATE_API at::Tensor linear_4bit(
    const at::Tensor& x, const at::Tensor& packed, const QuantState& state,
    const std::optional<at::Tensor>& bias = std::nullopt,
    std::optional<c10::ScalarType> compute_dtype = std::nullopt);

struct QuantizeBlockwiseOptions {
  /// 256 sorted float32 values; unset: `create_dynamic_map()`.
  std::optional<at::Tensor> code = std::nullopt;
  std::int64_t blocksize = 4096;
  bool nested = false;
};
/// 8-bit codes of a tensor, uint8 in its shape.
[[nodiscard]] ACCELERATE_API std::pair<at::Tensor, QuantState> quantize_blockwise(
    const at::Tensor& tensor, const QuantizeBlockwiseOptions& options = {});
[[nodiscard]] ACCELERATE_API at::Tensor dequantize_blockwise(const at::Tensor& codes,
                                                             const QuantState& state);
/// The signed dynamic map of 8 bits: 256 sorted values from -0.993 to 1, denser near 0.
[[nodiscard]] ACCELERATE_API at::Tensor create_dynamic_map();

/// A matrix in 8 bits: row r is CB[r] * SCB[r] / 127.
struct Int8Weight {
  at::Tensor CB = {};   // int8 [rows, columns]
  at::Tensor SCB = {};  // float32 [rows]
  /// Indices of the columns that a threshold has taken out; undefined without a threshold.
  at::Tensor outlier_columns = {};
};
/// Each row of a matrix in 8 bits, computed from its float16 values. With a threshold above 0,
/// values of at least that magnitude become 0 and do not count for the scale; with several rows, so
/// does the whole column.
[[nodiscard]] ACCELERATE_API Int8Weight int8_vectorwise_quant(const at::Tensor& matrix,
                                                              double threshold = 0);
/// float32.
[[nodiscard]] ACCELERATE_API at::Tensor int8_vectorwise_dequant(const Int8Weight& weight);
/// LLM.int8: `x` in 8 bits times the weight, plus the product of the columns of `x` that have a
/// value of at least `threshold` (0: none) in the dtype of `x`. A row of `x` that is not finite
/// gives a row that is not. `bias` as for `linear_4bit`; `x` and `bias` get gradients.
[[nodiscard]] ACCELERATE_API at::Tensor int8_linear(
    const at::Tensor& x, const Int8Weight& weight,
    const std::optional<at::Tensor>& bias = std::nullopt, double threshold = 0);

/// The tensors that a file has beside the codes of a 4-bit tensor: absmax, quant_map, ...,
/// quant_state.bitsandbytes__nf4.
[[nodiscard]] ACCELERATE_API StateDict as_dict(const QuantState& state);
/// Reads what `as_dict` and bitsandbytes write for a matrix, to `device`. `packed` are the codes,
/// `name` is for messages. Throws `FormatError` for members that are missing, unknown, of the wrong
/// size or not finite, and for the state of a tensor that is no matrix.
[[nodiscard]] ACCELERATE_API QuantState from_dict(const StateDict& members,
                                                  const at::Tensor& packed, const std::string& name,
                                                  c10::Device device = c10::kCPU);
/// The same without the codes. The names of the members may begin with that of the weight:
/// "fc.weight.absmax".
[[nodiscard]] ACCELERATE_API QuantState from_dict(const StateDict& members,
                                                  c10::Device device = c10::kCPU);

}  // namespace accelerate::quant
