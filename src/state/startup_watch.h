// src/state/startup_watch.h - finds a rank of this host that was stopped while the group is made.
//
// Internal, no Torch. The waits of c10d and Gloo for such a rank cannot be interrupted: a store
// that a stopped rank 0 serves does not even answer.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace accelerate::detail::state {

/// How long a rank may be stopped before it is blamed; as long as in a group that is made.
inline constexpr std::chrono::milliseconds kLongestStop{10'000};

/// For how long processes have been seen to be stopped.
class StoppedProcesses {
 public:
  using Clock = std::chrono::steady_clock;

  /// Looks at the process of `rank`. Returns true if it has been stopped for `limit` now.
  [[nodiscard]] bool stopped_for(std::chrono::milliseconds limit, int rank, int pid);
  /// This process was not running for a while.
  void forgive() { since_.clear(); }

 private:
  std::map<int, Clock::time_point> since_;
};

/// "rank 1 (host, process 4711) is stopped and has been for 10 s ...".
[[nodiscard]] std::string stopped_text(int rank, const std::string& process, int pid);

/// While it lives, a thread looks at the ranks that were started beside this one (`sibling_ranks`).
/// If one of them is stopped for `kLongestStop` and this process has not found out by itself, it
/// writes the error that names the rank to stderr, and this process ends as by a `CommError`.
class StartupWatch {
 public:
  StartupWatch(int rank, int size);
  ~StartupWatch();
  StartupWatch(const StartupWatch&) = delete;
  StartupWatch& operator=(const StartupWatch&) = delete;

 private:
  void run();
  /// Sleeps for a while; false when the watch ends.
  [[nodiscard]] bool wait();

  int rank_;
  int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace accelerate::detail::state
