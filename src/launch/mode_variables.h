// src/launch/mode_variables.h - the variables by which workers learn the settings of a launch.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/machine_facts.h"
#include "launch/resolve.h"

namespace accelerate::detail {

/// What is set on top of `outer`, the launcher's environment. A switch that `outer` has on and the
/// launch has off is set to off.
[[nodiscard]] std::map<std::string, std::string> mode_variables(const ResolvedLaunch& run,
                                                                const Environment& outer,
                                                                const MachineFacts& facts,
                                                                std::vector<std::string>& warnings);

}  // namespace accelerate::detail
