// src/core/json.h - values to and from JSON, in the dialect of Python's json module.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::inline core {

/// Reads one JSON text. NaN, Infinity and -Infinity are numbers; a key that comes twice keeps its
/// last value. `source` names the text in messages, e.g. a file.
///
/// Throws `ConfigError` with line and column where the text is not JSON, not UTF-8, nested deeper
/// than `kMaxValueDepth`, or has an integer beyond 64 bits.
[[nodiscard]] Value json_loads(std::string_view text, std::string_view source = "The JSON text");

/// As `json_loads`, but a key that stands twice in an object is an error with its line: for files
/// that people write.
[[nodiscard]] Value json_loads_unique(std::string_view text, std::string_view source);

/// How to write JSON. The defaults are those of Python's json.dumps.
struct JsonOptions {
  /// Blanks per level; unset: all in one line.
  std::optional<int> indent = std::nullopt;
  bool sort_keys = false;
  /// Write characters beyond ASCII as \u escapes.
  bool ensure_ascii = true;
  /// Write U+FFFD for bytes that are not UTF-8, so that every reader takes the text. Unset, they
  /// become Python's surrogate escapes, which `json_loads` refuses.
  bool replace_invalid = false;
};

/// Tuples become lists; keys that are numbers or truth values become texts. Throws `ArgumentError`
/// with the path of a value that JSON cannot hold: bytes, a tensor, an object.
[[nodiscard]] std::string json_dumps(const Value& value, const JsonOptions& options = {});

/// The object on a line that may come from anybody; nullopt if there is none.
[[nodiscard]] std::optional<Value::Dict> json_object(std::string_view line);

}  // namespace accelerate::detail::inline core
