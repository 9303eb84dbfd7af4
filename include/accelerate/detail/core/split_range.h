// accelerate/detail/core/split_range.h - which items each process gets of a list. No Torch.
#pragma once

#include <cstdint>
#include <string>

#include "accelerate/api.h"

namespace accelerate {

/// How `split_between_processes` cuts.
struct SplitOptions {
  /// Repeat an item until every process holds equally many, so that the results can be gathered.
  /// Drop the results beyond the original length afterwards.
  bool apply_padding = false;
};

/// The items [start, end) of one process, and the number that the largest part has.
struct SplitRange {
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::int64_t padded_size = 0;

  bool operator==(const SplitRange&) const = default;
};

/// Cuts `length` items into `num_processes` runs of neighbours; the first `length % num_processes`
/// of them hold one item more. Throws `ArgumentError` for an index outside of [0, num_processes).
[[nodiscard]] ACCELERATE_API SplitRange split_range(std::int64_t length, int num_processes,
                                                    int process_index);

namespace detail::inline core {

/// The items [start, end) of one process, then `padding` times the item `padding_index`.
struct SplitPart {
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::int64_t padding = 0;
  std::int64_t padding_index = 0;

  [[nodiscard]] std::int64_t size() const { return end - start + padding; }
  /// The index in the whole input of the i-th item of this part.
  [[nodiscard]] std::int64_t at(std::int64_t i) const {
    return i < end - start ? start + i : padding_index;
  }
  bool operator==(const SplitPart&) const = default;
};

/// Which item padding repeats.
enum class PadWith : std::uint8_t { kLastOfPart, kLastOfInput };

/// The part with the rules of Python Accelerate 1.13 on top: a process beyond the last item holds
/// that item, lists are padded with the last item of the part and tensors with that of the input.
[[nodiscard]] SplitPart split_part(std::int64_t length, int num_processes, int process_index,
                                   SplitOptions options, PadWith pad_with);

/// Checks that the leaves of one map agree in length; throws `ArgumentError` naming two that
/// differ.
class SplitLengths {
 public:
  void add(const std::string& path, std::int64_t length);

 private:
  std::string first_path_;
  std::int64_t first_length_ = -1;
};

}  // namespace detail::inline core
}  // namespace accelerate
