// accelerate/value/json.h - JSON files as values.
//
//     const auto config = accelerate::read_json_file("llama/config.json");
//     const auto layers = config.at("num_hidden_layers").as_int();
#pragma once

#include <filesystem>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

/// The content of a JSON file, as Python's `json.load` reads it.
///
/// Throws `ConfigError` with the path and the reason: no such file, larger than 64 MiB, or not JSON
/// (with line and column).
[[nodiscard]] ACCELERATE_API Value read_json_file(const std::filesystem::path& path);

}  // namespace accelerate
