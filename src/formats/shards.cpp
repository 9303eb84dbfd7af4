#include "formats/shards.h"

#include <array>
#include <cstdio>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::string_view kSuffix = "{suffix}";

std::pair<std::string_view, std::string_view> around_suffix(std::string_view pattern) {
  const auto at = pattern.find(kSuffix);
  if (at == pattern.npos) {
    throw ArgumentError(str("The file name pattern '", pattern,
                            "' has no {suffix}. Use one such as 'model{suffix}.safetensors'."));
  }
  return {pattern.substr(0, at), pattern.substr(at + kSuffix.size())};
}

std::string shard_suffix(std::size_t shard, std::size_t count) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "-%05zu-of-%05zu", shard + 1, count);
  return text.data();
}

using Shard = std::vector<std::string>;

}  // namespace

StateDictSplit split_into_shards(const std::vector<ShardItem>& items, std::string_view pattern,
                                 std::int64_t max_bytes) {
  const auto [before, behind] = around_suffix(pattern);
  if (max_bytes < 1) {
    throw ArgumentError(str("The maximum size of a shard is ", max_bytes,
                            " bytes. Use a positive number, or a text such as '5GB'."));
  }
  std::vector<Shard> shards;
  Shard open;
  std::int64_t open_bytes = 0;
  StateDictSplit split;
  // Further names of a storage, in the order of their first names.
  std::vector<std::pair<std::string, std::vector<std::string>>> aliases;
  std::unordered_map<std::size_t, std::size_t> alias_of;
  for (const auto& item : items) {
    if (item.storage) {
      const auto [known, is_new] = alias_of.emplace(*item.storage, aliases.size());
      if (!is_new) {
        aliases[known->second].second.push_back(item.name);
        continue;
      }
      aliases.emplace_back(item.name, std::vector<std::string>());
    }
    split.total_size += item.bytes;
    if (item.bytes > max_bytes) {
      shards.push_back({item.name});
      continue;
    }
    if (item.bytes > max_bytes - open_bytes) {
      shards.push_back(std::exchange(open, {}));
      open_bytes = 0;
    }
    open.push_back(item.name);
    open_bytes += item.bytes;
  }
  if (!open.empty()) shards.push_back(std::move(open));

  std::unordered_map<std::string, std::size_t> shard_of;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const auto& name : shards[i]) shard_of.emplace(name, i);
  }
  for (const auto& [first, others] : aliases) {
    auto& shard = shards[shard_of.at(first)];
    shard.insert(shard.end(), others.begin(), others.end());
  }

  split.is_sharded = shards.size() > 1;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto name = str(before, split.is_sharded ? shard_suffix(i, shards.size()) : "", behind);
    for (const auto& tensor : shards[i]) split.tensor_to_filename.set(tensor, name);
    split.filename_to_tensors.set(name, std::move(shards[i]));
  }
  return split;
}

bool is_shard_name(std::string_view name, std::string_view pattern) {
  const auto [before, behind] = around_suffix(pattern);
  if (!name.starts_with(before) || !name.ends_with(behind)) return false;
  constexpr std::size_t kLength = std::string_view("-00001-of-00005").size();
  if (name.size() != before.size() + kLength + behind.size()) return false;
  const auto suffix = name.substr(before.size(), kLength);
  return suffix[0] == '-' && is_digits(suffix.substr(1, 5)) && suffix.substr(6, 4) == "-of-" &&
         is_digits(suffix.substr(10));
}

}  // namespace accelerate::detail::formats
