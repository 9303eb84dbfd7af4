// src/launch/arguments.h - the command line of `accelerate launch`, read and remembered.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail {

/// What was typed. Flags that were not are absent, whatever their defaults.
struct LaunchArguments {
  /// By flag name; values checked and written one way (`canonical_value`). --no_cpu is "false".
  std::map<std::string, std::string, std::less<>> values = {};
  /// The first word that is no flag, and all words behind it, unread.
  std::string program = {};
  std::vector<std::string> program_arguments = {};
  bool help = false;

  [[nodiscard]] bool typed(std::string_view name) const { return values.contains(name); }
  /// Typed, and on.
  [[nodiscard]] bool on(std::string_view name) const;
};

/// Reads the words behind `accelerate launch`. Flags have '_' or '-' between their words and their
/// value behind '=' or as the next word; abbreviations do not count.
///
/// Throws `ConfigError` for a flag that does not exist (with the nearest one that does), a value
/// that is missing or does not fit, and when there is no program. With --help nothing is missing.
[[nodiscard]] LaunchArguments parse_launch_arguments(std::span<const std::string> words);

}  // namespace accelerate::detail
