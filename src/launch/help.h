// src/launch/help.h - help texts and shell completion of the command line, made from its tables.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace accelerate::detail::launch {

/// A sub-command of `accelerate`.
struct Subcommand {
  std::string_view name;
  std::string_view help;
  /// What to use meanwhile, for one that is known but not there yet.
  std::string_view instead = {};
};
[[nodiscard]] const std::array<Subcommand, 11>& subcommands();

/// Of `accelerate --help`.
[[nodiscard]] std::string main_help();
/// Of `accelerate launch --help`: the flags, group by group, for a terminal of `width` columns.
[[nodiscard]] std::string launch_help(std::size_t width = 100);
/// The completion script for "bash", "zsh" or "fish". Throws `ConfigError` for another shell.
[[nodiscard]] std::string completion_script(std::string_view shell);

}  // namespace accelerate::detail::launch
