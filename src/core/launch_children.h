// src/core/launch_children.h - what debug_launcher and notebook_launcher share, without Torch.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/launchers.h"

namespace accelerate::detail::inline core {

using VariableChanges = std::vector<std::pair<std::string, std::optional<std::string>>>;

/// One process of one attempt.
struct ChildPlace {
  int local_rank = 0;
  int rank = 0;
  /// How often all processes have been started before.
  int attempt = 0;
};

struct ChildrenOptions {
  /// The function the user called, for messages: "debug_launcher".
  std::string launcher;
  int num_processes = 1;
  /// The rank of the first of them; the ranks before are on other machines.
  int first_rank = 0;
  StartMethod start_method = StartMethod::kFork;
  /// Where the user called it.
  std::source_location where;
  /// The variables of one process.
  std::function<VariableChanges(const ChildPlace& place)> variables;
  /// How often all processes are started again when one has failed.
  int max_restarts = 0;
  /// Descriptors that stay open in all of them, under the same number.
  std::vector<int> inherit = {};
  /// A listening socket for rank 0; the others do not get it.
  std::optional<int> listen_fd = std::nullopt;
  /// Set: the output of the children goes through us, with this before each line.
  std::optional<std::string> log_line_prefix_template = std::nullopt;
  /// How long children may take to end after SIGTERM.
  std::chrono::milliseconds grace = std::chrono::seconds(30);
  std::chrono::milliseconds monitor_interval = std::chrono::milliseconds(100);
};

/// Runs `body` once in each of `num_processes` new processes and returns when all have ended well.
///
/// Throws `CommError` with rank and message of the first that failed, after ending the others and
/// after the restarts that `max_restarts` allows. In a
/// process that was itself started (by `kSpawn`) for this call, runs `body` and ends the process;
/// in one that was started for a later call, returns at once.
void launch_children(const ChildrenOptions& options, const std::function<void()>& body);

/// Whether this process has been started for a later call of a launcher and is on its way there.
[[nodiscard]] bool on_the_way_to_a_launcher();

/// "[worker2]:" for "[${role_name}${rank}]:".
[[nodiscard]] std::string fill_prefix_template(const std::string& pattern, const std::string& role,
                                               int rank, int local_rank);

}  // namespace accelerate::detail::inline core
