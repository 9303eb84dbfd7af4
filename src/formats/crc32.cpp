#include "formats/crc32.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace accelerate::detail::formats {
namespace {

constexpr std::size_t kSlices = 16;
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[s][b]: the checksum of byte b followed by s zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320U : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

static_assert(std::endian::native == std::endian::little);

#if defined(__x86_64__)
// Intel's "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ": four registers are folded
// over the data by carry-less products, then into one, then reduced. `crc` is that of the bytes
// before, inverted. Takes multiples of 16 bytes, at least 64.
__attribute__((target("pclmul,sse4.1"))) std::uint32_t crc32_folded(std::string_view bytes,
                                                                    std::uint32_t crc) {
  const auto load = [&](std::size_t at) __attribute__((target("sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data() + at));
  };
  const auto fold = [](__m128i x, __m128i by,
                       __m128i next) __attribute__((target("pclmul,sse4.1"))) {
    const auto products =
        _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
    return _mm_xor_si128(products, next);
  };
  const auto by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const auto by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i x[4] = {load(0), load(16), load(32), load(48)};
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (bytes.remove_prefix(64); bytes.size() >= 64; bytes.remove_prefix(64)) {
    for (std::size_t i = 0; i < 4; ++i) x[i] = fold(x[i], by_64, load(16 * i));
  }
  auto y = x[0];
  for (std::size_t i = 1; i < 4; ++i) y = fold(y, by_16, x[i]);
  for (; bytes.size() >= 16; bytes.remove_prefix(16)) y = fold(y, by_16, load(0));

  const auto low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  y = _mm_xor_si128(_mm_srli_si128(y, 8), _mm_clmulepi64_si128(y, by_16, 0x10));
  y = _mm_xor_si128(
      _mm_srli_si128(y, 4),
      _mm_clmulepi64_si128(_mm_and_si128(y, low_words), _mm_set_epi64x(0, 0x0163cd6124), 0x00));
  const auto barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  auto z = _mm_clmulepi64_si128(_mm_and_si128(y, low_words), barrett, 0x10);
  z = _mm_clmulepi64_si128(_mm_and_si128(z, low_words), barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(y, z), 1));
}
#endif

}  // namespace

std::uint32_t crc32(std::string_view bytes, std::uint32_t crc) {
  crc = ~crc;
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && bytes.size() >= 64) {
    const auto whole = bytes.size() / 16 * 16;
    crc = crc32_folded(bytes.substr(0, whole), crc);
    bytes.remove_prefix(whole);
  }
#endif
  // Sixteen bytes a round: the tables make their contributions independent of each other.
  while (bytes.size() >= kSlices) {
    std::array<std::uint32_t, 4> words{};
    std::memcpy(words.data(), bytes.data(), kSlices);
    words[0] ^= crc;
    crc = 0;
    for (std::size_t word = 0; word < words.size(); ++word) {
      for (std::size_t byte = 0; byte < 4; ++byte) {
        crc ^= kTables[kSlices - 1 - 4 * word - byte][(words[word] >> (8 * byte)) & 0xFF];
      }
    }
    bytes.remove_prefix(kSlices);
  }
  for (const char byte : bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint8_t>(byte)) & 0xFF];
  }
  return ~crc;
}

}  // namespace accelerate::detail::formats
