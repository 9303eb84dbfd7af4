#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "accelerate/errors.h"
#include "commands/prompter.h"
#include "commands/terminal.h"
#include "core/numbers.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

// One line of input per question, for pipes and terminals without control sequences.
class LinePrompter final : public Prompter {
 public:
  std::size_t choose(const std::string& question, const std::vector<std::string>& choices,
                     std::size_t preset) override {
    std::string text = question + "\n";
    for (std::size_t i = 0; i < choices.size(); ++i) text += str("  ", i, "  ", choices[i], "\n");
    write_fully(STDOUT_FILENO, text);
    while (true) {
      const std::string answer(trim(line(str("A number or a choice [", preset, "]: "))));
      if (answer.empty()) return preset;
      if (const auto index = index_of(answer, choices)) return *index;
      say(str("'", answer, "' is not a choice. Please enter a number from 0 to ",
              choices.size() - 1, ", or the text of a choice."));
    }
  }

  std::string line(const std::string& question) override {
    write_fully(STDOUT_FILENO, question);
    std::string answer;
    char byte = 0;
    // Byte by byte, so that what follows is left to other readers of the same input.
    while (true) {
      const auto count = ::read(STDIN_FILENO, &byte, 1);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0 && answer.empty()) refuse_end_of_input(question);
      if (count <= 0 || byte == '\n') break;
      answer += byte;
    }
    if (::isatty(STDIN_FILENO) == 0) write_fully(STDOUT_FILENO, answer + "\n");
    return answer;
  }

  void say(const std::string& text) override { write_fully(STDOUT_FILENO, text + "\n"); }

 private:
  static std::optional<std::size_t> index_of(const std::string& answer,
                                             const std::vector<std::string>& choices) {
    const auto number = parse_number<std::size_t>(answer);
    if (number && *number < choices.size()) return number;
    const auto same = [&](const std::string& c) { return to_lower(c) == to_lower(answer); };
    const auto found = std::ranges::find_if(choices, same);
    if (found == choices.end()) return std::nullopt;
    return static_cast<std::size_t>(found - choices.begin());
  }
};

}  // namespace

void refuse_end_of_input(const std::string& question) {
  write_fully(STDOUT_FILENO, "\n");
  throw ConfigError(str("The input ended at the question '", trim(question),
                        "'. Nothing was written. Give one line for each question; an empty one "
                        "takes the default."));
}

std::unique_ptr<Prompter> make_prompter(const Environment& environment) {
  const auto style = terminal_style(environment);
  if (!style) return std::make_unique<LinePrompter>();
  return make_terminal_prompter(*style);
}

}  // namespace accelerate::detail::commands
