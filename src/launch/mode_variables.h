// src/launch/mode_variables.h - variables that pass the settings of a launch to the workers.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/machine_facts.h"
#include "launch/resolve.h"

namespace accelerate::detail::launch {

/// The variables to set in addition to `outer`, the launcher's environment. A switch that is on in
/// `outer` and off in the launch is set to off.
[[nodiscard]] std::map<std::string, std::string> mode_variables(const ResolvedLaunch& run,
                                                                const Environment& outer,
                                                                const MachineFacts& facts,
                                                                std::vector<std::string>& warnings);

}  // namespace accelerate::detail::launch
