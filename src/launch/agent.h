// src/launch/agent.h - carries out a plan with ranks: one agent per machine.
//
// The agent of machine 0 (c10d: of the machine with the rendezvous address) also hosts the
// rendezvous, whose coordinator decides for all machines. Every agent starts, shows and ends its
// own workers as the coordinator orders.
#pragma once

#include "launch/plan.h"

namespace accelerate::detail::launch {

/// Runs the workers of this machine until the job has ended, and returns the exit code: that of the
/// worker that failed first, 128 + n after signal n, 70 when another machine is gone.
///
/// No process that it started is left when it returns, nor when this process is killed. Throws
/// `ConfigError` or `Error` if the workers cannot be started.
[[nodiscard]] int run_agent(const LaunchPlan& plan);

}  // namespace accelerate::detail::launch
