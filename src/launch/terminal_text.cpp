#include "launch/terminal_text.h"

#include <algorithm>

#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

constexpr char kEscape = '\x1b';
constexpr char kBell = '\x07';

// The number of bytes of the control sequence at the start of `text`, including ESC.
std::size_t sequence_length(std::string_view text) {
  if (text.size() < 2) return text.size();
  std::size_t end = 2;
  if (text[1] == '[') {  // ends with a letter or one of @[\\]^_`{|}~
    while (end < text.size() && (text[end] < 0x40 || text[end] > 0x7e)) ++end;
    return std::min(text.size(), end + 1);
  }
  if (text[1] != ']') return end;
  // A title or a link; ends with a bell or ESC and a backslash.
  while (end < text.size() && text[end] != kBell && text[end] != kEscape) ++end;
  return std::min(text.size(), end < text.size() && text[end] == kEscape ? end + 2 : end + 1);
}

bool is_control(char32_t c) { return (c < 0x20 && c != '\t') || (c >= 0x7f && c < 0xa0); }

std::size_t width_of(std::string_view text) {
  // Every byte but the continuations of UTF-8 (10xxxxxx).
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (byte & 0xc0) != 0x80; }));
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
    const CodePoint point = next_code_point(line, 0);
    const bool shows = point.valid && !is_control(point.value);
    result += shows ? line.substr(0, point.length) : "?";
    line.remove_prefix(point.length);
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

}  // namespace accelerate::detail::launch
