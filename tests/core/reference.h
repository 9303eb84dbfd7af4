// tests/core/reference.h - tables that Python wrote, under tests/reference/.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/json.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate::test {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline Value reference(const std::string& name) {
  return detail::json_loads(read_file(reference_path(name)), name);
}

/// A double written as its 16 hexadecimal digits.
inline double from_bits(const std::string& hex) {
  std::uint64_t bits = 0;
  std::from_chars(hex.data(), hex.data() + hex.size(), bits, 16);
  return std::bit_cast<double>(bits);
}

}  // namespace accelerate::test
