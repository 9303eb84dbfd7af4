// src/core/config_text.h - configuration files that people write.
#pragma once

#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::inline core {

/// As `json_loads`, but a key that stands twice in an object is an error with its line.
[[nodiscard]] Value json_loads_unique(std::string_view text, std::string_view source);

/// As `yaml_loads`, but a key that stands twice in a mapping is an error with its line. Merge keys
/// (<<) may be overridden.
[[nodiscard]] Value yaml_loads_unique(std::string_view text, std::string_view source);

}  // namespace accelerate::detail::inline core
