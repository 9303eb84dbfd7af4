// src/launch/arguments.h - parses the command line of `accelerate launch`.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::launch {

/// The typed flags and the program. Flags that were not typed are absent.
struct LaunchArguments {
  /// Values by flag name, in the form of `canonical_value`. --no_cpu stores "false".
  std::map<std::string, std::string, std::less<>> values = {};
  /// The first word that is not a flag, and all words after it.
  std::string program = {};
  std::vector<std::string> program_arguments = {};
  bool help = false;

  [[nodiscard]] bool typed(std::string_view name) const { return values.contains(name); }
  /// True if the flag was typed and is "true".
  [[nodiscard]] bool on(std::string_view name) const;
};

/// Parses the words after `accelerate launch`. Flags may be written with '_' or '-', their values
/// after '=' or as the next word. Abbreviations are not accepted.
///
/// Throws `ConfigError` for an unknown flag (with the nearest known one), a missing or invalid
/// value, and a missing program, unless --help is among the flags.
[[nodiscard]] LaunchArguments parse_launch_arguments(std::span<const std::string> words);

}  // namespace accelerate::detail::launch
