#include "core/bytes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr std::array<Unit, 6> kUnits{{{"gib", 1024.0 * 1024 * 1024},
                                      {"mib", 1024.0 * 1024},
                                      {"kib", 1024.0},
                                      {"gb", 1e9},
                                      {"mb", 1e6},
                                      {"kb", 1e3}}};

constexpr std::array<Unit, 4> kShardUnits{{{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}}};

// As Python's float() reads it: blanks around and single underscores between digits are allowed.
std::optional<double> python_float(std::string_view text) {
  text = trim(text);
  std::string digits;
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_') {
      if (i == 0 || i + 1 == text.size() || !is_digit(text[i - 1]) || !is_digit(text[i + 1])) {
        return std::nullopt;
      }
    } else {
      digits += text[i];
    }
  }
  std::string_view rest = digits;
  if (rest.starts_with('+')) {
    rest.remove_prefix(1);
    if (rest.starts_with('-')) return std::nullopt;
  }
  return parse_number<double>(rest);
}

/// `refuse` throws.
template <class Refuse>
std::int64_t whole_bytes(double size, const Refuse& refuse) {
  const double bytes = std::trunc(size);
  if (!std::isfinite(bytes)) refuse("is not finite");
  if (bytes < 0) refuse("is negative");
  if (bytes >= 9223372036854775808.0) refuse("does not fit into 64 bits");
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

std::string convert_bytes(std::int64_t size) {
  if (size < 1024) return str(size, " bytes");
  return convert_bytes(static_cast<double>(size));
}

std::string convert_bytes(double size) {
  const auto text = [](double amount, std::string_view unit) {
    return str(python_repr(python_round(amount, 2)), " ", unit);
  };
  for (const std::string_view unit : {"bytes", "KB", "MB", "GB", "TB"}) {
    if (size < 1024) return text(size, unit);
    size /= 1024;
  }
  return text(size, "PB");
}

std::int64_t convert_file_size_to_int(std::string_view size) {
  const auto refuse = [size](std::string_view why) {
    throw ArgumentError(str("The size '", size, "' ", why,
                            ". Use a number of bytes, or a text with a unit such as '5.0GB'."));
  };
  const auto lower = to_lower(size);
  for (const auto& unit : kUnits) {
    if (!lower.ends_with(unit.name)) continue;
    const auto number = python_float(size.substr(0, size.size() - unit.name.size()));
    if (!number) break;
    const auto bytes = whole_bytes(*number * unit.bytes, refuse);
    const bool bits = unit.name.size() == 2 && size.ends_with('b');
    return bits ? bytes / 8 : bytes;
  }
  refuse("cannot be read");
  return 0;
}

std::int64_t convert_file_size_to_int(std::int64_t size) {
  if (size >= 0) return size;
  throw ArgumentError(str("The size ", size,
                          " is negative. Use a number of bytes, or a text with a unit such as "
                          "'5.0GB'."));
}

std::int64_t parse_size_to_int(std::string_view size) {
  const auto refuse = [size](std::string_view why) {
    throw ArgumentError(
        str("The size '", size, "' ", why, ". Use a number of bytes, or a text such as '5GB'."));
  };
  const auto text = trim(size);
  const auto unit = to_upper(text.substr(text.size() - std::min<std::size_t>(2, text.size())));
  const auto known = std::ranges::find(kShardUnits, unit, &Unit::name);
  if (known == kShardUnits.end()) {
    refuse(str("has the unit '", unit, "'; supported units are TB, GB, MB, KB"));
  }
  const auto number = python_float(text.substr(0, text.size() - 2));
  if (!number) refuse("cannot be read");
  const auto bytes = whole_bytes(*number * known->bytes, refuse);
  if (bytes == 0) refuse("is less than one byte");
  return bytes;
}

}  // namespace accelerate::detail::inline core
