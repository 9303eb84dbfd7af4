// src/core/version.h - version numbers by the rules of Python packages (PEP 440).
//
//     Version::parse("2.10") > Version::parse("2.9.5");               // true
//     compare(Version::parse("2.11.0+cu130"), "==", ...);
//
// Order: epoch, release (missing parts are 0), dev < a < b < rc < final < post; a local part sorts
// above the same version without it.
#pragma once

#include <compare>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace accelerate::detail::inline core {

/// The parts of a version in the order in which they are compared.
struct Version {
  /// The count of digits, then the digits: dates and hashes in versions do not fit into 64 bits.
  using Number = std::pair<std::size_t, std::string>;

  Number epoch;
  std::vector<Number> release;  ///< without zeros at its end
  std::pair<int, Number> pre;   ///< 0 a bare dev release, 1 a, 2 b, 3 rc, 4 none
  std::optional<Number> post;
  std::pair<bool, Number> dev;  ///< true without a dev part
  std::vector<std::variant<std::string, Number>> local;

  /// Throws `ArgumentError` with the text when it is no version.
  [[nodiscard]] static Version parse(std::string_view text);
  [[nodiscard]] static std::optional<Version> try_parse(std::string_view text);

  auto operator<=>(const Version& other) const = default;
};

/// `operation` is one of > >= == != <= <, else `ArgumentError` that lists them.
[[nodiscard]] bool compare(const Version& a, std::string_view operation, const Version& b);

}  // namespace accelerate::detail::inline core
