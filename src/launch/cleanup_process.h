// src/launch/cleanup_process.h - a small process that cleans up after a killed launcher.
//
// Workers end with the launcher (death signal), but not the processes that they started. The
// launcher sends the cleanup process its process groups and temporary folders. If the launcher ends
// without its destructor, the process kills these groups and removes these folders.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

#include "core/subprocess.h"

namespace accelerate::detail::launch {

class CleanupProcess {
 public:
  /// Forks: to be constructed before anything that a copy of this process must not hold.
  CleanupProcess();
  /// Ends the cleanup process without cleaning up.
  ~CleanupProcess();
  CleanupProcess(const CleanupProcess&) = delete;
  CleanupProcess& operator=(const CleanupProcess&) = delete;

  /// Where a child announces its process group (`SpawnOptions::announce_fd`); -1 without a cleanup
  /// process. The child does it, so that a launcher killed right after the start misses none.
  [[nodiscard]] int group_fd() const noexcept { return pid_ > 0 ? pipe_.write_end() : -1; }
  void forget_group(pid_t group);
  void add_folder(const std::filesystem::path& folder);

 private:
  void send(const std::string& line);

  PipePair pipe_;
  pid_t pid_ = -1;
};

}  // namespace accelerate::detail::launch
