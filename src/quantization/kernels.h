// src/quantization/kernels.h - the arithmetic of packed weights on the CPU, without Torch.
//
// Codes, scales and rounding are those of bitsandbytes' CUDA kernels (see docs/quantization.md), so
// that files go both ways. Callers cut the work for threads; results do not depend on the cut.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace accelerate::detail::quantization {

enum class FourBitType : std::uint8_t { kFp4, kNf4 };

/// The value of each code.
[[nodiscard]] const std::array<float, 16>& table_of(FourBitType type);
/// The bounds between codes, in rising order: of values for nf4, of magnitudes for fp4. A value on
/// a bound has the code below it.
[[nodiscard]] std::span<const float> thresholds_of(FourBitType type);

/// Blocks of values become 4-bit codes, two per byte, the first in the high half; an odd last one
/// is followed by the code of zero. `blocksize` is even. Writes one scale per block, and returns
/// false if a value is infinite or NaN.
bool quantize_4bit(FourBitType type, const float* values, std::int64_t count,
                   std::int64_t blocksize, std::uint8_t* packed, float* absmax);

/// Values `first` up to `first + count` of packed ones: table[code] * absmax of the block.
void dequantize_4bit(FourBitType type, const std::uint8_t* packed, const float* absmax,
                     std::int64_t blocksize, std::int64_t first, std::int64_t count, float* out);

/// The most inputs that `multiply_4bit` takes at once.
inline constexpr std::int64_t kMostFusedRows = 4;

/// A packed matrix [outputs, inputs] whose rows are whole blocks.
struct FourBitMatrix {
  FourBitType type = FourBitType::kNf4;
  const std::uint8_t* packed = nullptr;
  const float* absmax = nullptr;
  std::int64_t blocksize = 64;
  std::int64_t inputs = 0;
};
/// The products of `rows` inputs with the matrix rows `begin` up to `end`: out[r * stride + i] for
/// row r and output i. `even` and `odd` have the inputs [rows, inputs / 2] of even and of odd
/// index, apart.
void multiply_4bit(const FourBitMatrix& matrix, const float* even, const float* odd,
                   std::int64_t rows, std::int64_t begin, std::int64_t end, float* out,
                   std::int64_t stride);

/// The nearest entry of a sorted map of 256 for each value, in blocks; a block of zeros gets code
/// 0. Returns false if a value is infinite or NaN.
bool quantize_blockwise(const float* map, const float* values, std::int64_t count,
                        std::int64_t blocksize, std::uint8_t* codes, float* absmax);
void dequantize_blockwise(const float* map, const std::uint8_t* codes, const float* absmax,
                          std::int64_t blocksize, std::int64_t count, float* out);

/// One row in 8 bits, rounded half to even; returns its scale max |value|. A row of zeros becomes
/// zeros. `is_finite` becomes false if a value is infinite or NaN.
float quantize_row(const float* values, std::int64_t count, std::int8_t* codes, bool& is_finite);

/// The products of a row of 8-bit codes with the matrix rows `begin` up to `end`, exactly.
void multiply_int8(const std::int8_t* row, const std::int8_t* matrix, std::int64_t inputs,
                   std::int64_t begin, std::int64_t end, std::int32_t* out);

}  // namespace accelerate::detail::quantization
