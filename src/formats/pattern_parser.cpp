// From the text of a pattern to its program.
#include <cctype>
#include <cstdint>
#include <optional>
#include <string>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/pattern.h"

namespace accelerate::detail::formats {
namespace {

using Op = PatternProgram::Op;
using Instruction = PatternProgram::Instruction;
using CharacterClass = PatternProgram::CharacterClass;
/// A piece of the program. Its jumps are relative, so that pieces are joined by appending.
using Code = std::vector<Instruction>;

constexpr std::size_t kMaxPatternLength = 1000;
constexpr std::size_t kMaxProgram = 2000;
constexpr std::size_t kMaxRepeats = 1000;
constexpr int kMaxNesting = 50;
constexpr char32_t kLastCodePoint = 0x10FFFF;

struct Repetition {
  std::size_t least = 0;
  std::optional<std::size_t> most = std::nullopt;  ///< nullopt: no limit
};

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {
    if (text.size() > kMaxPatternLength) {
      throw ConfigError(str("A pattern of ", text.size(), " bytes is too long: ", kMaxPatternLength,
                            " are the limit. It begins with '", text.substr(0, 40), "'."));
    }
  }

  PatternProgram parse() {
    Code code = alternatives(0);
    if (at_ != text_.size()) refuse("a ')' without its '('");
    append(code, {{.op = Op::kMatch}});
    return {.groups = groups_, .code = std::move(code), .classes = std::move(classes_)};
  }

 private:
  [[noreturn]] void refuse(std::string_view problem) const {
    throw ConfigError(
        str("The pattern '", text_, "' cannot be used, at byte ", at_ + 1, ": ", problem, "."));
  }

  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  [[nodiscard]] bool at_end() const { return at_ == text_.size(); }
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  void append(Code& code, const Code& more) const {
    if (code.size() + more.size() > kMaxProgram) refuse("its repetitions make it too large");
    code.insert(code.end(), more.begin(), more.end());
  }

  Code alternatives(int depth) {
    if (depth > kMaxNesting) refuse(str("groups are nested deeper than ", kMaxNesting, " levels"));
    Code code = sequence(depth);
    if (!take("|")) return code;
    // A loop and not recursion: a pattern may have hundreds of alternatives.
    std::vector<Code> ways;
    ways.push_back(std::move(code));
    do {
      ways.push_back(sequence(depth));
    } while (take("|"));
    Code all = std::move(ways.back());
    ways.pop_back();
    for (; !ways.empty(); ways.pop_back()) {
      const auto& way = ways.back();
      Code both{{.op = Op::kSplit, .first = 1, .second = offset(way.size() + 2)}};
      append(both, way);
      append(both, {{.op = Op::kJump, .first = offset(all.size() + 1)}});
      append(both, all);
      all = std::move(both);
    }
    return all;
  }

  Code sequence(int depth) {
    Code code;
    while (!at_end() && peek() != '|' && peek() != ')') append(code, repeated(depth));
    return code;
  }

  Code repeated(int depth) {
    const bool anchor = peek() == '^' || peek() == '$';
    Code one = atom(depth);
    const auto repetition = read_repetition();
    if (!repetition) return one;
    if (anchor) refuse("an anchor cannot be repeated");
    const bool lazy = take("?");
    if (peek() == '*' || peek() == '+' || peek() == '?') refuse("multiple repeat");
    Code code;
    for (std::size_t i = 0; i < repetition->least; ++i) append(code, one);
    if (!repetition->most) {
      Code loop{split(one.size() + 2, lazy)};
      append(loop, one);
      append(loop, {{.op = Op::kJump, .first = -offset(one.size() + 1)}});
      append(code, loop);
      return code;
    }
    Code rest;  // a?, (a a?)?, (a (a a?)?)?
    for (std::size_t i = repetition->least; i < *repetition->most; ++i) {
      Code next{split(one.size() + rest.size() + 1, lazy)};
      append(next, one);
      append(next, rest);
      rest = std::move(next);
    }
    append(code, rest);
    return code;
  }

  /// Enters what follows, or goes on behind it; `lazy` prefers the latter.
  static Instruction split(std::size_t behind, bool lazy) {
    return lazy ? Instruction{.op = Op::kSplit, .first = offset(behind), .second = 1}
                : Instruction{.op = Op::kSplit, .first = 1, .second = offset(behind)};
  }
  static std::int32_t offset(std::size_t count) { return static_cast<std::int32_t>(count); }

  std::optional<Repetition> read_repetition() {
    if (take("*")) return Repetition{.least = 0};
    if (take("+")) return Repetition{.least = 1};
    if (take("?")) return Repetition{.least = 0, .most = 1};
    const std::size_t start = at_;
    if (!take("{")) return std::nullopt;
    const auto close = text_.find('}', at_);
    const auto inside = text_.substr(at_, close == text_.npos ? close : close - at_);
    const auto comma = inside.find(',');
    const auto least = parse_number<std::size_t>(inside.substr(0, comma));
    auto most = least;
    bool good = close != text_.npos && least;
    if (comma != inside.npos) {
      const auto text = inside.substr(comma + 1);
      most = parse_number<std::size_t>(text);
      good = good && (most || text.empty());
    }
    if (!good) {
      at_ = start;
      refuse("'{' begins a repetition such as {2} or {1,3}; write \\{ for the character");
    }
    if (*least > kMaxRepeats || (most && (*most > kMaxRepeats || *most < *least))) {
      at_ = start;
      refuse(str("a repetition goes from fewer to more and at most to ", kMaxRepeats));
    }
    at_ = close + 1;
    return Repetition{.least = *least, .most = most};
  }

  Code atom(int depth) {
    if (take("(")) return group(depth);
    if (take("[")) return {character_class()};
    if (take(".")) return {{.op = Op::kAny}};
    if (take("^")) return {{.op = Op::kBegin}};
    if (take("$")) return {{.op = Op::kEnd}};
    if (take("\\")) return {escape()};
    if (peek() == '*' || peek() == '+' || peek() == '?') refuse("nothing to repeat");
    if (peek() == '{') refuse("'{' has nothing to repeat; write \\{ for the character");
    return {{.op = Op::kCharacter, .value = code_point()}};
  }

  Code group(int depth) {
    if (take("?:")) return close_group(alternatives(depth + 1));
    if (peek() == '?') {
      refuse("of the groups that begin with (?, only (?:...) is supported");
    }
    if (groups_ == kMaxPatternGroups) refuse(str("more than ", kMaxPatternGroups, " groups"));
    const auto slot = static_cast<std::uint32_t>(2 * ++groups_);
    Code code{{.op = Op::kSave, .value = slot}};
    append(code, close_group(alternatives(depth + 1)));
    append(code, {{.op = Op::kSave, .value = slot + 1}});
    return code;
  }
  Code close_group(Code code) {
    if (!take(")")) refuse("a '(' without its ')'");
    return code;
  }

  std::uint32_t code_point() {
    const auto point = next_code_point(text_, at_);
    if (!point.valid) refuse("it is not UTF-8");
    at_ += point.length;
    return point.value;
  }

  /// The ranges of \d, \w, \s; nullopt for another letter.
  static std::optional<std::vector<std::pair<char32_t, char32_t>>> shorthand(char letter) {
    if (letter == 'd') return {{{U'0', U'9'}}};
    if (letter == 'w') return {{{U'0', U'9'}, {U'A', U'Z'}, {U'_', U'_'}, {U'a', U'z'}}};
    if (letter == 's') return {{{U'\t', U'\r'}, {U' ', U' '}}};
    return std::nullopt;
  }
  static bool is_punctuation(char c) {
    return c > ' ' && c < 0x7F && std::isalnum(static_cast<unsigned char>(c)) == 0;
  }

  Instruction use_class(CharacterClass made) {
    classes_.push_back(std::move(made));
    return {.op = Op::kClass, .value = static_cast<std::uint32_t>(classes_.size() - 1)};
  }

  Instruction escape() {
    const char letter = peek();
    const char lower = letter == 'D' || letter == 'W' || letter == 'S'
                           ? static_cast<char>(letter + ('a' - 'A'))
                           : letter;
    if (auto ranges = shorthand(lower)) {
      ++at_;
      return use_class({.negated = lower != letter, .ranges = std::move(*ranges)});
    }
    return {.op = Op::kCharacter, .value = escaped_punctuation()};
  }
  std::uint32_t escaped_punctuation() {
    const char letter = peek();
    if (!is_punctuation(letter)) {
      refuse(at_end() ? std::string("a backslash at the end")
                      : str("the escape \\", letter,
                            " is not supported; \\d, \\w, \\s, their "
                            "capitals and escaped punctuation are"));
    }
    ++at_;
    return static_cast<unsigned char>(letter);
  }

  Instruction character_class() {
    CharacterClass made{.negated = take("^")};
    bool first = true;
    while (first || peek() != ']') {
      first = false;
      if (at_end()) refuse("a '[' without its ']'");
      if (take("\\")) {
        if (const auto ranges = shorthand(peek())) {
          ++at_;
          made.ranges.insert(made.ranges.end(), ranges->begin(), ranges->end());
          continue;
        }
        add_range(made, escaped_punctuation());
      } else {
        add_range(made, code_point());
      }
    }
    ++at_;
    return use_class(std::move(made));
  }
  void add_range(CharacterClass& made, char32_t from) {
    char32_t to = from;
    if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
      ++at_;
      to = take("\\") ? escaped_punctuation() : code_point();
      if (to < from || to > kLastCodePoint) refuse("a range of characters goes from low to high");
    }
    made.ranges.emplace_back(from, to);
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t groups_ = 0;
  std::vector<CharacterClass> classes_;
};

}  // namespace

PatternProgram PatternProgram::parse(std::string_view text) { return Parser(text).parse(); }

}  // namespace accelerate::detail::formats
