// src/checkpoint/slice_reader.h - which bytes of a tensor a slice needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "accelerate/safetensors.h"

namespace accelerate::detail::checkpoint {

/// A slice of a contiguous tensor, as runs of bytes.
class SlicePlan {
 public:
  using Read = std::function<void(std::int64_t offset, std::span<std::byte> out)>;

  /// Dimensions without a range are whole.
  SlicePlan(std::span<const std::int64_t> shape, std::span<const safetensors::Range> ranges,
            std::int64_t item_bytes);

  /// Of the slice.
  [[nodiscard]] const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  /// Fills `out`, the memory of the slice, through `read`, which gets offsets from the start of the
  /// tensor. Runs that lie on one page are read together.
  void read(std::span<std::byte> out, const Read& read) const;

 private:
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> counts_;   // of runs per outer dimension
  std::vector<std::int64_t> strides_;  // of the outer dimensions, in bytes
  std::int64_t start_ = 0;             // of the first run
  std::int64_t run_bytes_ = 0;
};

}  // namespace accelerate::detail::checkpoint
