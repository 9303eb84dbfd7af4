// src/launch/workers.h - starts, shows and ends the workers of this machine in one round.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/subprocess.h"
#include "launch/cleanup_process.h"
#include "launch/console.h"
#include "launch/failure.h"
#include "launch/log_folder.h"
#include "launch/plan.h"

namespace accelerate::detail::launch {

struct LaunchRound;

/// The store that the workers of a round use.
struct StoreFacts {
  int port = 0;
  bool agent_store = false;
  /// A listening socket for rank 0; -1 for none.
  int listen_fd = -1;
};

class Workers {
 public:
  using Clock = std::chrono::steady_clock;

  /// All arguments must outlive the workers.
  Workers(const LaunchPlan& plan, Console& console, const LogFolder& logs, CleanupProcess& cleanup);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Starts all workers. Throws `Error` if the program cannot be executed.
  void start(const LaunchRound& round, const StoreFacts& store);

  /// Passes output on until a worker ends, a descriptor in `also` is ready, or the deadline.
  /// Returns the new failures.
  [[nodiscard]] std::vector<WorkerFailure> wait(Clock::time_point deadline, std::span<pollfd> also);

  /// Sends a signal to all running workers and the processes that they started.
  void signal(int signal) noexcept;
  /// From now on failures count as caused by the launcher.
  void expect_end() noexcept { ending_ = true; }
  void set_terminal_size() noexcept;

  [[nodiscard]] bool running() const noexcept { return processes_.running() > 0; }
  [[nodiscard]] std::size_t size() const noexcept { return processes_.size(); }

 private:
  struct Place {
    int rank = 0;
    int local_rank = 0;
    std::filesystem::path error_file = {};
    /// Files of streams that the console does not get; their last lines are read after a failure.
    std::filesystem::path output_only_in = {};
    std::filesystem::path error_only_in = {};
  };

  void spawn(const LaunchRound& round, const StoreFacts& store, int local_rank);
  [[nodiscard]] std::vector<std::string> environment_of(const Place& place,
                                                        const LaunchRound& round,
                                                        const StoreFacts& store) const;
  void route(SpawnOptions& options, const LaunchRound& round, Place& place, std::size_t index);
  [[nodiscard]] std::string prefix(int rank, int local_rank) const;
  [[nodiscard]] std::optional<WorkerFailure> failure_of(std::size_t index);
  [[nodiscard]] std::vector<std::string> last_lines(std::size_t index) const;

  const LaunchPlan& plan_;
  Console& console_;
  const LogFolder& logs_;
  CleanupProcess& cleanup_;
  bool ending_ = false;
  std::vector<Place> places_;
  ProcessSet processes_;
};

}  // namespace accelerate::detail::launch
