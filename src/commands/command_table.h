// src/commands/command_table.h - all commands of `accelerate`.
#pragma once

#include <span>
#include <string_view>

#include "launch/command.h"

namespace accelerate::detail::commands {

using launch::Command;

/// In the order of the help.
[[nodiscard]] std::span<const Command> command_table();
/// nullptr if there is no command of this name.
[[nodiscard]] const Command* find_command(std::string_view name);

}  // namespace accelerate::detail::commands
