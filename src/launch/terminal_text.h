// src/launch/terminal_text.h - text from elsewhere, made fit for a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail {

/// One line as a terminal would end up showing it: what a carriage return covered, colours and all
/// other control sequences are gone, and what is no UTF-8 shows as '?'.
[[nodiscard]] std::string printable_line(std::string_view line);

/// Breaks a line at blanks so that no part is wider than `width`, except for words that are.
[[nodiscard]] std::vector<std::string> wrap_line(std::string_view line, std::size_t width);

}  // namespace accelerate::detail
