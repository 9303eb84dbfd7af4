// src/launch/arguments.h - the command line of `accelerate launch`.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "launch/command.h"

namespace accelerate::detail::launch {

struct LaunchArguments : Arguments {
  /// The first word that is not a flag, and all words after it. `operands` is empty.
  std::string program = {};
  std::vector<std::string> program_arguments = {};
};

[[nodiscard]] const Command& launch_command();

[[nodiscard]] LaunchArguments launch_arguments(Arguments parsed);
/// Parses the words after `accelerate launch`, as `parse_arguments`.
[[nodiscard]] LaunchArguments parse_launch_arguments(std::span<const std::string> words);

}  // namespace accelerate::detail::launch
