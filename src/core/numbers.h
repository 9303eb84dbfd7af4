// src/core/numbers.h - numbers in text.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

#include "core/text.h"

namespace accelerate::detail::inline core {

/// The number that the whole text is; nullopt for any other text or a number out of range.
template <class T>
[[nodiscard]] std::optional<T> parse_number(std::string_view text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// The same with blanks around it and a '+' before it allowed.
template <class T>
[[nodiscard]] std::optional<T> parse_signed_number(std::string_view text) {
  text = trim(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  return parse_number<T>(text);
}

/// True for one or more decimal digits and nothing else.
[[nodiscard]] inline bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace accelerate::detail::inline core
