// src/formats/crc32.h - the checksum of zip files.
#pragma once

#include <cstdint>
#include <string_view>

namespace accelerate::detail::formats {

/// CRC-32 of `bytes`, continued from `crc`, that of the bytes before them.
[[nodiscard]] std::uint32_t crc32(std::string_view bytes, std::uint32_t crc = 0);

}  // namespace accelerate::detail::formats
