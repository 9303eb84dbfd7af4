#include "formats/pattern.h"

#include <algorithm>
#include <limits>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::formats {
namespace {

using Op = PatternProgram::Op;
using Instruction = PatternProgram::Instruction;

constexpr std::uint32_t kUnset = std::numeric_limits<std::uint32_t>::max();
constexpr std::size_t kMaxReplacementLength = 1000;
constexpr std::size_t kSlots = 2 * (kMaxPatternGroups + 1);

/// A name as code points, with the byte where each begins; one more for the end.
struct Points {
  Points(std::string_view name, MatchBudget& budget) {
    budget.spend(name.size() + 1);
    for (std::size_t at = 0; at < name.size();) {
      const auto point = next_code_point(name, at);
      values.push_back(point.value);
      starts.push_back(at);
      at += point.length;
    }
    starts.push_back(name.size());
  }
  std::vector<char32_t> values;
  std::vector<std::size_t> starts;
};

/// Pike's simulation: the threads of one position in order of preference, each with its groups.
class PatternMachine {
 public:
  PatternMachine(const PatternProgram& program, const Points& points, MatchBudget& budget)
      : program_(program.code),
        classes_(program.classes),
        points_(points),
        budget_(budget),
        seen_at_(program.code.size(), kUnset) {}

  using Slots = std::array<std::uint32_t, kSlots>;

  /// The first match at or behind `from`; slots 0 and 1 are its ends.
  std::optional<Slots> search(std::size_t from, bool must_advance) {
    return run(from, /*anchored=*/false, must_advance);
  }
  std::optional<Slots> full_match() { return run(0, /*anchored=*/true, false); }

 private:
  struct Thread {
    std::size_t at;
    Slots slots;
  };

  std::optional<Slots> run(std::size_t from, bool anchored, bool must_advance) {
    const std::size_t end = points_.values.size();
    budget_.spend(program_.size() / 8 + 1);
    std::ranges::fill(seen_at_, kUnset);
    std::optional<Slots> found;
    threads_.clear();
    for (std::size_t position = from; position <= end; ++position) {
      if (!found && (!anchored || position == from)) {
        Slots slots;
        slots.fill(kUnset);
        slots[0] = static_cast<std::uint32_t>(position);
        follow({.at = 0, .slots = slots}, position, threads_);
      }
      if (threads_.empty() && (found || anchored)) break;
      next_.clear();
      budget_.spend(threads_.size() + 1);
      for (auto& thread : threads_) {
        const auto& instruction = program_[thread.at];
        if (instruction.op == Op::kMatch) {
          const bool counts = anchored ? position == end : !(must_advance && position == from);
          if (!counts) continue;
          thread.slots[1] = static_cast<std::uint32_t>(position);
          found = thread.slots;
          break;  // the threads behind it are less preferred
        }
        if (position == end || !takes(instruction, points_.values[position])) continue;
        ++thread.at;
        follow(thread, position + 1, next_);
      }
      std::swap(threads_, next_);
    }
    return found;
  }

  [[nodiscard]] bool takes(const Instruction& instruction, char32_t c) {
    if (instruction.op == Op::kAny) return c != U'\n';
    if (instruction.op == Op::kCharacter) return c == instruction.value;
    const auto& set = classes_[instruction.value];
    budget_.spend(set.ranges.size() / 8);
    const bool inside = std::ranges::any_of(
        set.ranges, [c](const auto& range) { return range.first <= c && c <= range.second; });
    return inside != set.negated;
  }

  /// Adds the instructions that wait for a character (or for the match), reached without taking
  /// one. An instruction that a preferred thread has reached at this position is left out.
  void follow(const Thread& start, std::size_t position, std::vector<Thread>& list) {
    stack_.clear();
    stack_.push_back(start);
    while (!stack_.empty()) {
      Thread thread = stack_.back();
      stack_.pop_back();
      budget_.spend(1);
      if (seen_at_[thread.at] == position) continue;
      seen_at_[thread.at] = static_cast<std::uint32_t>(position);
      const auto& instruction = program_[thread.at];
      const auto go = [&](std::int32_t by) {
        Thread next = thread;
        next.at = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(thread.at) + by);
        stack_.push_back(next);
      };
      switch (instruction.op) {
        case Op::kSplit:
          go(instruction.second);
          go(instruction.first);  // on top: followed first
          break;
        case Op::kJump:
          go(instruction.first);
          break;
        case Op::kSave:
          thread.slots[instruction.value] = static_cast<std::uint32_t>(position);
          go(1);
          break;
        case Op::kBegin:
          if (position == 0) go(1);
          break;
        case Op::kEnd:
          if (position == points_.values.size()) go(1);
          break;
        default:
          list.push_back(thread);
      }
    }
  }

  const std::vector<Instruction>& program_;
  const std::vector<PatternProgram::CharacterClass>& classes_;
  const Points& points_;
  MatchBudget& budget_;
  std::vector<std::uint32_t> seen_at_;
  std::vector<Thread> threads_;
  std::vector<Thread> next_;
  std::vector<Thread> stack_;
};

PatternMatch match_of(const PatternMachine::Slots& slots, const Points& points,
                      std::string_view name) {
  PatternMatch match{.begin = points.starts[slots[0]], .end = points.starts[slots[1]]};
  for (std::size_t group = 0; group < match.groups.size(); ++group) {
    if (slots[2 * group] == kUnset || slots[2 * group + 1] == kUnset) continue;
    const auto begin = points.starts[slots[2 * group]];
    match.groups[group] = name.substr(begin, points.starts[slots[2 * group + 1]] - begin);
  }
  return match;
}

}  // namespace

void MatchBudget::spend(std::uint64_t steps) {
  if (steps > left_) {
    throw ConfigError(
        "Matching the patterns against all names takes too long. Use fewer rules, or patterns with "
        "fewer repetitions.");
  }
  left_ -= steps;
}

std::optional<PatternMatch> Pattern::full_match(std::string_view name, MatchBudget& budget) const {
  const Points points(name, budget);
  const auto slots = PatternMachine(program_, points, budget).full_match();
  if (!slots) return std::nullopt;
  return match_of(*slots, points, name);
}

std::vector<PatternMatch> Pattern::find_all(std::string_view name, MatchBudget& budget) const {
  const Points points(name, budget);
  PatternMachine machine(program_, points, budget);
  std::vector<PatternMatch> matches;
  std::size_t from = 0;
  // Behind an empty match: the next one may start there, if it is longer.
  bool must_advance = false;
  while (from <= points.values.size()) {
    const auto slots = machine.search(from, must_advance);
    if (!slots) break;
    matches.push_back(match_of(*slots, points, name));
    from = (*slots)[1];
    must_advance = (*slots)[0] == (*slots)[1];
  }
  return matches;
}

Replacement::Replacement(std::string_view text, const Pattern& pattern) : text_(text) {
  const auto refuse = [&](std::string_view problem) {
    throw ConfigError(str("The replacement '", text, "' of the pattern '", pattern.text(),
                          "' cannot be used: ", problem, "."));
  };
  if (text.size() > kMaxReplacementLength) {
    throw ConfigError(str("The replacement of the pattern '", pattern.text(), "' has ", text.size(),
                          " bytes; ", kMaxReplacementLength, " are the limit."));
  }
  Piece piece;
  const auto add_group = [&](std::size_t group) {
    if (group > pattern.groups()) {
      refuse(str("group ", group, " is not in the pattern, which has ", pattern.groups()));
    }
    piece.group = group;
    pieces_.push_back(std::move(piece));
    piece = {};
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      piece.literal += text[i];
      continue;
    }
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    const auto rest = text.substr(i);
    if (next == '\\') {
      piece.literal += '\\';
      i += 1;
    } else if (next >= '1' && next <= '9') {
      add_group(static_cast<std::size_t>(next - '0'));
      i += 1;
    } else if (rest.starts_with("\\g<") && rest.size() > 4 && rest[3] >= '0' && rest[3] <= '9' &&
               rest[4] == '>') {
      add_group(static_cast<std::size_t>(rest[3] - '0'));
      i += 4;
    } else {
      refuse("of the escapes, \\1 to \\9, \\g<0> to \\g<9> and \\\\ are known");
    }
  }
  pieces_.push_back(std::move(piece));
}

std::string Replacement::expand(const PatternMatch& match) const {
  std::string text;
  for (const auto& piece : pieces_) {
    text += piece.literal;
    if (piece.group) text += match.groups[*piece.group];
  }
  return text;
}

std::optional<std::string> substitute(const Pattern& pattern, const Replacement& replacement,
                                      std::string_view name, MatchBudget& budget) {
  const auto matches = pattern.find_all(name, budget);
  if (matches.empty()) return std::nullopt;
  std::string text;
  std::size_t at = 0;
  for (const auto& match : matches) {
    text += name.substr(at, match.begin - at);
    text += replacement.expand(match);
    at = match.end;
    if (text.size() > kMaxNameLength) break;
  }
  text += name.substr(at);
  if (text.size() > kMaxNameLength) {
    throw ConfigError(str("Replacing '", pattern.text(), "' by '", replacement.text(), "' in '",
                          name.substr(0, 100), "' makes a name of more than ", kMaxNameLength,
                          " bytes."));
  }
  return text;
}

}  // namespace accelerate::detail::formats
