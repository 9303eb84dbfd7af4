#include "core/yaml_scalar.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <regex>
#include <string>

#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

// PyYAML's regular expressions. They need stack by the length of the text: a longer one is a
// string.
constexpr std::size_t kLongestNumber = 1000;

bool is_float(const std::string& text) {
  static const std::regex kFloat(
      R"([-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?)"
      R"(|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))");
  return std::regex_match(text, kFloat);
}

bool is_int(const std::string& text) {
  static const std::regex kInt(
      "[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+)");
  return std::regex_match(text, kInt);
}

bool is_timestamp(const std::string& text) {
  static const std::regex kTimestamp(
      R"(\d{4}-\d\d-\d\d|\d{4}-\d\d?-\d\d?(?:[Tt]|[ \t]+)\d\d?:\d\d:\d\d(?:\.\d*)?)"
      R"((?:[ \t]*(?:Z|[-+]\d\d?(?::\d\d)?))?)");
  return std::regex_match(text, kTimestamp);
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
    const std::string number(text.substr(0, kLongestNumber + 1));
    if (number.size() > kLongestNumber) return YamlTag::kString;
    if (is_float(number)) return YamlTag::kFloat;
    if (is_int(number)) return YamlTag::kInt;
    return is_timestamp(number) ? YamlTag::kTimestamp : YamlTag::kString;
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

}  // namespace accelerate::detail::inline core
