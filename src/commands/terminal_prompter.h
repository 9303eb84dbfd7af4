// src/commands/terminal_prompter.h - menus and questions in a terminal.
#pragma once

#include <memory>
#include <string>

#include "commands/prompter.h"
#include "commands/terminal.h"

namespace accelerate::detail::commands {

/// Asks on stdin and stdout, which must be a terminal. It is in its own mode only while a menu is
/// open, and is put back on every way out but SIGKILL.
[[nodiscard]] std::unique_ptr<Prompter> make_terminal_prompter(const TerminalStyle& style);

/// Throws the `ConfigError` for input that ends at a question.
[[noreturn]] void refuse_end_of_input(const std::string& question);

}  // namespace accelerate::detail::commands
