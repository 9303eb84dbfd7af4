#include "checkpoint/slice_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace accelerate::detail::checkpoint {
namespace {

constexpr std::int64_t kPageBytes = 4096;
constexpr std::int64_t kWindowBytes = 1 << 20;

// Python's rules: negative positions count from the end, others are cut to the size.
std::pair<std::int64_t, std::int64_t> resolve(const safetensors::Range& range, std::int64_t size) {
  const auto inside = [size](std::int64_t at) {
    return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const auto begin = inside(range.begin);
  return {begin, std::max(begin, range.end ? inside(*range.end) : size)};
}

}  // namespace

SlicePlan::SlicePlan(std::span<const std::int64_t> shape,
                     std::span<const safetensors::Range> ranges, std::int64_t item_bytes)
    : shape_(shape.begin(), shape.end()) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = item_bytes;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = std::exchange(stride, stride * std::max<std::int64_t>(shape[i], 1));
  }
  std::size_t last_cut = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto [begin, end] = resolve(ranges[i], shape[i]);
    start_ += begin * strides[i];
    shape_[i] = end - begin;
    if (shape_[i] != shape[i]) last_cut = i;
  }
  // From the last dimension that is cut on, the bytes lie side by side.
  run_bytes_ = shape.empty() ? item_bytes : shape_[last_cut] * strides[last_cut];
  if (std::ranges::find(shape_, 0) != shape_.end()) run_bytes_ = 0;
  counts_.assign(shape_.begin(), shape_.begin() + static_cast<std::ptrdiff_t>(last_cut));
  strides_.assign(strides.begin(), strides.begin() + static_cast<std::ptrdiff_t>(last_cut));
}

void SlicePlan::read(std::span<std::byte> out, const Read& read) const {
  if (run_bytes_ == 0) return;
  const auto run_size = static_cast<std::size_t>(run_bytes_);
  std::vector<std::int64_t> runs;  // their offsets, as many as one read takes
  std::vector<std::byte> window;
  const auto flush = [&] {
    const auto begin = runs.front();
    const auto target = out.first(runs.size() * run_size);
    if (runs.back() + run_bytes_ - begin == static_cast<std::int64_t>(target.size())) {
      read(begin, target);
    } else {
      window.resize(static_cast<std::size_t>(runs.back() + run_bytes_ - begin));
      read(begin, window);
      for (std::size_t i = 0; i < runs.size(); ++i) {
        std::memcpy(target.data() + i * run_size, window.data() + (runs[i] - begin), run_size);
      }
    }
    out = out.subspan(target.size());
    runs.clear();
  };

  std::vector<std::int64_t> index(counts_.size(), 0);
  for (auto at = start_;;) {
    const bool joins = !runs.empty() && at - (runs.back() + run_bytes_) < kPageBytes &&
                       at + run_bytes_ - runs.front() <= kWindowBytes;
    if (!runs.empty() && !joins) flush();
    runs.push_back(at);
    auto dimension = counts_.size();
    for (; dimension > 0; --dimension) {
      const auto d = dimension - 1;
      at += strides_[d];
      if (++index[d] < counts_[d]) break;
      at -= strides_[d] * std::exchange(index[d], 0);
    }
    if (dimension == 0) break;
  }
  flush();
}

}  // namespace accelerate::detail::checkpoint
