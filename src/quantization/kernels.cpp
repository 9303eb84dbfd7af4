#include "quantization/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/for_each_processor.h"

namespace accelerate::detail::quantization {
namespace {

constexpr std::array<float, 16> kNf4{
    -1.0F,
    -0.6961928009986877F,
    -0.5250730514526367F,
    -0.39491748809814453F,
    -0.28444138169288635F,
    -0.18477343022823334F,
    -0.09105003625154495F,
    0.0F,
    0.07958029955625534F,
    0.16093020141124725F,
    0.24611230194568634F,
    0.33791524171829224F,
    0.44070982933044434F,
    0.5626170039176941F,
    0.7229568362236023F,
    1.0F,
};

// Twelfths, as the map of bitsandbytes is made: 0.0625, 8, 12, 4, 6, 2, 3.
constexpr std::array<float, 16> kFp4{
    0.0F, 0.0625F / 12,  8.0F / 12,  1.0F,  4.0F / 12,  6.0F / 12,  2.0F / 12,  3.0F / 12,
    0.0F, -0.0625F / 12, -8.0F / 12, -1.0F, -4.0F / 12, -6.0F / 12, -2.0F / 12, -3.0F / 12,
};
/// Of |value|, and the code above each of them.
constexpr std::array<float, 7> kFp4Thresholds{0.00260417F, 0.0859375F, 0.20833333F, 0.29166667F,
                                              0.4166667F,  0.583333F,  0.8333333F};
constexpr std::array<std::uint8_t, 8> kFp4Codes{0, 1, 6, 7, 4, 5, 2, 3};

constexpr std::array<float, 15> midpoints_of(const std::array<float, 16>& table) {
  std::array<float, 15> midpoints{};
  for (std::size_t i = 0; i < midpoints.size(); ++i) midpoints[i] = (table[i] + table[i + 1]) / 2;
  return midpoints;
}
constexpr auto kNf4Thresholds = midpoints_of(kNf4);

/// The largest magnitude; infinite, or NaN, if a value is. Magnitudes are in the order of their
/// bits.
ACCELERATE_FOR_EACH_PROCESSOR
float largest(const float* values, std::int64_t count) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto magnitude = std::bit_cast<std::uint32_t>(values[i]) & 0x7FFF'FFFFU;
    most = most < magnitude ? magnitude : most;
  }
  return std::bit_cast<float>(most);
}

ACCELERATE_FOR_EACH_PROCESSOR
void nf4_codes(const float* values, std::int64_t count, float scale, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = values[i] * scale;
    int code = 0;
    for (const float threshold : kNf4Thresholds) code += value > threshold ? 1 : 0;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

ACCELERATE_FOR_EACH_PROCESSOR
void fp4_codes(const float* values, std::int64_t count, float scale, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = values[i] * scale;
    const float magnitude = std::fabs(value);
    std::size_t step = 0;
    for (const float threshold : kFp4Thresholds) step += magnitude > threshold ? 1 : 0;
    codes[i] = static_cast<std::uint8_t>(kFp4Codes[step] + (value < 0 ? 8 : 0));
  }
}

ACCELERATE_FOR_EACH_PROCESSOR
void scale_all(float* values, std::int64_t count, float scale) {
  for (std::int64_t i = 0; i < count; ++i) values[i] *= scale;
}

constexpr std::int64_t kMostBlock = 4096;

// -- products of few rows -------------------------------------------------------------------------

/// Both values of each byte.
struct PairTable {
  explicit PairTable(const std::array<float, 16>& table) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      pairs[byte] = {table[byte >> 4], table[byte & 15]};
    }
  }
  std::array<std::array<float, 2>, 256> pairs;
};

const PairTable& pairs_of(FourBitType type) {
  static const PairTable nf4(kNf4);
  static const PairTable fp4(kFp4);
  return type == FourBitType::kNf4 ? nf4 : fp4;
}

void multiply_plain(const FourBitMatrix& matrix, const float* even, const float* odd,
                    std::int64_t rows, std::int64_t begin, std::int64_t end, float* out,
                    std::int64_t stride) {
  const auto& pairs = pairs_of(matrix.type).pairs;
  const auto half = matrix.inputs / 2;
  const auto half_block = matrix.blocksize / 2;
  for (auto o = begin; o < end; ++o) {
    std::array<float, kMostFusedRows> sums{};
    const auto* packed = matrix.packed + o * half;
    for (std::int64_t block = 0; block < half; block += half_block) {
      const float scale = matrix.absmax[(o * half + block) / half_block];
      std::array<float, kMostFusedRows> part{};
      for (auto i = block; i < block + half_block; ++i) {
        const auto& pair = pairs[packed[i]];
        for (std::int64_t r = 0; r < rows; ++r) {
          part[static_cast<std::size_t>(r)] +=
              pair[0] * even[r * half + i] + pair[1] * odd[r * half + i];
        }
      }
      for (std::size_t r = 0; r < sums.size(); ++r) sums[r] += part[r] * scale;
    }
    for (std::int64_t r = 0; r < rows; ++r) out[r * stride + o] = sums[static_cast<std::size_t>(r)];
  }
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) inline __m256 look_up(__m256 low, __m256 high, __m256i index) {
  const auto first = _mm256_permutevar8x32_ps(low, index);
  const auto second = _mm256_permutevar8x32_ps(high, index);
  return _mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

__attribute__((target("avx2,fma"))) inline float sum_of(__m256 lanes) {
  auto sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/// 16 values at a time: the table lies in two registers.
template <int Rows>
__attribute__((target("avx2,fma"))) void multiply_avx2(const FourBitMatrix& matrix,
                                                       const float* even, const float* odd,
                                                       std::int64_t begin, std::int64_t end,
                                                       float* out, std::int64_t stride) {
  const auto& table = table_of(matrix.type);
  const auto low = _mm256_loadu_ps(table.data());
  const auto high = _mm256_loadu_ps(table.data() + 8);
  const auto half = matrix.inputs / 2;
  const auto half_block = matrix.blocksize / 2;
  const auto mask = _mm256_set1_epi32(15);
  for (auto o = begin; o < end; ++o) {
    __m256 sums[Rows];
    for (auto& sum : sums) sum = _mm256_setzero_ps();
    const auto* packed = matrix.packed + o * half;
    const auto* absmax = matrix.absmax + o * half / half_block;
    for (std::int64_t block = 0; block < half; block += half_block) {
      __m256 part[Rows];
      for (auto& sum : part) sum = _mm256_setzero_ps();
      for (auto i = block; i < block + half_block; i += 8) {
        const auto bytes =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i)));
        const auto first = look_up(low, high, _mm256_srli_epi32(bytes, 4));
        const auto second = look_up(low, high, _mm256_and_si256(bytes, mask));
        for (int r = 0; r < Rows; ++r) {
          part[r] = _mm256_fmadd_ps(first, _mm256_loadu_ps(even + r * half + i), part[r]);
          part[r] = _mm256_fmadd_ps(second, _mm256_loadu_ps(odd + r * half + i), part[r]);
        }
      }
      const auto scale = _mm256_set1_ps(*absmax++);
      for (int r = 0; r < Rows; ++r) sums[r] = _mm256_fmadd_ps(part[r], scale, sums[r]);
    }
    for (int r = 0; r < Rows; ++r) out[r * stride + o] = sum_of(sums[r]);
  }
}

bool multiply_fast(const FourBitMatrix& matrix, const float* even, const float* odd,
                   std::int64_t rows, std::int64_t begin, std::int64_t end, float* out,
                   std::int64_t stride) {
  static const bool is_there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!is_there) return false;
  constexpr std::array kByRows{multiply_avx2<1>, multiply_avx2<2>, multiply_avx2<3>,
                               multiply_avx2<4>};
  kByRows[static_cast<std::size_t>(rows - 1)](matrix, even, odd, begin, end, out, stride);
  return true;
}

#else
bool multiply_fast(const FourBitMatrix&, const float*, const float*, std::int64_t, std::int64_t,
                   std::int64_t, float*, std::int64_t) {
  return false;
}
#endif

}  // namespace

const std::array<float, 16>& table_of(FourBitType type) {
  return type == FourBitType::kNf4 ? kNf4 : kFp4;
}

std::span<const float> thresholds_of(FourBitType type) {
  if (type == FourBitType::kNf4) return kNf4Thresholds;
  return kFp4Thresholds;
}

bool quantize_4bit(FourBitType type, const float* values, std::int64_t count,
                   std::int64_t blocksize, std::uint8_t* packed, float* absmax) {
  const std::uint8_t zero = type == FourBitType::kNf4 ? 7 : 0;
  std::array<std::uint8_t, kMostBlock> codes;
  bool all_finite = true;
  for (std::int64_t begin = 0; begin < count; begin += blocksize) {
    const auto size = std::min(blocksize, count - begin);
    const float most = largest(values + begin, size);
    all_finite = all_finite && std::isfinite(most);
    *absmax++ = most;
    if (most == 0) {
      std::fill_n(codes.begin(), size, zero);
    } else if (type == FourBitType::kNf4) {
      nf4_codes(values + begin, size, 1.0F / most, codes.data());
    } else {
      fp4_codes(values + begin, size, 1.0F / most, codes.data());
    }
    for (std::int64_t i = 0; i < size; i += 2) {
      const auto* pair = codes.data() + i;
      *packed++ = static_cast<std::uint8_t>(pair[0] << 4 | (i + 1 < size ? pair[1] : zero));
    }
  }
  return all_finite;
}

void dequantize_4bit(FourBitType type, const std::uint8_t* packed, const float* absmax,
                     std::int64_t blocksize, std::int64_t first, std::int64_t count, float* out) {
  const auto& pairs = pairs_of(type).pairs;
  const auto end = first + count;
  while (first < end) {
    const auto block = first / blocksize;
    const auto stop = std::min(end, (block + 1) * blocksize);
    auto* const begin = out;
    if (first % 2 != 0) *out++ = pairs[packed[first++ / 2]][1];
    for (; first + 1 < stop; first += 2, out += 2) {
      std::memcpy(out, pairs[packed[first / 2]].data(), 2 * sizeof(float));
    }
    if (first < stop) *out++ = pairs[packed[first++ / 2]][0];
    scale_all(begin, out - begin, absmax[block]);
  }
}

void multiply_4bit(const FourBitMatrix& matrix, const float* even, const float* odd,
                   std::int64_t rows, std::int64_t begin, std::int64_t end, float* out,
                   std::int64_t stride) {
  if (multiply_fast(matrix, even, odd, rows, begin, end, out, stride)) return;
  multiply_plain(matrix, even, odd, rows, begin, end, out, stride);
}

bool quantize_blockwise(const float* map, const float* values, std::int64_t count,
                        std::int64_t blocksize, std::uint8_t* codes, float* absmax) {
  std::array<float, 255> thresholds;
  for (std::size_t i = 0; i < thresholds.size(); ++i) thresholds[i] = (map[i] + map[i + 1]) / 2;
  bool all_finite = true;
  for (std::int64_t begin = 0; begin < count; begin += blocksize) {
    const auto end = std::min(begin + blocksize, count);
    const float most = largest(values + begin, end - begin);
    all_finite = all_finite && std::isfinite(most);
    *absmax++ = most;
    const float scale = 1.0F / most;
    for (auto i = begin; i < end; ++i) {
      const auto at = std::ranges::lower_bound(thresholds, values[i] * scale);
      codes[i] = most == 0 ? 0 : static_cast<std::uint8_t>(at - thresholds.begin());
    }
  }
  return all_finite;
}

void dequantize_blockwise(const float* map, const std::uint8_t* codes, const float* absmax,
                          std::int64_t blocksize, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = map[codes[i]] * absmax[i / blocksize];
}

ACCELERATE_FOR_EACH_PROCESSOR
float quantize_row(const float* values, std::int64_t count, std::int8_t* codes, bool& is_finite) {
  const float most = largest(values, count);
  is_finite = is_finite && std::isfinite(most);
  if (most == 0 || !std::isfinite(most)) {
    std::fill_n(codes, count, std::int8_t{0});
    return most;
  }
  const float scale = 127.0F / most;
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, half to even.
  constexpr float kRounder = 12582912.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    const float rounded = (values[i] * scale + kRounder) - kRounder;
    codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(rounded));
  }
  return most;
}

ACCELERATE_FOR_EACH_PROCESSOR
void multiply_int8(const std::int8_t* row, const std::int8_t* matrix, std::int64_t inputs,
                   std::int64_t begin, std::int64_t end, std::int32_t* out) {
  for (auto o = begin; o < end; ++o) {
    const auto* weights = matrix + o * inputs;
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < inputs; ++i) {
      sum += static_cast<std::int16_t>(row[i]) * static_cast<std::int16_t>(weights[i]);
    }
    out[o] = sum;
  }
}

}  // namespace accelerate::detail::quantization
