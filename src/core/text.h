// src/core/text.h - small text tools: str(), join(), case, splitting, near misses.
#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::inline core {

/// All arguments as one text, each as `operator<<` writes it.
template <class... Parts>
[[nodiscard]] std::string str(const Parts&... parts) {
  std::ostringstream out;
  out.setf(std::ios::boolalpha);
  (out << ... << parts);
  return std::move(out).str();
}

/// "a, b, c". Takes any range of things that can be written to a stream.
template <class Range>
[[nodiscard]] std::string join(const Range& range, std::string_view separator = ", ") {
  std::ostringstream out;
  bool first = true;
  for (const auto& item : range) {
    if (!first) out << separator;
    out << item;
    first = false;
  }
  return std::move(out).str();
}

[[nodiscard]] std::string to_lower(std::string_view text);
[[nodiscard]] std::string to_upper(std::string_view text);

/// Without blanks, tabs and line ends at both sides.
[[nodiscard]] std::string_view trim(std::string_view text);

/// Cuts at every separator; "a,,b" has three parts and "" has one.
[[nodiscard]] std::vector<std::string> split(std::string_view text, char separator);

/// The candidate nearest to a mistyped word, or "" when none is near enough to be meant.
[[nodiscard]] std::string nearest(std::string_view word,
                                  const std::vector<std::string>& candidates);
/// " Did you mean 'x'?" with the nearest candidate, or "".
[[nodiscard]] std::string did_you_mean(std::string_view word,
                                       const std::vector<std::string>& candidates);

}  // namespace accelerate::detail::inline core
