// src/formats/boxes.h - parts of a tensor: boxes, and ranges of its elements in row-major order.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace accelerate::detail::formats {

/// An axis-aligned part of a tensor.
struct Box {
  std::vector<std::int64_t> offsets = {};
  std::vector<std::int64_t> sizes = {};

  bool operator==(const Box&) const = default;
};

/// The elements [begin, end) of a tensor, in row-major order.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t count() const { return end - begin; }
  bool operator==(const FlatRange&) const = default;
};

/// The product of the sizes: 1 for a tensor without dimensions.
[[nodiscard]] std::int64_t element_count(std::span<const std::int64_t> sizes);

/// In elements, of a tensor without gaps.
[[nodiscard]] std::vector<std::int64_t> dense_strides(std::span<const std::int64_t> sizes);

/// The fewest boxes that have exactly the elements of `range`, in ascending order: part of a first
/// row, whole rows, part of a last row, where the parts of rows are made of boxes likewise. Each is
/// one run of elements. At most 2 * (dimensions - 1) + 1; none for an empty range. The caller
/// ensures that the range lies in the tensor.
[[nodiscard]] std::vector<Box> flat_range_to_boxes(const std::vector<std::int64_t>& sizes,
                                                   FlatRange range);

/// The same for a range of the elements of `boxes` of the tensor, which are counted one box after
/// the other; of the tensor itself if there are none. Each box of the result is one run of those
/// elements.
[[nodiscard]] std::vector<Box> range_to_boxes(const std::vector<std::int64_t>& sizes,
                                              std::span<const Box> boxes, FlatRange range);

/// The range from the first element of a box to its last one, with elements between that are not in
/// the box. The box must not be empty.
[[nodiscard]] FlatRange extent_of(const std::vector<std::int64_t>& sizes, const Box& box);

/// Elements that lie side by side in a tensor and in what is stored of it.
struct SharedRun {
  std::int64_t stored = 0;
  std::int64_t flat = 0;
  std::int64_t count = 0;
};

/// Calls `visit` for the elements of `box` that are in `range`, in ascending order of `flat`, in
/// runs that are as long as possible. The box is stored from position 0 on, with `strides`.
void for_each_shared_run(const std::vector<std::int64_t>& sizes, const Box& box,
                         std::span<const std::int64_t> strides, FlatRange range,
                         const std::function<void(const SharedRun&)>& visit);

}  // namespace accelerate::detail::formats
