// src/formats/shard_index.h - the index file of a model in several files: *.index.json.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "accelerate/checkpoint/shards.h"

namespace accelerate::detail::formats {

/// Index files are a few hundred bytes per tensor; larger ones are refused.
inline constexpr std::size_t kMaxIndexBytes = std::size_t{32} << 20;

struct ShardIndex {
  /// The file of each tensor.
  std::unordered_map<std::string, std::string> weight_map = {};
  /// The files, each once and sorted, as Python reads them.
  std::vector<std::string> files = {};
};

/// Reads an index: an object with `weight_map`, or as Python allows the map itself.
///
/// Throws `FormatError` with `source` and the problem: not JSON, not UTF-8, a key twice, nested
/// deeper than an index is, a `weight_map` that is no map from text to text, no tensor at all, a
/// name longer than 64 KiB, and a file name that leads out of the folder (absolute, with "..", "\"
/// or control characters).
[[nodiscard]] ShardIndex read_shard_index(std::string_view text, std::string_view source);

/// The bytes that Python writes for the index of this split.
[[nodiscard]] std::string write_shard_index(const StateDictSplit& split);

}  // namespace accelerate::detail::formats
