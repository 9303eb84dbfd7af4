// accelerate/checkpoint/shards.h - which tensors of a model go into which file.
//
// Part of accelerate/checkpoint.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accelerate/modeling/ordered_map.h"

namespace accelerate {

/// Python's `StateDictSplit` (huggingface_hub).
struct StateDictSplit {
  /// More than one file.
  bool is_sharded = false;
  /// Bytes of all storages, each counted once.
  std::int64_t total_size = 0;
  /// The files and the names of their tensors, in the order in which they are written.
  OrderedMap<std::string, std::vector<std::string>> filename_to_tensors = {};
  /// The file of each tensor, in the order of the files.
  OrderedMap<std::string, std::string> tensor_to_filename = {};

  bool operator==(const StateDictSplit&) const = default;
};

}  // namespace accelerate
