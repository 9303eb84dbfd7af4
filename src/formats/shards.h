// src/formats/shards.h - the greedy split of a model into files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/checkpoint/shards.h"

namespace accelerate::detail::formats {

/// A tensor as the split sees it.
struct ShardItem {
  std::string name;
  /// Equal for tensors that share a storage; nullopt for one that shares with no other.
  std::optional<std::size_t> storage = std::nullopt;
  /// Of the whole storage.
  std::int64_t bytes = 0;
};

/// The split of huggingface_hub: in the order of the items, a new file when the next storage would
/// make the open one larger than `max_bytes`; a storage that is larger by itself gets a file at
/// once, before the open one. Tensors of one storage go into one file.
///
/// `pattern` is a file name with `{suffix}`. Throws `ArgumentError` if it has none, and for
/// `max_bytes` below 1.
[[nodiscard]] StateDictSplit split_into_shards(const std::vector<ShardItem>& items,
                                               std::string_view pattern, std::int64_t max_bytes);

/// True if `name` is that of a shard: `pattern` with a suffix "-00001-of-00005".
[[nodiscard]] bool is_shard_name(std::string_view name, std::string_view pattern);

}  // namespace accelerate::detail::formats
