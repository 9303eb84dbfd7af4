// src/core/xxh3.h - the checksum of tensors and files: XXH3 with 64 bits, seed 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace accelerate::detail::inline core {

/// XXH3-64 of bytes that come in parts; equal to what other implementations (`xxhsum -H3`) give for
/// all of them at once. Finds accidents, not attackers.
class Xxh3 {
 public:
  void update(std::span<const std::byte> bytes);
  /// Of all bytes so far; more may follow.
  [[nodiscard]] std::uint64_t digest() const;

 private:
  static constexpr std::size_t kStripe = 64;
  static constexpr std::size_t kBlock = 1024;  // 16 stripes

  void consume_block(const std::byte* block);
  [[nodiscard]] std::uint64_t digest_long() const;

  std::array<std::uint64_t, 8> lanes_ = {0xC2B2AE3D,         0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F,
                                         0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77,
                                         0x27D4EB2F165667C5, 0x9E3779B1};
  // The stripe before the pending bytes, and these: the last stripe of all may begin in the former.
  std::array<std::byte, kStripe + kBlock> buffer_{};
  std::size_t pending_ = 0;
  std::uint64_t total_ = 0;
};

[[nodiscard]] std::uint64_t xxh3(std::span<const std::byte> bytes);

}  // namespace accelerate::detail::inline core
