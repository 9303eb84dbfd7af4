// src/launch/program.h - the program that shall be started, looked at before anything starts.
#pragma once

#include <string>
#include <vector>

#include "accelerate/environment.h"

namespace accelerate::detail {

struct ProgramFacts {
  /// The file that is executed: as given, or where it was found in PATH.
  std::string path;
  /// A Python interpreter; its script has been looked at too.
  bool is_python = false;
  /// It loads libaccelerate.so, so its rank 0 can serve the store on a socket that we hand it.
  bool takes_listen_fd = false;

  bool operator==(const ProgramFacts&) const = default;
};

/// Finds the program of a command and looks whether it can start, without running it.
///
/// Throws `ConfigError` that names the file, the reason and what to do when it does not exist, is a
/// folder, is not executable, is for another machine or cut off, or misses its interpreter or a
/// library.
[[nodiscard]] ProgramFacts inspect_program(const std::vector<std::string>& argv,
                                           const Environment& environment);

}  // namespace accelerate::detail
