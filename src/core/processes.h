// src/core/processes.h - other processes of this host.
#pragma once

#include <unistd.h>

#include <map>
#include <string>
#include <string_view>

namespace accelerate::detail::inline core {

/// "running", "stopped", "a zombie", "waiting for a device", or "gone".
[[nodiscard]] std::string process_state(int pid);

/// The same for two processes exactly if each can see the other: this boot of this machine, and the
/// namespace of process numbers.
[[nodiscard]] std::string host_identity();

/// The other ranks of a run that were started beside this one, by rank: children of its parent with
/// its WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Empty if the variables with which this process was
/// started do not say that it is `rank` of `size`.
[[nodiscard]] std::map<int, int> sibling_ranks(int rank, int size);

/// The process in which an object was made. Its threads and connections do not exist in a forked
/// copy of that process.
class OwnerProcess {
 public:
  [[nodiscard]] bool is_forked_copy() const noexcept { return forks_ != forks_so_far(); }
  /// Throws `StateError` in a forked copy. `what` was to be done: "gather", "load a batch".
  void refuse_forked_copy(std::string_view what) const {
    if (is_forked_copy()) throw_forked_copy(what);
  }

 private:
  [[noreturn]] void throw_forked_copy(std::string_view what) const;

  /// How often this process and those that it was forked from were forked: costs less than
  /// `getpid`, which is a system call.
  [[nodiscard]] static int forks_so_far() noexcept;

  int forks_ = forks_so_far();
  pid_t pid_ = ::getpid();
};

}  // namespace accelerate::detail::inline core
