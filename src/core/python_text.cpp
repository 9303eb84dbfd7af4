#include "core/python_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace accelerate::detail::inline core {
namespace {

// Double quotes only where there are single ones inside and no double ones, as Python decides.
char quote_for(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const bool has_double = text.find('"') != std::string_view::npos;
  return has_single && !has_double ? '"' : '\'';
}

// True when the character had a short escape of its own.
bool append_short_escape(std::string& out, char32_t c, char quote) {
  constexpr std::string_view kSpecial = "\n\r\t\\";
  constexpr std::string_view kLetters = "nrt\\";
  const auto special = c < 0x80 ? kSpecial.find(static_cast<char>(c)) : kSpecial.npos;
  if (special == kSpecial.npos && c != static_cast<unsigned char>(quote)) return false;
  out += '\\';
  out += special == kSpecial.npos ? quote : kLetters[special];
  return true;
}

}  // namespace

std::string python_repr(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number,
                                 std::chars_format::scientific);
  const std::string_view text(buffer.data(), static_cast<std::size_t>(end.ptr - buffer.data()));
  // -d.ddde+XX, taken apart
  const bool negative = text.front() == '-';
  const auto e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  std::string out = negative ? "-" : "";
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {  // where Python's repr changes to an exponent
    out += digits.substr(0, 1);
    if (count > 1) out += "." + digits.substr(1);
    out += exponent < 0 ? "e-" : "e+";
    const int magnitude = std::abs(exponent);
    if (magnitude < 10) out += '0';
    return out + std::to_string(magnitude);
  }
  if (exponent < 0) {
    return out + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  }
  if (count <= exponent + 1) {
    return out + digits + std::string(static_cast<std::size_t>(exponent + 1 - count), '0') + ".0";
  }
  const auto whole = static_cast<std::size_t>(exponent) + 1;
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string python_repr(std::string_view text) {
  const char quote = quote_for(text);
  std::string out(1, quote);
  out.reserve(text.size() + 2);
  for (std::size_t at = 0; at < text.size();) {
    const auto point = next_code_point(text, at);
    const char32_t c = point.value;
    if (!append_short_escape(out, c, quote)) {
      if (point.valid && is_printable(c)) {
        out += text.substr(at, point.length);
      } else {
        const int width = c < 0x100 ? 2 : c < 0x10000 ? 4 : 8;
        out += width == 2 ? "\\x" : width == 4 ? "\\u" : "\\U";
        append_hex(out, c, width);
      }
    }
    at += point.length;
  }
  out += quote;
  return out;
}

std::string python_bytes_repr(std::string_view data) {
  const char quote = quote_for(data);
  std::string out = "b";
  out += quote;
  for (const char signed_c : data) {
    const auto c = static_cast<unsigned char>(signed_c);
    if (append_short_escape(out, c, quote)) continue;
    if (c >= 0x20 && c < 0x7F) {
      out += signed_c;
    } else {
      out += "\\x";
      append_hex(out, c, 2);
    }
  }
  out += quote;
  return out;
}

double python_round(double number, int digits) {
  if (!std::isfinite(number)) return number;
  // The C library prints the exact binary value rounded half to even: what Python's round does.
  std::array<char, 400> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number,
                                 std::chars_format::fixed, digits);
  double rounded = 0;
  std::from_chars(buffer.data(), end.ptr, rounded);
  return rounded;
}

double read_double(std::string_view digits) {
  double number = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (result.ec != std::errc::result_out_of_range) return number;
  // Out of range to which side? Where the first digit that counts stands, tells.
  const auto e = std::min(digits.find_first_of("eE"), digits.size());
  const auto mantissa = digits.substr(0, e);
  const bool negative_exponent = digits.substr(e).find('-') != std::string_view::npos;
  const auto point = std::min(mantissa.find('.'), mantissa.size());
  const auto first = mantissa.find_first_of("123456789");
  const bool large = e == digits.size() ? first < point : !negative_exponent;
  const double magnitude = large ? std::numeric_limits<double>::infinity() : 0.0;
  return digits.starts_with('-') ? -magnitude : magnitude;
}

CodePoint next_code_point(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const CodePoint broken{char32_t{0xDC00} + lead, 1, false};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() - at < length) return broken;
  char32_t value = lead & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return broken;
    value = (value << 6) | (byte(i) & 0x3Fu);
  }
  // Longer than needed, a half of a surrogate pair, or beyond Unicode.
  constexpr std::array<char32_t, 5> kSmallest{0, 0, 0x80, 0x800, 0x10000};
  if (value < kSmallest[length] || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
    return broken;
  }
  return {value, length, true};
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
    return;
  }
  const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;  // bytes behind the first, six bits each
  out += static_cast<char>((0xFF00u >> (more + 1) & 0xFF) | c >> 6 * more);
  for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | (c >> 6 * i & 0x3F));
}

void append_hex(std::string& out, std::uint32_t value, int width) {
  std::array<char, 8> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, 16);
  const auto digits = static_cast<int>(end.ptr - buffer.data());
  if (digits < width) out.append(static_cast<std::size_t>(width - digits), '0');
  out.append(buffer.data(), end.ptr);
}

}  // namespace accelerate::detail::inline core
