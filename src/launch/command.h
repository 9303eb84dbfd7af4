// src/launch/command.h - a command of `accelerate`: the table that its parser, help, completion and
// man page are made from.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/flags.h"

namespace accelerate::detail::launch {

/// The words of a command that are not flags.
struct Operand {
  std::string_view name = {};  ///< in usage and messages; "" if there is none
  /// Of the first one.
  std::string_view choices = {};
  /// How many there may be.
  std::size_t count = 1;
  /// The error without it; "" if it may be left out.
  std::string_view missing = {};
  /// All words behind the first belong to it, flags too.
  bool takes_rest = false;
};

struct Command {
  using Hint = std::pair<std::string_view, std::string_view>;

  std::string_view name;
  /// One line for the list of commands.
  std::string_view help;
  /// What may follow the name.
  std::string_view usage = "[flags]";
  /// What it does, in some sentences.
  std::string_view about = {};
  std::span<const Flag> (*flags)() = [] { return std::span<const Flag>(&kHelpFlag, 1); };
  Operand operand = {};
  std::string_view examples = {};
  /// Flags of other programs, and what they are called here.
  std::span<const Hint> hints = {};
};

/// A command line. Flags that were not typed are absent.
struct Arguments {
  /// Values by flag name, in the form of `canonical_value`; several are separated by ','. --no_cpu
  /// stores "false".
  std::map<std::string, std::string, std::less<>> values = {};
  std::vector<std::string> operands = {};
  bool help = false;

  [[nodiscard]] bool typed(std::string_view name) const { return values.contains(name); }
  /// True if the flag was typed and is "true".
  [[nodiscard]] bool on(std::string_view name) const;
  /// "" if it was not typed.
  [[nodiscard]] std::string value(std::string_view name) const;
};

/// Parses the words after the name of a command. Flags may be written with '_' or '-', their values
/// after '=' or as the next word. Abbreviations are not accepted.
///
/// Throws `ConfigError` for an unknown flag (with the nearest known one), a missing or invalid
/// value, and a missing, invalid or surplus operand, unless --help is among the flags.
[[nodiscard]] Arguments parse_arguments(const Command& command, std::span<const std::string> words);

/// `accelerate launch`. Its operands are the program and the words behind it.
[[nodiscard]] const Command& launch_command();

}  // namespace accelerate::detail::launch
