// src/formats/pattern_parser.h - from the text of a pattern to its program.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "formats/pattern.h"

namespace accelerate::detail::formats {

struct ParsedPattern {
  std::size_t groups = 0;
  std::vector<Pattern::Instruction> program = {};
  std::vector<Pattern::CharacterClass> classes = {};
};

/// Throws `ConfigError` as the constructor of `Pattern`.
[[nodiscard]] ParsedPattern parse_pattern(std::string_view text);

}  // namespace accelerate::detail::formats
