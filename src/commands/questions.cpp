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

std::optional<std::string> canonical(launch::FlagKind kind, const std::string& answer) {
  try {
    return launch::canonical_value({.name = "answer", .kind = kind}, answer, "");
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
      expected, [&](const std::string& answer) -> std::optional<std::int64_t> {
        const auto text = canonical(launch::FlagKind::kInteger, answer);
        const auto value = parse_number<std::int64_t>(text.value_or(""));
        return value && *value >= range.min && *value <= range.max ? value : std::nullopt;
      });
}

double ask_number(Prompter& prompter, const std::string& question, double preset) {
  return ask_until_valid<double>(prompter, str(question, " [", python_repr(preset), "]: "), preset,
                                 "a number, 0 or more",
                                 [](const std::string& answer) -> std::optional<double> {
                                   const auto text = canonical(launch::FlagKind::kNumber, answer);
                                   const auto value = parse_number<double>(text.value_or(""));
                                   return value && *value >= 0 ? value : std::nullopt;
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
