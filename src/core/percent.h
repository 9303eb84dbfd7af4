// src/core/percent.h - the escapes of addresses: %20 is a blank.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

namespace accelerate::detail::inline core {

/// %XX as the byte; what is no such escape stays.
[[nodiscard]] inline std::string percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto digits = text.substr(at + 1, text[at] == '%' ? 2 : 0);
    std::uint8_t byte = 0;
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16).ptr;
    const bool escape = digits.size() == 2 && end == digits.data() + 2;
    out += escape ? static_cast<char>(byte) : text[at];
    if (escape) at += 2;
  }
  return out;
}

}  // namespace accelerate::detail::inline core
