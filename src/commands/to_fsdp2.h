// src/commands/to_fsdp2.h - configuration of FSDP version 1, converted to version 2.
#pragma once

#include <string>
#include <vector>

#include "accelerate/value.h"

namespace accelerate::detail::commands {

struct Fsdp2Conversion {
  /// The whole configuration file; as it was if there was nothing to convert.
  Value::Dict config;
  /// What the user should know: keys that were removed, or why nothing was converted.
  std::vector<std::string> notices = {};
};

/// Converts the `fsdp_config` of a configuration file.
[[nodiscard]] Fsdp2Conversion convert_to_fsdp2(Value::Dict config);

}  // namespace accelerate::detail::commands
