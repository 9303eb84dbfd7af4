// src/formats/utf8.h - whether bytes of a file are text.
#pragma once

#include <string_view>

#include "core/python_text.h"

namespace accelerate::detail::formats {

[[nodiscard]] inline bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const auto point = next_code_point(text, at);
    if (!point.valid) return false;
    at += point.length;
  }
  return true;
}

}  // namespace accelerate::detail::formats
