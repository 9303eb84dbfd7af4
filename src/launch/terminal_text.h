// src/launch/terminal_text.h - text of other programs, made safe for a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::launch {

/// One line as a terminal would show it in the end: without text that a carriage return overwrites
/// and without control sequences. Control characters and bytes that are not UTF-8 become '?'.
[[nodiscard]] std::string printable_line(std::string_view line);

/// Breaks a line at blanks into parts of at most `width` columns; longer words are not broken.
[[nodiscard]] std::vector<std::string> wrap_line(std::string_view line, std::size_t width);

}  // namespace accelerate::detail::launch
