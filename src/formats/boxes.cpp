#include "formats/boxes.h"

#include <algorithm>

namespace accelerate::detail::formats {
namespace {

using Numbers = std::vector<std::int64_t>;

class RangeCover {
 public:
  explicit RangeCover(const Numbers& sizes) : sizes_(sizes), rows_(dense_strides(sizes)) {}

  std::vector<Box> cover(FlatRange range) && {
    if (range.count() > 0) add(0, range);
    return std::move(boxes_);
  }

 private:
  /// `range` counts from the first element at `prefix_`, which has the dimensions before `d`.
  void add(std::size_t d, FlatRange range) {
    if (d == sizes_.size()) return emit(d, 0, 1);  // a tensor without dimensions
    const auto row = rows_[d];
    const auto first = range.begin / row;
    const auto last = (range.end - 1) / row;
    if (first == last && range.count() < row) {
      return inside(d, first, {range.begin - first * row, range.end - first * row});
    }
    const bool cut_begin = range.begin % row != 0;
    const bool cut_end = range.end % row != 0;
    if (cut_begin) inside(d, first, {range.begin - first * row, row});
    const auto whole_begin = first + (cut_begin ? 1 : 0);
    const auto whole_end = last + (cut_end ? 0 : 1);
    if (whole_begin < whole_end) emit(d, whole_begin, whole_end - whole_begin);
    if (cut_end) inside(d, last, {0, range.end - last * row});
  }

  void inside(std::size_t d, std::int64_t index, FlatRange range) {
    prefix_.push_back(index);
    add(d + 1, range);
    prefix_.pop_back();
  }

  /// `count` whole rows of dimension `d`.
  void emit(std::size_t d, std::int64_t begin, std::int64_t count) {
    Box box{.offsets = prefix_, .sizes = Numbers(prefix_.size(), 1)};
    if (d < sizes_.size()) {
      box.offsets.push_back(begin);
      box.sizes.push_back(count);
      box.offsets.resize(sizes_.size(), 0);
      box.sizes.insert(box.sizes.end(), sizes_.begin() + static_cast<std::ptrdiff_t>(d) + 1,
                       sizes_.end());
    }
    boxes_.push_back(std::move(box));
  }

  const Numbers& sizes_;
  const Numbers rows_;  // elements per index of each dimension
  Numbers prefix_;
  std::vector<Box> boxes_;
};

class RunWalk {
 public:
  RunWalk(const Numbers& sizes, const Box& box, std::span<const std::int64_t> stored,
          FlatRange range, const std::function<void(const SharedRun&)>& visit)
      : strides_(dense_strides(sizes)),
        box_(box),
        stored_(stored),
        range_(range),
        visit_(visit),
        outer_(sizes.size()),
        reach_(sizes.size() + 1, 0) {
    // Dimensions that are dense on both sides make one run.
    while (outer_ > 0 && (box.sizes[outer_ - 1] == 1 ||
                          (strides_[outer_ - 1] == run_ && stored[outer_ - 1] == run_))) {
      run_ *= box.sizes[--outer_];
    }
    for (std::size_t d = sizes.size(); d > 0; --d) {
      reach_[d - 1] = reach_[d] + (box.sizes[d - 1] - 1) * strides_[d - 1];
    }
  }

  void walk() {
    std::int64_t flat = 0;
    for (std::size_t d = 0; d < strides_.size(); ++d) flat += strides_[d] * box_.offsets[d];
    walk(0, 0, flat);
  }

 private:
  void walk(std::size_t d, std::int64_t stored, std::int64_t flat) {
    if (d == outer_) {
      const auto begin = std::max(flat, range_.begin);
      const auto end = std::min(flat + run_, range_.end);
      if (begin < end)
        visit_({.stored = stored + begin - flat, .flat = begin, .count = end - begin});
      return;
    }
    // Indices whose elements, from the first to the last, reach into the range.
    const auto stride = strides_[d];
    const auto before = range_.begin - flat - reach_[d + 1];
    const auto first = before > 0 ? (before + stride - 1) / stride : 0;
    const auto behind = range_.end - flat;
    const auto count = behind > 0 ? std::min(box_.sizes[d], (behind + stride - 1) / stride) : 0;
    for (auto i = first; i < count; ++i) {
      walk(d + 1, stored + i * stored_[d], flat + i * stride);
    }
  }

  const Numbers strides_;  // of the tensor
  const Box& box_;
  std::span<const std::int64_t> stored_;
  FlatRange range_;
  const std::function<void(const SharedRun&)>& visit_;
  std::size_t outer_;  // dimensions that are not in a run
  std::int64_t run_ = 1;
  Numbers reach_;  // from the first to the last element of the dimensions from an index on
};

}  // namespace

std::int64_t element_count(std::span<const std::int64_t> sizes) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return count;
}

std::vector<std::int64_t> dense_strides(std::span<const std::int64_t> sizes) {
  Numbers strides(sizes.size());
  std::uint64_t stride = 1;  // of a tensor without elements it may be more than numbers can hold
  for (std::size_t i = sizes.size(); i > 0; --i) {
    strides[i - 1] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(sizes[i - 1], 1));
  }
  return strides;
}

std::vector<Box> flat_range_to_boxes(const std::vector<std::int64_t>& sizes, FlatRange range) {
  return RangeCover(sizes).cover(range);
}

std::vector<Box> range_to_boxes(const std::vector<std::int64_t>& sizes, std::span<const Box> boxes,
                                FlatRange range) {
  if (boxes.empty()) return flat_range_to_boxes(sizes, range);
  std::vector<Box> result;
  std::int64_t first = 0;
  for (const auto& box : boxes) {
    const auto count = element_count(box.sizes);
    const FlatRange own{std::clamp<std::int64_t>(range.begin - first, 0, count),
                        std::clamp<std::int64_t>(range.end - first, 0, count)};
    for (auto& part : flat_range_to_boxes(box.sizes, own)) {
      for (std::size_t d = 0; d < sizes.size(); ++d) part.offsets[d] += box.offsets[d];
      result.push_back(std::move(part));
    }
    first += count;
  }
  return result;
}

FlatRange extent_of(const std::vector<std::int64_t>& sizes, const Box& box) {
  const auto strides = dense_strides(sizes);
  FlatRange range{.begin = 0, .end = 1};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    range.begin += strides[d] * box.offsets[d];
    range.end += strides[d] * (box.offsets[d] + box.sizes[d] - 1);
  }
  return range;
}

void for_each_shared_run(const std::vector<std::int64_t>& sizes, const Box& box,
                         std::span<const std::int64_t> strides, FlatRange range,
                         const std::function<void(const SharedRun&)>& visit) {
  if (std::ranges::find(box.sizes, 0) != box.sizes.end()) return;
  RunWalk(sizes, box, strides, range, visit).walk();
}

}  // namespace accelerate::detail::formats
