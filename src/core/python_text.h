// src/core/python_text.h - texts exactly as Python prints them: repr() of numbers, strings, bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace accelerate::detail::inline core {

/// The shortest digits that read back as `number`: 0.1, 1e-05, 1e+16, inf, nan, -0.0.
[[nodiscard]] std::string python_repr(double number);

/// 'text', with Python's choice of quotes and its escapes. What is not UTF-8 comes out as Python's
/// surrogate escapes: '\udcff'.
[[nodiscard]] std::string python_repr(std::string_view text);

/// b'\x00data'.
[[nodiscard]] std::string python_bytes_repr(std::string_view data);

/// The number rounded to `digits` decimals, half to even on the exact binary value, as Python's
/// round() does.
[[nodiscard]] double python_round(double number, int digits);

/// Reads a decimal number whose form the caller has checked. What is too large becomes infinite and
/// what is too small zero, as Python's float() does it.
[[nodiscard]] double read_double(std::string_view digits);

/// One code point read from UTF-8.
struct CodePoint {
  char32_t value = 0;
  std::size_t length = 0;  ///< bytes taken
  bool valid = false;      ///< no: one byte that is not UTF-8, as 0xDC00 + byte
};

/// The code point that starts at `text[at]`; `at` must be inside the text.
[[nodiscard]] CodePoint next_code_point(std::string_view text, std::size_t at);
void append_utf8(std::string& out, char32_t code_point);

/// Appends the lower-case hexadecimal digits of `value`, at least `width` of them.
void append_hex(std::string& out, std::uint32_t value, int width);

/// True if Python's str.isprintable() is true for it.
[[nodiscard]] bool is_printable(char32_t code_point);

}  // namespace accelerate::detail::inline core
