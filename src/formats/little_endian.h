// src/formats/little_endian.h - numbers in files, the low byte first.
#pragma once

#include <bit>
#include <concepts>
#include <cstring>
#include <string>
#include <string_view>

namespace accelerate::detail::formats {

static_assert(std::endian::native == std::endian::little);

/// The number at `bytes[at]`, which the caller ensures is there.
template <std::integral T>
[[nodiscard]] T read_little(std::string_view bytes, std::size_t at) {
  T number{};
  std::memcpy(&number, bytes.data() + at, sizeof(T));
  return number;
}

template <std::integral... T>
void append_little(std::string& out, T... numbers) {
  (out.append(reinterpret_cast<const char*>(&numbers), sizeof(T)), ...);
}

}  // namespace accelerate::detail::formats
