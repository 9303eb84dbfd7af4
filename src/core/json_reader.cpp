// A reader of our own: Python writes NaN and Infinity, integers must not silently become doubles,
// and errors name line and column.
#include <charconv>
#include <cstdint>
#include <limits>

#include "accelerate/errors.h"
#include "accelerate/value/json.h"
#include "core/files.h"
#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Reader {
 public:
  Reader(std::string_view text, std::string_view source, bool unique_keys)
      : text_(text), source_(source), unique_keys_(unique_keys) {}

  Value document() {
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;  // a byte order mark
    Value value = read_value(0);
    skip_blanks();
    if (at_ != text_.size()) refuse("there is something behind the value");
    return value;
  }

 private:
  [[noreturn]] void refuse(std::string_view problem) const { refuse(problem, at_); }

  [[noreturn]] void refuse(std::string_view problem, std::size_t where) const {
    std::size_t line = 1;
    std::size_t line_start = 0;
    for (std::size_t i = 0; i < where && i < text_.size(); ++i) {
      if (text_[i] != '\n') continue;
      ++line;
      line_start = i + 1;
    }
    throw ConfigError(
        str(source_, ", line ", line, ", column ", where - line_start + 1, ": ", problem, "."));
  }

  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  void skip_blanks() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }

  Value read_value(int depth) {
    skip_blanks();
    if (depth > kMaxValueDepth) {
      refuse(str("the value is nested deeper than ", kMaxValueDepth, " levels"));
    }
    if (at_ == text_.size()) refuse("expected a value, found the end");
    if (take("{")) return read_object(depth);
    if (take("[")) return read_array(depth);
    if (take("\"")) return read_string();
    if (take("null")) return {};
    if (take("true")) return true;
    if (take("false")) return false;
    if (take("NaN")) return std::numeric_limits<double>::quiet_NaN();
    if (take("Infinity")) return std::numeric_limits<double>::infinity();
    if (take("-Infinity")) return -std::numeric_limits<double>::infinity();
    return read_number();
  }

  Value read_object(int depth) {
    Value::Dict dict;
    skip_blanks();
    if (take("}")) return dict;
    for (;;) {
      skip_blanks();
      const std::size_t start = at_;
      if (!take("\"")) refuse("expected a key in double quotes");
      const std::string key = read_string();
      if (unique_keys_ && dict.contains(key)) {
        refuse(str("the key '", key, "' is here a second time"), start);
      }
      skip_blanks();
      if (!take(":")) refuse("expected ':' behind the key");
      dict.set(key, read_value(depth + 1));
      skip_blanks();
      if (take("}")) return dict;
      if (!take(",")) refuse("expected ',' or '}'");
    }
  }

  Value read_array(int depth) {
    Value::List list;
    skip_blanks();
    if (take("]")) return list;
    for (;;) {
      list.push_back(read_value(depth + 1));
      skip_blanks();
      if (take("]")) return list;
      if (!take(",")) refuse("expected ',' or ']'");
    }
  }

  Value read_number() {
    const std::size_t start = at_;
    bool whole = true;
    take("-");
    if (!is_digit(peek())) refuse("expected a value", start);
    if (!take("0")) skip_digits();
    if (peek() == '.' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1])) {
      whole = false;
      ++at_;
      skip_digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      const std::size_t before = at_++;
      if (peek() == '+' || peek() == '-') ++at_;
      if (is_digit(peek())) {
        whole = false;
        skip_digits();
      } else {
        at_ = before;
      }
    }
    const auto digits = text_.substr(start, at_ - start);
    if (!whole) return read_double(digits);
    std::int64_t number = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (result.ec != std::errc()) refuse("the integer does not fit into 64 bits", start);
    return number;
  }

  void skip_digits() {
    while (is_digit(peek())) ++at_;
  }

  std::string read_string() {
    std::string out;
    for (;;) {
      if (at_ == text_.size()) refuse("the string has no end");
      const auto point = next_code_point(text_, at_);
      if (!point.valid) refuse("the text is not UTF-8");
      if (point.value < 0x20) refuse("a control character must be escaped inside a string");
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return out;
      }
      if (c == '\\') {
        read_escape(out);
      } else {
        out += text_.substr(at_, point.length);
        at_ += point.length;
      }
    }
  }

  void read_escape(std::string& out) {
    static constexpr std::string_view kLetters = "\"\\/bfnrt";
    static constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const std::size_t start = at_++;
    if (const auto letter = kLetters.find(peek()); at_ < text_.size() && letter != kLetters.npos) {
      out += kMeanings[letter];
      ++at_;
      return;
    }
    if (!take("u")) refuse("unknown escape inside a string", start);
    std::uint32_t code = read_hex(start);
    if (code >= 0xD800 && code < 0xDC00 && take("\\u")) {
      const std::uint32_t low = read_hex(start);
      if (low < 0xDC00 || low > 0xDFFF) refuse("half a surrogate pair is no character", start);
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xD800 && code < 0xE000) {
      refuse("half a surrogate pair is no character", start);
    }
    append_utf8(out, code);
  }

  std::uint32_t read_hex(std::size_t start) {
    std::uint32_t code = 0;
    const auto digits = text_.substr(at_, 4);
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || result.ptr != digits.data() + 4) {
      refuse("\\u needs four hexadecimal digits", start);
    }
    at_ += 4;
    return code;
  }

  std::string_view text_;
  std::string_view source_;
  bool unique_keys_;
  std::size_t at_ = 0;
};

}  // namespace

Value json_loads(std::string_view text, std::string_view source) {
  return Reader(text, source, /*unique_keys=*/false).document();
}

Value json_loads_unique(std::string_view text, std::string_view source) {
  return Reader(text, source, /*unique_keys=*/true).document();
}

std::optional<Value::Dict> json_object(std::string_view line) {
  try {
    Value value = json_loads(line);
    if (value.is_dict()) return std::move(value).as_dict();
  } catch (const ConfigError&) {
    // Not JSON.
  }
  return std::nullopt;
}

}  // namespace accelerate::detail::inline core

namespace accelerate {

Value read_json_file(const std::filesystem::path& path) {
  return detail::json_loads(detail::read_whole_file(path), path.string());
}

}  // namespace accelerate
