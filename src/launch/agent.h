// src/launch/agent.h - carries out a plan with ranks: one agent per machine.
//
// The agent of machine 0 (or of the endpoint's host) also holds the meeting at which all machines
// agree on rounds; every agent starts, shows and ends its own workers as it is told there.
#pragma once

#include "launch/plan.h"

namespace accelerate::detail {

/// Runs the workers of this machine until the job has ended, and returns the exit code: that of the
/// worker that failed first, 128 + n after signal n, 70 when another machine is gone.
///
/// Nothing it started is left when it returns, nor when this process is killed. Throws
/// `ConfigError` and `Error` for what prevents a start.
[[nodiscard]] int run_agent(const LaunchPlan& plan);

}  // namespace accelerate::detail
