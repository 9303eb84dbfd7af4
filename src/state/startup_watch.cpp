#include "state/startup_watch.h"

#include <pthread.h>

#include "accelerate/errors.h"
#include "core/processes.h"
#include "core/signals_blocked.h"
#include "core/text.h"
#include "core/uncaught.h"
#include "core/world.h"
#include "state/countdown.h"

namespace accelerate::detail::state {
namespace {

using std::chrono::milliseconds;

constexpr auto kWatchSlice = milliseconds(1000);
// A rank that waits in the roster throws first, and tells the other hosts.
constexpr auto kTimeToThrow = 2 * kWatchSlice;
// Siblings that are still to be started are found later; to look for them costs more than to look
// at one.
constexpr int kSlicesBetweenSearches = 5;

}  // namespace

bool StoppedProcesses::stopped_for(milliseconds limit, int rank, int pid) {
  if (process_state(pid) != "stopped") {
    since_.erase(rank);
    return false;
  }
  const auto now = Clock::now();
  return now - since_.emplace(rank, now).first->second >= limit;
}

std::string stopped_text(int rank, const std::string& process, int pid) {
  return str("rank ", rank, " (", process, ") has been stopped for ", in_words(kLongestStop),
             ", before all processes had started: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT ",
             pid, "` lets it go on. Start the run again.");
}

StartupWatch::StartupWatch(int rank, int size) : rank_(rank), size_(size) {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

StartupWatch::~StartupWatch() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool StartupWatch::wait() {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, kWatchSlice, [this] { return ends_; });
}

void StartupWatch::run() {
  ::pthread_setname_np(::pthread_self(), "startup watch");
  StoppedProcesses stopped;
  std::map<int, int> siblings;
  auto last = StoppedProcesses::Clock::now();
  for (int slice = 0; wait(); ++slice) {
    const auto now = StoppedProcesses::Clock::now();
    if (now - last > 3 * kWatchSlice) stopped.forgive();  // this process was stopped itself
    last = now;
    if (slice % kSlicesBetweenSearches == 0) siblings = sibling_ranks(rank_, size_);
    for (const auto& [rank, pid] : siblings) {
      if (!stopped.stopped_for(kLongestStop + kTimeToThrow, rank, pid)) continue;
      const auto process = str(this_host_name(), ", process ", pid);
      end_with_error(CommError(stopped_text(rank, process, pid), rank));
    }
  }
}

}  // namespace accelerate::detail::state
