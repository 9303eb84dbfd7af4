// src/core/numbers.h - numbers in text.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace accelerate::detail::inline core {

/// The number that the whole text is; nullopt for any other text or a number out of range.
template <class T>
[[nodiscard]] std::optional<T> parse_number(std::string_view text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// True for one or more decimal digits and nothing else.
[[nodiscard]] inline bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace accelerate::detail::inline core
