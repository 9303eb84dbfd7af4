// Bytes as text that a terminal can show.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace examples {

/// The size of the UTF-8 character that `text` begins with, 0 if it begins with none.
inline std::size_t utf8_size(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const int first = byte(0), second = byte(1);
  if (first < 0x80) return text.empty() ? 0 : 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  // Nothing that has a shorter form, no half of a pair of UTF-16, nothing beyond U+10FFFF.
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f)) return 0;
  if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) return 0;
  const std::size_t size = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return size;
}

/// `text` with a � for each byte that is no part of a character, and for control characters but the
/// end of a line.
inline std::string readable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const auto size = utf8_size(text);
    const bool control = (text[0] >= 0 && text[0] < ' ' && text[0] != '\n') || text[0] == 0x7f;
    shown += size == 0 || control ? "\ufffd" : text.substr(0, size);
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return shown;
}

}  // namespace examples
