// src/core/json.h - values to and from JSON, in the dialect of Python's json module.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail {

/// Reads one JSON text. NaN, Infinity and -Infinity are numbers; a key that comes twice keeps its
/// last value. `source` names the text in messages, e.g. a file.
///
/// Throws `ConfigError` with line and column where the text is not JSON, not UTF-8, nested deeper
/// than `kMaxValueDepth`, or has an integer beyond 64 bits.
[[nodiscard]] Value json_loads(std::string_view text, std::string_view source = "The JSON text");

/// How to write JSON. The defaults are those of Python's json.dumps.
struct JsonOptions {
  /// Blanks per level; unset: all in one line.
  std::optional<int> indent = std::nullopt;
  bool sort_keys = false;
  /// Write what is not ASCII as \u escapes.
  bool ensure_ascii = true;
};

/// Tuples become lists; keys that are numbers or truth values become texts. Throws `ArgumentError`
/// with the path of a value that JSON cannot say: bytes, a tensor, an object.
[[nodiscard]] std::string json_dumps(const Value& value, const JsonOptions& options = {});

}  // namespace accelerate::detail
