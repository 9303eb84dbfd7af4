// src/commands/prompter.h - asks questions: in a terminal, from a pipe, or in a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/environment.h"

namespace accelerate::detail::commands {

struct TerminalStyle;

class Prompter {
 public:
  Prompter() = default;
  virtual ~Prompter() = default;
  Prompter(const Prompter&) = delete;
  Prompter& operator=(const Prompter&) = delete;

  /// Returns the index of the chosen one.
  [[nodiscard]] virtual std::size_t choose(const std::string& question,
                                           const std::vector<std::string>& choices,
                                           std::size_t preset) = 0;
  /// Returns the line that answers the question, without its end.
  [[nodiscard]] virtual std::string line(const std::string& question) = 0;
  virtual void say(const std::string& text) = 0;
};

/// Asks on stdin and stdout, which must be a terminal. It is in its own mode only while a menu is
/// open, and is put back on every way out but SIGKILL.
[[nodiscard]] std::unique_ptr<Prompter> make_terminal_prompter(const TerminalStyle& style);

/// Throws the `ConfigError` for input that ends at a question.
[[noreturn]] void refuse_end_of_input(const std::string& question);

/// A signal, as Ctrl-C sends it, ended the questions. The terminal is as it was.
struct Interrupted {
  int signal;
};

/// Asks on stdin and stdout: with menus if both are a terminal that understands control sequences,
/// else line by line. Throws `Interrupted`, and `ConfigError` where the input ends.
[[nodiscard]] std::unique_ptr<Prompter> make_prompter(const Environment& environment);

// Each repeats the question, with the reason, until the answer is valid. An empty answer takes the
// preset; without one it is not valid.

/// "yes" and "no", in any case.
[[nodiscard]] bool ask_yes_no(Prompter& prompter, const std::string& question, bool preset);

struct IntegerRange {
  std::int64_t min = 1;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
};
/// A whole number; 1e8 is one.
[[nodiscard]] std::int64_t ask_integer(Prompter& prompter, const std::string& question,
                                       std::optional<std::int64_t> preset,
                                       const IntegerRange& range = {});
/// A number that is not negative.
[[nodiscard]] double ask_number(Prompter& prompter, const std::string& question, double preset);
[[nodiscard]] std::string ask_text(Prompter& prompter, const std::string& question,
                                   const std::optional<std::string>& preset = std::nullopt);

}  // namespace accelerate::detail::commands
