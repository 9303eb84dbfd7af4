#include "launch/terminal_text.h"

#include <algorithm>

#include "core/text.h"

namespace accelerate::detail {
namespace {

constexpr char kEscape = '\x1b';
constexpr char kBell = '\x07';

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// The bytes of the character at the start of `text`; 0 when they are no UTF-8.
std::size_t character_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  std::size_t length = 0;
  if (first < 0x80) length = 1;
  if (first >= 0xc2 && first < 0xe0) length = 2;
  if (first >= 0xe0 && first < 0xf0) length = 3;
  if (first >= 0xf0 && first < 0xf5) length = 4;
  if (length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[i])) return 0;
  }
  return length;
}

// How many bytes the control sequence at the start of `text` has, its ESC included.
std::size_t sequence_length(std::string_view text) {
  if (text.size() < 2) return text.size();
  if (text[1] == '[') {  // ends with a letter or one of @[\\]^_`{|}~
    for (std::size_t i = 2; i < text.size(); ++i) {
      if (text[i] >= 0x40 && text[i] <= 0x7e) return i + 1;
    }
    return text.size();
  }
  if (text[1] == ']') {  // a title or a link; ends with a bell or ESC and a backslash
    for (std::size_t i = 2; i < text.size(); ++i) {
      if (text[i] == kBell) return i + 1;
      if (text[i] == kEscape) return std::min(text.size(), i + 2);
    }
    return text.size();
  }
  return 2;
}

bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (first < 0x20 || first == 0x7f) return first != '\t';
  // U+0080 to U+009F
  return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return !is_continuation(byte); }));
}

}  // namespace

std::string printable_line(std::string_view line) {
  while (line.ends_with('\r') || line.ends_with('\n')) line.remove_suffix(1);
  if (const auto covered = line.rfind('\r'); covered != std::string_view::npos) {
    line.remove_prefix(covered + 1);
  }
  std::string result;
  while (!line.empty()) {
    if (line[0] == kEscape) {
      line.remove_prefix(sequence_length(line));
      continue;
    }
    const std::size_t length = character_length(line);
    const bool shows = length > 0 && !is_control(line.substr(0, length));
    result += shows ? line.substr(0, length) : "?";
    line.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return result;
}

std::vector<std::string> wrap_line(std::string_view line, std::size_t width) {
  const auto indent = std::min(line.find_first_not_of(' '), line.size());
  std::vector<std::string> lines = {std::string(line.substr(0, indent))};
  bool fresh = true;
  for (const auto& word : split(line.substr(indent), ' ')) {
    if (!fresh && width_of(lines.back()) + 1 + width_of(word) > width) {
      lines.emplace_back();
      fresh = true;
    }
    if (!fresh) lines.back() += ' ';
    lines.back() += word;
    fresh = false;
  }
  return lines;
}

}  // namespace accelerate::detail
