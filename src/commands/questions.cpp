#include <functional>

#include "accelerate/errors.h"
#include "commands/prompter.h"
#include "core/numbers.h"
#include "core/python_text.h"
#include "core/text.h"
#include "launch/flags.h"

namespace accelerate::detail::commands {
namespace {

// `parse` returns nullopt, or throws `ConfigError`, for an answer that is not valid.
template <class T>
T ask_until_valid(Prompter& prompter, const std::string& question, const std::optional<T>& preset,
                  const std::string& expected,
                  const std::function<std::optional<T>(const std::string&)>& parse) {
  while (true) {
    const std::string answer(trim(prompter.line(question)));
    if (answer.empty() && preset) return *preset;
    if (const auto value = parse(answer)) return *value;
    prompter.say(str("Please enter ", expected, "."));
  }
}

// A question without preset.
std::string unanswered(const std::string& question) {
  return str(question, question.ends_with('?') ? " " : ": ");
}

/// The number that an answer is, in the form that flags of this kind have.
template <class T>
std::optional<T> number_in(const std::string& answer, launch::FlagKind kind, T min, T max) {
  try {
    const auto text = launch::canonical_value({.name = "answer", .kind = kind}, answer, "");
    const auto value = parse_number<T>(text);
    return value && *value >= min && *value <= max ? value : std::nullopt;
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

}  // namespace

bool ask_yes_no(Prompter& prompter, const std::string& question, bool preset) {
  return ask_until_valid<bool>(prompter, str(question, preset ? " [YES/no]: " : " [yes/NO]: "),
                               preset, "yes or no",
                               [](const std::string& answer) -> std::optional<bool> {
                                 const std::string word = to_lower(answer);
                                 if (word == "yes") return true;
                                 if (word == "no") return false;
                                 return std::nullopt;
                               });
}

std::int64_t ask_integer(Prompter& prompter, const std::string& question,
                         std::optional<std::int64_t> preset, const IntegerRange& range) {
  const bool bounded = range.max != std::numeric_limits<std::int64_t>::max();
  const std::string expected = bounded ? str("a whole number from ", range.min, " to ", range.max)
                                       : str("a whole number, at least ", range.min);
  return ask_until_valid<std::int64_t>(
      prompter, preset ? str(question, " [", *preset, "]: ") : unanswered(question), preset,
      expected, [&](const std::string& answer) {
        return number_in(answer, launch::FlagKind::kInteger, range.min, range.max);
      });
}

double ask_number(Prompter& prompter, const std::string& question, double preset) {
  constexpr double kMost = std::numeric_limits<double>::infinity();
  return ask_until_valid<double>(prompter, str(question, " [", python_repr(preset), "]: "), preset,
                                 "a number, 0 or more", [](const std::string& answer) {
                                   return number_in(answer, launch::FlagKind::kNumber, 0.0, kMost);
                                 });
}

std::string ask_text(Prompter& prompter, const std::string& question,
                     const std::optional<std::string>& preset) {
  return ask_until_valid<std::string>(
      prompter, preset ? str(question, " [", *preset, "]: ") : unanswered(question), preset,
      "an answer", [](const std::string& answer) -> std::optional<std::string> {
        if (answer.empty()) return std::nullopt;
        return answer;
      });
}

}  // namespace accelerate::detail::commands
