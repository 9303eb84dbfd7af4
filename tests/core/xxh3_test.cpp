#include "core/xxh3.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace accelerate::detail {
namespace {

std::vector<std::byte> bytes(std::size_t size) {
  std::vector<std::byte> result(size);
  for (std::size_t i = 0; i < size; ++i) {
    result[i] = static_cast<std::byte>(static_cast<std::uint32_t>(i * 2654435761U) >> 24);
  }
  return result;
}

// From python-xxhash 4.1.0: one length for each way of hashing, and the lengths beside its limits.
const std::vector<std::pair<std::size_t, std::uint64_t>> kVectors{
    {0, 0x2d06800538d394c2},    {1, 0xc44bdff4074eecdb},    {2, 0xb0a5d4f167a89d5e},
    {3, 0xe14090f554a5ea90},    {4, 0x2e8d078a566e9749},    {5, 0x94b7bed600f8ce63},
    {8, 0xcd1c7f88482fcaef},    {9, 0xbfe43def699fa9e3},    {16, 0x81e9eb8634460bb9},
    {17, 0x9998430fd0a655be},   {32, 0x938c25dd24c9cf3b},   {33, 0x0e399d30188e9c8e},
    {64, 0x22a06b30c4c72936},   {65, 0x7faff6eee7812d5c},   {96, 0x324046d7ff9771f1},
    {97, 0x00d61f9a16f8effd},   {128, 0x75eca5c5d5594884},  {129, 0xa05da42e7a4e4667},
    {144, 0x2e63ceed9f938e07},  {240, 0x5eb2467c8c9e3969},  {241, 0x2d431e984c441f15},
    {256, 0x1369aaf85f8b805a},  {1023, 0x4e30bb611faa8f67}, {1024, 0xe99def1145f12936},
    {1025, 0x83cba9b371e4e7f4}, {1088, 0x8e7e69b3a7124813}, {2048, 0x53275d58cfba68fd},
    {2049, 0x3cd32460d504d215}, {5000, 0xb9daede5f99f736e}, {8192, 0x4de76c9d88eabe9d}};

TEST(Xxh3, GivesTheHashesOfTheReference) {
  for (const auto& [size, hash] : kVectors) EXPECT_EQ(xxh3(bytes(size)), hash) << size;
}

TEST(Xxh3, DoesNotDependOnTheParts) {
  for (const auto& [size, hash] : kVectors) {
    const auto all = bytes(size);
    for (const std::size_t part : {1, 7, 64, 1000, 1024, 1025}) {
      Xxh3 state;
      for (std::size_t at = 0; at < size; at += part) {
        state.update(std::span(all).subspan(at, std::min(part, size - at)));
      }
      EXPECT_EQ(state.digest(), hash) << size << " in parts of " << part;
    }
  }
}

}  // namespace
}  // namespace accelerate::detail
