// src/core/yaml_scalar.h - what a plain YAML 1.1 scalar means, by PyYAML's rules.
#pragma once

#include <optional>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::inline core {

enum class YamlTag {
  kString,
  kBool,
  kFloat,
  kInt,
  kMerge,  ///< <<
  kNull,
  kTimestamp,  ///< 2024-01-31
  kValue,      ///< =
  kIndicator   ///< a lone ! & or *
};

/// What a plain scalar resolves to. The writer quotes strings for which this is not kString.
[[nodiscard]] YamlTag resolve_yaml(std::string_view text);

[[nodiscard]] std::optional<bool> read_yaml_bool(std::string_view text);

/// Empty when the digits are none, e.g. in 0x_, or do not fit into 64 bits.
[[nodiscard]] std::optional<std::int64_t> read_yaml_int(std::string_view text);

/// Of a text that resolves to kFloat.
[[nodiscard]] double read_yaml_float(std::string_view text);

}  // namespace accelerate::detail::inline core
