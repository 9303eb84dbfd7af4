// src/launch/dry_run.h - the output of `accelerate launch --dry_run`, which starts nothing.
#pragma once

#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/plan.h"

namespace accelerate::detail::launch {

/// A process that the plan would start on this machine.
struct PlannedProcess {
  /// nullopt if the process finds its rank itself or gets it at the rendezvous.
  std::optional<int> rank = std::nullopt;
  std::optional<int> local_rank = std::nullopt;
  std::vector<std::string> argv = {};
  /// In addition to the launcher's environment.
  std::map<std::string, std::string> variables = {};
};

/// The processes of this machine. `agent_store`: a helper process will serve the store.
[[nodiscard]] std::vector<PlannedProcess> planned_processes(const LaunchPlan& plan,
                                                            const Environment& environment,
                                                            bool agent_store);

/// "name = value  (flag)" per setting, then each process with its rank and variables.
[[nodiscard]] std::string dry_run_text(const LaunchPlan& plan,
                                       const std::vector<PlannedProcess>& processes);
/// The plan as JSON: mode, settings, command, variables, agent, processes, warnings.
[[nodiscard]] std::string dry_run_json(const LaunchPlan& plan,
                                       const std::vector<PlannedProcess>& processes);

/// A command with its words quoted for a shell.
[[nodiscard]] std::string shell_line(const std::vector<std::string>& argv);

}  // namespace accelerate::detail::launch
