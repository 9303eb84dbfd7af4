// accelerate/checkpoint/offload_index.h - what the index.json of an offload folder says.
//
// Included by accelerate/checkpoint.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/modeling/device_map.h"

namespace accelerate {

/// Where an offloaded tensor is and what it is.
struct OffloadedWeight {
  /// "float32", "bfloat16". For a tensor in a safetensors file: what to convert it to, or empty.
  std::string dtype = {};
  /// Empty for a scalar, and for a tensor in a safetensors file, which knows its own.
  std::vector<std::int64_t> shape = {};
  /// The tensor is in this file and not in a .dat file.
  std::optional<std::filesystem::path> safetensors_file = std::nullopt;
  /// Its name there. Unset: as in the index.
  std::optional<std::string> weight_name = std::nullopt;

  bool operator==(const OffloadedWeight&) const = default;
};
/// Entries by the names of tensors.
using OffloadIndex = OrderedMap<std::string, OffloadedWeight>;

}  // namespace accelerate
