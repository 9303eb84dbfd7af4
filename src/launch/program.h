// src/launch/program.h - checks the program of a launch before anything starts.
#pragma once

#include <istream>
#include <string>
#include <vector>

#include "accelerate/environment.h"

namespace accelerate::detail::launch {

struct ProgramFacts {
  /// The file to execute: as given, or as found in PATH.
  std::string path;
  /// A Python interpreter, whose script exists.
  bool is_python = false;
  /// It loads libaccelerate.so, so its rank 0 can serve the store on an inherited socket.
  bool takes_listen_fd = false;

  bool operator==(const ProgramFacts&) const = default;
};

/// The loader that a binary of this machine's word size names (PT_INTERP); "" if there is none.
[[nodiscard]] std::string loader_of(std::istream& file);

/// Finds the program of a command and checks that it can start, without running it.
///
/// Throws `ConfigError` with the file, the reason and a remedy if it does not exist, is a folder,
/// is not executable, cannot be executed on this machine, or its interpreter or a library is
/// missing.
[[nodiscard]] ProgramFacts inspect_program(const std::vector<std::string>& argv,
                                           const Environment& environment);

}  // namespace accelerate::detail::launch
