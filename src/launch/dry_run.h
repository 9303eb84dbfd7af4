// src/launch/dry_run.h - what `accelerate launch --dry_run` shows instead of starting anything.
#pragma once

#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/plan.h"

namespace accelerate::detail {

/// A process that the plan would start on this machine.
struct PlannedProcess {
  /// Nothing for processes that find out themselves, or are numbered when the machines meet.
  std::optional<int> rank = std::nullopt;
  std::optional<int> local_rank = std::nullopt;
  std::vector<std::string> argv = {};
  /// On top of the launcher's environment.
  std::map<std::string, std::string> variables = {};
};

/// The processes of this machine. `agent_store`: somebody other than rank 0 will serve the store.
[[nodiscard]] std::vector<PlannedProcess> planned_processes(const LaunchPlan& plan,
                                                            const Environment& environment,
                                                            bool agent_store);

/// "name = value  (flag)" per setting, then each process with its rank and variables.
[[nodiscard]] std::string dry_run_text(const LaunchPlan& plan,
                                       const std::vector<PlannedProcess>& processes);
/// The same as JSON: mode, settings, command, variables, agent, processes, warnings.
[[nodiscard]] std::string dry_run_json(const LaunchPlan& plan,
                                       const std::vector<PlannedProcess>& processes);

/// The words of a command as a shell takes them.
[[nodiscard]] std::string shell_line(const std::vector<std::string>& argv);

}  // namespace accelerate::detail
