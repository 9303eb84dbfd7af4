// src/core/version.h - version numbers by the rules of Python packages (PEP 440).
//
//     Version::parse("v2.11.0-RC.1+CU130").to_string();       // "2.11.0rc1+cu130"
//     Version::parse("2.10") > Version::parse("2.9.5");       // true
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
#include <variant>
#include <vector>

namespace accelerate::detail {

/// A whole number of any length: dates and hashes in versions outgrow 64 bits.
class Digits {
 public:
  Digits() = default;
  /// `text` has digits only; leading zeros are dropped.
  explicit Digits(std::string_view text);

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] bool is_zero() const noexcept { return text_ == "0"; }

  std::strong_ordering operator<=>(const Digits& other) const noexcept;
  bool operator==(const Digits& other) const noexcept = default;

 private:
  std::string text_ = "0";
};

class Version {
 public:
  /// Throws `ArgumentError` with the text when it is no version.
  [[nodiscard]] static Version parse(std::string_view text);
  [[nodiscard]] static std::optional<Version> try_parse(std::string_view text);

  /// The normal form: "1!2.0rc1.post2.dev3+cu.130".
  [[nodiscard]] std::string to_string() const;
  /// The same without the part behind '+'.
  [[nodiscard]] std::string public_part() const;

  [[nodiscard]] const std::vector<Digits>& release() const noexcept { return release_; }
  [[nodiscard]] bool is_prerelease() const noexcept { return pre_ || dev_; }

  std::strong_ordering operator<=>(const Version& other) const;
  bool operator==(const Version& other) const { return (*this <=> other) == 0; }

 private:
  friend class VersionParser;

  struct Pre {
    enum class Stage { kAlpha, kBeta, kCandidate } stage = Stage::kAlpha;
    Digits number;
  };
  // In the order in which parts sort: words before numbers.
  using LocalPart = std::variant<std::string, Digits>;

  Digits epoch_;
  std::vector<Digits> release_;
  std::optional<Pre> pre_;
  std::optional<Digits> post_;
  std::optional<Digits> dev_;
  std::vector<LocalPart> local_;
};

/// `operation` is one of > >= == != <= <, else `ArgumentError` that lists them.
[[nodiscard]] bool compare(const Version& a, std::string_view operation, const Version& b);

}  // namespace accelerate::detail
