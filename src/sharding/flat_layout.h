// src/sharding/flat_layout.h - where parameters stand in a flat buffer, and who holds which part.
//
// Each parameter begins at a multiple of 64 elements, and so does the shard of each process:
// kernels see the alignment that a tensor of its own has, so that numbers are the same to the last
// bit. What lies between parameters and behind the last one is zero and stays zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::sharding {

/// Elements [begin, end).
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

class ACCELERATE_API FlatLayout {
 public:
  FlatLayout() = default;
  /// `sizes`: the elements of each parameter.
  FlatLayout(std::span<const std::int64_t> sizes, std::int64_t processes);

  [[nodiscard]] std::int64_t offset(std::size_t parameter) const { return offsets_[parameter]; }
  [[nodiscard]] std::int64_t shard_size() const { return shard_size_; }
  /// Of the whole buffer.
  [[nodiscard]] std::int64_t padded_size() const { return shard_size_ * processes_; }

  /// The elements of the flattened parameter that process `rank` holds; empty if it holds none.
  [[nodiscard]] Range part(std::size_t parameter, std::int64_t rank) const;
  /// Where that part begins in the shard of the process.
  [[nodiscard]] std::int64_t place(std::size_t parameter, std::int64_t rank) const;
  /// What belongs to no parameter.
  [[nodiscard]] const std::vector<Range>& gaps() const { return gaps_; }

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> offsets_;
  std::vector<Range> gaps_;
  std::int64_t shard_size_ = 0;
  std::int64_t processes_ = 1;
};

}  // namespace accelerate::detail::sharding
