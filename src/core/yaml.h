// src/core/yaml.h - values to and from YAML 1.1, as Python's yaml.safe_load and safe_dump do it.
#pragma once

#include <string>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::inline core {

/// Reads one YAML document; an empty text is none. Plain words mean what they mean to Python:
/// yes/no/on/off/true/false are bools, ~ and null none, 010 is 8, 0x1F, 1_000, 1:30 (90) are ints,
/// floats need a dot; what is quoted is a string. Merge keys (<<) and aliases are followed. Dates
/// stay strings, because a `Value` has no date.
///
/// Throws `ConfigError` with line and column for what is not YAML and for what is refused: more
/// than one document, unknown tags, an alias inside its own anchor, keys that are not string, int
/// or bool, integers beyond 64 bits, nests deeper than `kMaxValueDepth`, aliases that grow the
/// document beyond 64 MiB. `source` names the text in messages, e.g. a file.
[[nodiscard]] Value yaml_loads(std::string_view text, std::string_view source = "The YAML text");
/// As `yaml_loads`, but a key that stands twice in a mapping is an error with its line. Merge keys
/// (<<) may be overridden.
[[nodiscard]] Value yaml_loads_unique(std::string_view text, std::string_view source);

/// Block style, two blanks per level, keys sorted, the quotes that safe_dump chooses. Long strings
/// stay in one line (safe_dump folds them at 80 characters; both read back the same). Tuples become
/// lists. Throws `ArgumentError` for bytes, tensors, objects and texts that are not UTF-8.
[[nodiscard]] std::string yaml_dumps(const Value& value);

}  // namespace accelerate::detail::inline core
