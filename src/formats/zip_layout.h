// src/formats/zip_layout.h - the constants of the zip format (PKWARE's APPNOTE 4.3).
#pragma once

#include <cstdint>

namespace accelerate::detail::formats::zip {

inline constexpr std::uint32_t kLocalSignature = 0x04034b50;
inline constexpr std::uint32_t kDescriptorSignature = 0x08074b50;
inline constexpr std::uint32_t kCentralSignature = 0x02014b50;
inline constexpr std::uint32_t kEnd64Signature = 0x06064b50;
inline constexpr std::uint32_t kLocatorSignature = 0x07064b50;
inline constexpr std::uint32_t kEndSignature = 0x06054b50;

inline constexpr std::uint64_t kLocalSize = 30;
inline constexpr std::uint64_t kCentralSize = 46;
inline constexpr std::uint64_t kEnd64Size = 56;
inline constexpr std::uint64_t kLocatorSize = 20;
inline constexpr std::uint64_t kEndSize = 22;

inline constexpr std::uint16_t kEncrypted = 0x0001;
/// Checksum and sizes follow the data.
inline constexpr std::uint16_t kHasDescriptor = 0x0008;
inline constexpr std::uint16_t kStored = 0;
inline constexpr std::uint16_t kVersion = 20;
inline constexpr std::uint16_t kVersion64 = 45;
inline constexpr std::uint16_t kZip64Extra = 1;

/// Stands for a number that is in the zip64 extra field.
inline constexpr std::uint32_t kMax32 = 0xFFFFFFFF;
inline constexpr std::uint16_t kMax16 = 0xFFFF;

}  // namespace accelerate::detail::formats::zip
