#include <cmath>
#include <span>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/sorted_entries.h"
#include "core/text.h"
#include "core/yaml.h"
#include "core/yaml_scalar.h"

namespace accelerate::detail {
namespace {

constexpr int kIndent = 2;

// PyYAML writes longer keys behind a '?'. The tag counts there, though it is not written.
constexpr std::size_t kLongestSimpleKey = 128;
constexpr std::size_t kTagLength = 5;  // !!str, !!int

bool is_break(char32_t c) { return c == '\n' || c == 0x85 || c == 0x2028 || c == 0x2029; }
bool is_blank(char32_t c) { return c == 0 || c == ' ' || c == '\t' || c == '\r' || is_break(c); }

// How a string may be written.
struct Style {
  bool plain = true;
  bool single_quoted = true;
  bool multiline = false;
};

std::u32string code_points(std::string_view text) {
  std::u32string points;
  for (std::size_t at = 0; at < text.size();) {
    const auto point = next_code_point(text, at);
    points += point.value;
    at += point.length;
  }
  return points;
}

bool has_indicators(const std::u32string& text) {
  if (text.starts_with(U"---") || text.starts_with(U"...")) return true;
  const auto blank_at = [&](std::size_t i) { return i >= text.size() || is_blank(text[i]); };
  if (std::u32string_view(U"#,[]{}&*!|>'\"%@`").find(text[0]) != std::u32string_view::npos) {
    return true;
  }
  if ((text[0] == '?' || text[0] == ':' || text[0] == '-') && blank_at(1)) return true;
  for (std::size_t i = 1; i < text.size(); ++i) {
    if (text[i] == ':' && blank_at(i + 1)) return true;
    if (text[i] == '#' && is_blank(text[i - 1])) return true;
  }
  return false;
}

Style analyse(const std::u32string& text) {
  Style style;
  if (text.empty()) return style;
  bool special = false;
  bool blank_before_break = false;
  bool blank_after_break = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char32_t c = text[i];
    style.multiline |= is_break(c);
    special |= c != '\n' && (c < 0x20 || c > 0x7E);
    blank_before_break |= i > 0 && is_break(c) && text[i - 1] == ' ';
    blank_after_break |= i > 0 && c == ' ' && is_break(text[i - 1]);
  }
  const auto at_rim = [](char32_t c) { return c == ' ' || is_break(c); };
  style.single_quoted = !special && !blank_before_break && !blank_after_break;
  style.plain = style.single_quoted && !style.multiline && !at_rim(text.front()) &&
                !at_rim(text.back()) && !has_indicators(text);
  return style;
}

class Writer {
 public:
  std::string document(const Value& value) {
    if (value.is_dict() && !value.as_dict().empty()) {
      write_mapping(value.as_dict(), 0, /*first_in_line=*/false, 0);
    } else if (is_filled_list(value)) {
      write_sequence(value.items(), 0, /*first_in_line=*/false, 0);
    } else {
      const bool plain = write_scalar(value, kIndent);
      out_ += '\n';
      if (plain) out_ += "...\n";
    }
    return std::move(out_);
  }

 private:
  static bool is_filled_list(const Value& value) {
    return (value.is_list() || value.is_tuple()) && !value.items().empty();
  }

  void indent(int columns) { out_.append(static_cast<std::size_t>(columns), ' '); }

  static void check_depth(int depth) {
    if (depth > kMaxValueDepth) {
      throw ArgumentError(str("The value is nested deeper than ", kMaxValueDepth, " levels."));
    }
  }

  // `first_in_line`: the first entry stands behind "- " in the same line.
  void write_mapping(const Value::Dict& dict, int column, bool first_in_line, int depth) {
    check_depth(depth);
    bool first = first_in_line;
    for (const auto* entry : entries(dict, /*sorted=*/true)) {
      if (!first) indent(column);
      first = false;
      if (write_key(entry->key(), column)) {
        out_ += ':';
        write_mapping_value(entry->value(), column, depth);
      } else {
        out_ += '\n';
        indent(column);
        out_ += ": ";
        write_inline(entry->value(), column, depth);
      }
    }
  }

  // False: the key was written behind a '?', and its value stands behind ':' in a line of its own.
  bool write_key(const ValueKey& key, int column) {
    if (!key.is_string()) {
      write_scalar(key.value(), column + kIndent);
      return true;
    }
    const auto points = code_points(key.as_string());
    const bool simple = !points.empty() && points.size() + kTagLength < kLongestSimpleKey &&
                        !analyse(points).multiline;
    if (!simple) out_ += "? ";
    write_string(key.as_string(), column + kIndent);
    return simple;
  }

  void write_mapping_value(const Value& value, int column, int depth) {
    if (value.is_dict() && !value.as_dict().empty()) {
      out_ += '\n';
      write_mapping(value.as_dict(), column + kIndent, /*first_in_line=*/false, depth + 1);
    } else if (is_filled_list(value)) {
      out_ += '\n';
      write_sequence(value.items(), column, /*first_in_line=*/false, depth + 1);
    } else {
      out_ += ' ';
      write_scalar(value, column + kIndent);
      out_ += '\n';
    }
  }

  void write_sequence(std::span<const Value> items, int column, bool first_in_line, int depth) {
    check_depth(depth);
    bool first = first_in_line;
    for (const auto& item : items) {
      if (!first) indent(column);
      first = false;
      out_ += "- ";
      write_inline(item, column, depth);
    }
  }

  // Something behind "- " or ": ", whose own lines go two blanks further in.
  void write_inline(const Value& value, int column, int depth) {
    if (value.is_dict() && !value.as_dict().empty()) {
      write_mapping(value.as_dict(), column + kIndent, /*first_in_line=*/true, depth + 1);
    } else if (is_filled_list(value)) {
      write_sequence(value.items(), column + kIndent, /*first_in_line=*/true, depth + 1);
    } else {
      write_scalar(value, column + kIndent);
      out_ += '\n';
    }
  }

  // Also of empty lists and dicts. Whether it was written plain.
  bool write_scalar(const Value& value, int column) {
    using enum Value::Kind;
    switch (value.kind()) {
      case kNone:
        out_ += "null";
        return true;
      case kBool:
        out_ += value.as_bool() ? "true" : "false";
        return true;
      case kInt:
        out_ += std::to_string(value.as_int());
        return true;
      case kDouble:
        out_ += float_text(value.as_double());
        return true;
      case kString:
        return write_string(value.as_string(), column);
      case kList:
      case kTuple:
        out_ += "[]";
        return false;
      case kDict:
        out_ += "{}";
        return false;
      default:
        throw ArgumentError(str("YAML cannot hold a value of kind ", value.kind_name(), "."));
    }
  }

  static std::string float_text(double number) {
    if (std::isnan(number)) return ".nan";
    if (std::isinf(number)) return number > 0 ? ".inf" : "-.inf";
    auto text = python_repr(number);
    // 1e+17 would be read as a string: YAML 1.1 wants a dot.
    const auto e = text.find('e');
    if (e != std::string::npos && text.find('.') == std::string::npos) text.insert(e, ".0");
    return text;
  }

  bool write_string(const std::string& text, int column) {
    const auto points = code_points(text);
    const auto style = analyse(points);
    if (style.plain && resolve_yaml(text) == YamlTag::kString) {
      out_ += text;
      return true;
    }
    if (style.single_quoted) {
      write_single_quoted(text, column);
    } else {
      write_double_quoted(points);
    }
    return false;
  }

  // A line end becomes an empty line: single ones would be read as blanks.
  void write_single_quoted(std::string_view text, int column) {
    out_ += '\'';
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\n') {
        const bool first = i == 0 || text[i - 1] != '\n';
        const bool last = i + 1 == text.size() || text[i + 1] != '\n';
        out_ += first ? "\n\n" : "\n";
        if (last) indent(column);
      } else {
        out_ += text[i];
        if (text[i] == '\'') out_ += '\'';
      }
    }
    out_ += '\'';
  }

  void write_double_quoted(const std::u32string& text) {
    static constexpr std::u32string_view kSpecial{U"\0\a\b\t\n\v\f\r\x1B\"\\\x85\xA0\u2028\u2029",
                                                  15};  // with a zero in front
    static constexpr std::string_view kLetters = "0abtnvfre\"\\N_LP";
    out_ += '"';
    for (const char32_t c : text) {
      if (const auto special = kSpecial.find(c); special != kSpecial.npos) {
        out_ += '\\';
        out_ += kLetters[special];
      } else if (c >= 0x20 && c <= 0x7E) {
        out_ += static_cast<char>(c);
      } else {
        std::string hex;
        append_hex(hex, c, c <= 0xFF ? 2 : c <= 0xFFFF ? 4 : 8);
        out_ += c <= 0xFF ? "\\x" : c <= 0xFFFF ? "\\u" : "\\U";
        out_ += to_upper(hex);
      }
    }
    out_ += '"';
  }

  std::string out_;
};

}  // namespace

std::string yaml_dumps(const Value& value) { return Writer().document(value); }

}  // namespace accelerate::detail
