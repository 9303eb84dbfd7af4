// src/formats/pattern.h - regular expressions for the names of tensors, in linear time.
//
// std::regex recurses per character and takes exponential time for some patterns, and rules may
// come from a stranger's file. This one simulates all alternatives at once: the work per character
// is bounded by the size of the pattern.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace accelerate::detail::formats {

/// Groups that a pattern may capture, and that a replacement refers to as \1 to \9.
inline constexpr std::size_t kMaxPatternGroups = 9;

/// The work that matching may still do. Throws `ConfigError` when it is spent.
class MatchBudget {
 public:
  explicit MatchBudget(std::uint64_t steps) : left_(steps) {}
  void spend(std::uint64_t steps);

 private:
  std::uint64_t left_;
};

/// What a pattern matched. The views are into the matched text.
struct PatternMatch {
  std::size_t begin = 0;  ///< bytes
  std::size_t end = 0;
  /// [0] is the whole match; a group that took no part is empty.
  std::array<std::string_view, kMaxPatternGroups + 1> groups = {};
};

/// A pattern as instructions of the matcher.
struct PatternProgram {
  enum class Op : std::uint8_t {
    kCharacter,
    kAny,
    kClass,
    kSplit,
    kJump,
    kSave,
    kBegin,
    kEnd,
    kMatch
  };
  struct Instruction {
    Op op = Op::kMatch;
    /// kCharacter: the code point; kClass: its number; kSave: the slot.
    std::uint32_t value = 0;
    /// kSplit: both ways, the preferred one first; kJump: the first. Relative to the instruction.
    std::int32_t first = 0;
    std::int32_t second = 0;
  };
  struct CharacterClass {
    bool negated = false;
    std::vector<std::pair<char32_t, char32_t>> ranges = {};
  };

  std::size_t groups = 0;
  std::vector<Instruction> code = {};
  std::vector<CharacterClass> classes = {};

  /// Throws `ConfigError` as the constructor of `Pattern`.
  [[nodiscard]] static PatternProgram parse(std::string_view text);
};

/// Python's syntax, without what needs backtracking: literals, `.`, `[a-z]`, `[^...]`, `\d \w \s`
/// and their capitals (ASCII), `( )`, `(?: )`, `|`, `* + ? {m} {m,} {m,n}` and their lazy forms,
/// `^`, `$` (the end of the name), `\.` and other escaped punctuation.
class Pattern {
 public:
  /// Throws `ConfigError` with the pattern, the place and the problem: what is not understood or
  /// not supported (backreferences, look-around, named groups, flags), more than 1000 characters,
  /// more than 9 groups, repetitions that make it too large.
  explicit Pattern(std::string_view text) : text_(text), program_(PatternProgram::parse(text)) {}

  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] std::size_t groups() const { return program_.groups; }

  /// The match of the whole name.
  [[nodiscard]] std::optional<PatternMatch> full_match(std::string_view name,
                                                       MatchBudget& budget) const;
  /// All matches from left to right that do not overlap, as Python's `re.finditer`.
  [[nodiscard]] std::vector<PatternMatch> find_all(std::string_view name,
                                                   MatchBudget& budget) const;

 private:
  std::string text_;
  PatternProgram program_;
};

/// The text that a match becomes: `\1` to `\9` and `\g<1>` are groups, `\\` is a backslash.
class Replacement {
 public:
  /// Throws `ConfigError` for another escape, for a group that the pattern does not have, and for
  /// more than 1000 bytes.
  Replacement(std::string_view text, const Pattern& pattern);

  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] std::string expand(const PatternMatch& match) const;

 private:
  struct Piece {
    std::string literal;
    std::optional<std::size_t> group;  ///< follows the literal
  };
  std::string text_;
  std::vector<Piece> pieces_;
};

/// The names of tensors are no longer.
inline constexpr std::size_t kMaxNameLength = std::size_t{64} << 10;

/// Python's `re.sub(pattern, replacement, name)`; nullopt if the pattern is not found. Throws
/// `ConfigError` if the name gets longer than `kMaxNameLength`.
[[nodiscard]] std::optional<std::string> substitute(const Pattern& pattern,
                                                    const Replacement& replacement,
                                                    std::string_view name, MatchBudget& budget);

}  // namespace accelerate::detail::formats
