#include "formats/crc32.h"

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

}  // namespace

std::uint32_t crc32(std::string_view bytes, std::uint32_t crc) {
  crc = ~crc;
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
