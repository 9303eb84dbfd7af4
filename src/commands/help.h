// src/commands/help.h - help texts, man pages and shell completion, made from the command table.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "launch/command.h"

namespace accelerate::detail::commands {

/// Of `accelerate --help`.
[[nodiscard]] std::string main_help();
/// Of `accelerate <command> --help`: the flags, group by group, for a terminal of `width` columns.
[[nodiscard]] std::string command_help(const launch::Command& command, std::size_t width = 100);

/// accelerate.1, and accelerate-<command>.1 of a command, for man(1).
[[nodiscard]] std::string main_man_page();
[[nodiscard]] std::string command_man_page(const launch::Command& command);

/// The completion script for "bash", "zsh" or "fish".
[[nodiscard]] std::string completion_script(std::string_view shell);

}  // namespace accelerate::detail::commands
