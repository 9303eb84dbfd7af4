#include "sharding/flat_layout.h"

#include <algorithm>

namespace accelerate::detail::sharding {
namespace {

constexpr std::int64_t kGrid = 64;

std::int64_t round_up(std::int64_t count) { return (count + kGrid - 1) / kGrid * kGrid; }

}  // namespace

FlatLayout::FlatLayout(std::span<const std::int64_t> sizes, std::int64_t processes)
    : sizes_(sizes.begin(), sizes.end()), processes_(processes) {
  std::int64_t end = 0;
  const auto add_gap = [&](std::int64_t until) {
    if (until > end) gaps_.push_back({end, until});
  };
  for (const auto size : sizes_) {
    const auto begin = round_up(end);
    add_gap(begin);
    offsets_.push_back(begin);
    end = begin + size;
  }
  shard_size_ = round_up((end + processes - 1) / processes);
  add_gap(padded_size());
}

Range FlatLayout::part(std::size_t parameter, std::int64_t rank) const {
  const auto size = sizes_[parameter];
  const auto begin = rank * shard_size_ - offsets_[parameter];
  return {std::clamp<std::int64_t>(begin, 0, size),
          std::clamp<std::int64_t>(begin + shard_size_, 0, size)};
}

std::int64_t FlatLayout::place(std::size_t parameter, std::int64_t rank) const {
  return std::clamp<std::int64_t>(offsets_[parameter] - rank * shard_size_, 0, shard_size_);
}

}  // namespace accelerate::detail::sharding
