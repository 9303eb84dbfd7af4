// src/launch/idle_flags.h - flags that were typed and that this run has no use for.
#pragma once

#include <string>
#include <vector>

#include "launch/arguments.h"
#include "launch/flags.h"
#include "launch/resolve.h"

namespace accelerate::detail {

/// Whether the run uses the engine that this flag belongs to; true for flags of no engine.
[[nodiscard]] bool engine_in_use(const ResolvedLaunch& run, const Flag& flag);

/// A flag that means something only with an agent, even for a single process: restarts, logs,
/// signals. Typed, with another value than the default.
[[nodiscard]] bool asks_for_agent(const LaunchArguments& arguments);

/// "--fsdp_version": typed flags that change nothing in this run, in the order of the help. A value
/// that is the default anyway is not among them, but for flags of an engine. The mode is decided.
[[nodiscard]] std::vector<std::string> idle_flags(const LaunchArguments& arguments,
                                                  const ResolvedLaunch& run);

}  // namespace accelerate::detail
