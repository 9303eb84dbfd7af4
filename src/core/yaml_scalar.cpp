#include "core/yaml_scalar.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <string>

#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

constexpr std::string_view kDecimal = "0123456789";
constexpr std::string_view kDecimalOrBar = "0123456789_";

// Walks over a text; each `take` moves only when it succeeds.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : rest_(text) {}

  bool take(std::string_view word) {
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }
  bool take_one_of(std::string_view characters) {
    if (rest_.empty() || characters.find(rest_[0]) == std::string_view::npos) return false;
    rest_.remove_prefix(1);
    return true;
  }
  /// How many there were.
  std::size_t take_all_of(std::string_view characters) {
    const auto count = std::min(rest_.find_first_not_of(characters), rest_.size());
    rest_.remove_prefix(count);
    return count;
  }
  /// Between `least` and `most` digits.
  bool take_digits(std::size_t least, std::size_t most) {
    const auto there = std::min(rest_.find_first_not_of(kDecimal), rest_.size());
    if (there < least) return false;
    rest_.remove_prefix(std::min(there, most));
    return true;
  }
  [[nodiscard]] bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

// (:[0-5]?[0-9])+
bool take_sexagesimal(Cursor& cursor) {
  bool any = false;
  while (cursor.take(":")) {
    if (!cursor.take_one_of(kDecimal)) return false;
    any = true;
    // A second digit only behind 0 to 5; otherwise what follows fails to match anyway.
    cursor.take_one_of(kDecimal);
  }
  return any;
}

// Two digits behind a colon begin with 0 to 5.
bool sixties_are_small(std::string_view text) {
  for (auto colon = text.find(':'); colon != std::string_view::npos;
       colon = text.find(':', colon + 1)) {
    const auto part = text.substr(colon + 1, 2);
    if (part.size() == 2 && kDecimal.find(part[1]) != std::string_view::npos && part[0] > '5') {
      return false;
    }
  }
  return true;
}

bool is_float(std::string_view text) {
  Cursor cursor(text);
  const auto exponent_then_end = [](Cursor c) {
    if (c.take_one_of("eE") && !(c.take_one_of("+-") && c.take_all_of(kDecimal) > 0)) return false;
    return c.at_end();
  };
  const bool sign = cursor.take_one_of("+-");
  if (cursor.take(".inf") || cursor.take(".Inf") || cursor.take(".INF")) return cursor.at_end();
  if (!sign && (cursor.take(".nan") || cursor.take(".NaN") || cursor.take(".NAN"))) {
    return cursor.at_end();
  }
  if (!sign && cursor.take(".")) {
    if (!cursor.take_one_of(kDecimal)) return false;
    cursor.take_all_of(kDecimalOrBar);
    return exponent_then_end(cursor);
  }
  if (!cursor.take_one_of(kDecimal)) return false;
  cursor.take_all_of(kDecimalOrBar);
  if (cursor.take(".")) {
    cursor.take_all_of(kDecimalOrBar);
    return exponent_then_end(cursor);
  }
  if (!take_sexagesimal(cursor) || !cursor.take(".")) return false;
  cursor.take_all_of(kDecimalOrBar);
  return cursor.at_end() && sixties_are_small(text);
}

bool is_int(std::string_view text) {
  Cursor cursor(text);
  cursor.take_one_of("+-");
  if (cursor.take("0b")) return cursor.take_all_of("01_") > 0 && cursor.at_end();
  if (cursor.take("0x")) {
    return cursor.take_all_of("0123456789abcdefABCDEF_") > 0 && cursor.at_end();
  }
  if (cursor.take("0")) {
    cursor.take_all_of("01234567_");
    return cursor.at_end();
  }
  if (!cursor.take_one_of(kDecimal)) return false;
  cursor.take_all_of(kDecimalOrBar);
  if (cursor.at_end()) return true;
  return take_sexagesimal(cursor) && cursor.at_end() && sixties_are_small(text);
}

bool is_timestamp(std::string_view text) {
  Cursor date(text);
  if (date.take_digits(4, 4) && date.take("-") && date.take_digits(2, 2) && date.take("-") &&
      date.take_digits(2, 2) && date.at_end()) {
    return true;
  }
  Cursor c(text);
  if (!(c.take_digits(4, 4) && c.take("-") && c.take_digits(1, 2) && c.take("-") &&
        c.take_digits(1, 2))) {
    return false;
  }
  if (!c.take_one_of("Tt") && c.take_all_of(" \t") == 0) return false;
  if (!(c.take_digits(1, 2) && c.take(":") && c.take_digits(2, 2) && c.take(":") &&
        c.take_digits(2, 2))) {
    return false;
  }
  if (c.take(".")) c.take_all_of(kDecimal);
  if (c.at_end()) return true;
  c.take_all_of(" \t");
  if (c.take("Z")) return c.at_end();
  if (!(c.take_one_of("+-") && c.take_digits(1, 2))) return false;
  if (c.take(":") && !c.take_digits(2, 2)) return false;
  return c.at_end();
}

std::string without_bars(std::string_view text) {
  std::string out;
  std::ranges::copy_if(text, std::back_inserter(out), [](char c) { return c != '_'; });
  return out;
}

// Of digits in one base; empty when there are none or too many.
std::optional<std::uint64_t> read_digits(std::string_view digits, int base) {
  std::uint64_t number = 0;
  const auto* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number, base);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

std::optional<std::uint64_t> read_sexagesimal(std::string_view text) {
  std::uint64_t total = 0;
  for (const auto& part : split(text, ':')) {
    const auto digit = read_digits(part, 10);
    if (!digit || __builtin_mul_overflow(total, 60u, &total) ||
        __builtin_add_overflow(total, *digit, &total)) {
      return std::nullopt;
    }
  }
  return total;
}

std::optional<std::uint64_t> read_magnitude(std::string_view digits) {
  if (digits.starts_with("0b")) return read_digits(digits.substr(2), 2);
  if (digits.starts_with("0x")) return read_digits(digits.substr(2), 16);
  if (digits.starts_with("0")) return read_digits(digits, 8);
  return read_sexagesimal(digits);
}

}  // namespace

YamlTag resolve_yaml(std::string_view text) {
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL") {
    return YamlTag::kNull;
  }
  if (read_yaml_bool(text)) return YamlTag::kBool;
  if (std::string_view("-+.0123456789").find(text[0]) != std::string_view::npos) {
    if (is_float(text)) return YamlTag::kFloat;
    if (is_int(text)) return YamlTag::kInt;
    if (is_timestamp(text)) return YamlTag::kTimestamp;
    return YamlTag::kString;
  }
  if (text == "<<") return YamlTag::kMerge;
  if (text == "=") return YamlTag::kValue;
  if (text == "!" || text == "&" || text == "*") return YamlTag::kIndicator;
  return YamlTag::kString;
}

std::optional<bool> read_yaml_bool(std::string_view text) {
  static constexpr std::array<std::string_view, 9> kTrue{"yes",  "Yes", "YES", "true", "True",
                                                         "TRUE", "on",  "On",  "ON"};
  static constexpr std::array<std::string_view, 9> kFalse{"no",    "No",  "NO",  "false", "False",
                                                          "FALSE", "off", "Off", "OFF"};
  if (std::ranges::find(kTrue, text) != kTrue.end()) return true;
  if (std::ranges::find(kFalse, text) != kFalse.end()) return false;
  return std::nullopt;
}

std::optional<std::int64_t> read_yaml_int(std::string_view text) {
  const std::string digits = without_bars(text);
  std::string_view rest = digits;
  const bool negative = rest.starts_with('-');
  if (negative || rest.starts_with('+')) rest.remove_prefix(1);
  const auto magnitude = read_magnitude(rest);
  if (!magnitude) return std::nullopt;
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (*magnitude > kLargest + (negative ? 1 : 0)) return std::nullopt;
  return static_cast<std::int64_t>(negative ? 0 - *magnitude : *magnitude);
}

double read_yaml_float(std::string_view text) {
  const std::string digits = to_lower(without_bars(text));
  std::string_view rest = digits;
  const double sign = rest.starts_with('-') ? -1.0 : 1.0;
  if (rest.starts_with('-') || rest.starts_with('+')) rest.remove_prefix(1);
  if (rest == ".inf") return sign * std::numeric_limits<double>::infinity();
  if (rest == ".nan") return std::numeric_limits<double>::quiet_NaN();
  if (rest.find(':') == std::string_view::npos) return sign * read_double(rest);
  // From the last part to the first, so that rounding is Python's.
  auto parts = split(rest, ':');
  double total = 0;
  double base = 1;
  for (auto part = parts.rbegin(); part != parts.rend(); ++part, base *= 60) {
    total += read_double(*part) * base;
  }
  return sign * total;
}

}  // namespace accelerate::detail
