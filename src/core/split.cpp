#include <algorithm>

#include "accelerate/detail/core/split_range.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {

SplitRange split_range(std::int64_t length, int num_processes, int process_index) {
  if (length < 0 || num_processes < 1 || process_index < 0 || process_index >= num_processes) {
    throw ArgumentError(detail::str("split_range: cannot give process ", process_index, " of ",
                                    num_processes, " its part of ", length, " items."));
  }
  const std::int64_t each = length / num_processes;
  const std::int64_t extras = length % num_processes;
  const std::int64_t start = process_index * each + std::min<std::int64_t>(process_index, extras);
  return {.start = start,
          .end = start + each + (process_index < extras ? 1 : 0),
          .padded_size = each + (extras > 0 ? 1 : 0)};
}

namespace detail::inline core {

SplitPart split_part(std::int64_t length, int num_processes, int process_index,
                     SplitOptions options, PadWith pad_with) {
  if (num_processes == 1 || length == 0) return {.start = 0, .end = length};
  const SplitRange range = split_range(length, num_processes, process_index);
  SplitPart part{.start = range.start, .end = range.end};
  // Parity: with fewer items than processes the late ones repeat the last item, padding or not.
  if (part.start >= length) part = {.start = length - 1, .end = length};
  if (options.apply_padding) {
    part.padding = std::max<std::int64_t>(0, range.padded_size - (part.end - part.start));
    part.padding_index = pad_with == PadWith::kLastOfInput ? length - 1 : part.end - 1;
  }
  return part;
}

void SplitLengths::add(const std::string& path, std::int64_t length) {
  if (first_length_ < 0) {
    first_path_ = path;
    first_length_ = length;
  } else if (length != first_length_) {
    throw ArgumentError(
        str("split_between_processes: all values of a map must have the same "
            "length, but '",
            first_path_, "' has ", first_length_, " items and '", path, "' has ", length, "."));
  }
}

}  // namespace detail::inline core
}  // namespace accelerate
