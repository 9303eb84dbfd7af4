// accelerate/data/padding.h - sequences of many lengths in batches of few.
//
//     auto collate = [](const std::vector<at::Tensor>& sequences) {
//       return pad_to_multiple_of(sequences, 64);  // [batch, 64], [batch, 128], ...
//     };
//
// A GPU chooses kernels, and records captured steps, for each new length.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <cstdint>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

struct PadToMultipleOfOptions {
  /// The dimension of the sequence; negative ones count from the end.
  std::int64_t dim = -1;
  at::Scalar value = 0;
};

/// The tensor with `value` behind it, until its size along `dim` is a multiple of `multiple`; the
/// tensor itself if it is one. Throws `ArgumentError` for a `multiple` below 1 or a wrong `dim`.
[[nodiscard]] ACCELERATE_API at::Tensor pad_to_multiple_of(
    const at::Tensor& tensor, std::int64_t multiple, const PadToMultipleOfOptions& options = {});

/// A batch of sequences: each is padded to the length of the longest, rounded up to a multiple, and
/// they are stacked along a new first dimension. Throws `ArgumentError` as above, without
/// sequences, and for sequences that differ in more than their length.
[[nodiscard]] ACCELERATE_API at::Tensor pad_to_multiple_of(
    const std::vector<at::Tensor>& sequences, std::int64_t multiple,
    const PadToMultipleOfOptions& options = {});

}  // namespace accelerate
