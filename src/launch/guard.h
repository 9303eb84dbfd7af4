// src/launch/guard.h - a small process that outlives a killed launcher and cleans up after it.
//
// Workers end with the launcher by themselves (a death signal), but what they started does not. The
// guard is told which process groups and folders belong to the launch; when the launcher is gone
// without a farewell it ends the ones and removes the others.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

#include "core/subprocess.h"

namespace accelerate::detail {

class Guard {
 public:
  /// Forks: make it before anything that a copy of this process must not hold.
  Guard();
  /// Farewell: the guard ends and touches nothing.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void add_group(pid_t group);
  void forget_group(pid_t group);
  void add_folder(const std::filesystem::path& folder);

 private:
  void tell(const std::string& line);

  PipePair pipe_;
  pid_t pid_ = -1;
};

}  // namespace accelerate::detail
