#include "accelerate/data/padding.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

std::int64_t padded_dim(const at::Tensor& tensor, std::int64_t dim) {
  const auto place = dim < 0 ? dim + tensor.dim() : dim;
  if (place >= 0 && place < tensor.dim()) return place;
  throw ArgumentError(detail::str("pad_to_multiple_of: dim is ", dim, ", but a tensor has shape ",
                                  tensor.sizes(), "."));
}

std::int64_t rounded_up(std::int64_t length, std::int64_t multiple) {
  if (multiple < 1) {
    throw ArgumentError(
        detail::str("pad_to_multiple_of: multiple is ", multiple, "; it must be 1 or more."));
  }
  return (length + multiple - 1) / multiple * multiple;
}

}  // namespace

at::Tensor pad_to_multiple_of(const at::Tensor& tensor, std::int64_t multiple,
                              const PadToMultipleOfOptions& options) {
  const auto dim = padded_dim(tensor, options.dim);
  const auto length = tensor.size(dim);
  const auto missing = rounded_up(length, multiple) - length;
  if (missing == 0) return tensor;
  auto shape = tensor.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = missing;
  return at::cat({tensor, at::full(shape, options.value, tensor.options())}, dim);
}

at::Tensor pad_to_multiple_of(const std::vector<at::Tensor>& sequences, std::int64_t multiple,
                              const PadToMultipleOfOptions& options) {
  if (sequences.empty()) throw ArgumentError("pad_to_multiple_of: there are no sequences.");
  const auto& first = sequences.front();
  const auto dim = padded_dim(first, options.dim);
  std::int64_t longest = 0;
  for (const auto& one : sequences) {
    auto shape = one.sizes().vec();
    if (one.dim() == first.dim()) {
      longest = std::max(longest, one.size(dim));
      shape[static_cast<std::size_t>(dim)] = first.size(dim);
    }
    if (first.sizes() != shape || one.scalar_type() != first.scalar_type()) {
      throw ArgumentError(detail::str("pad_to_multiple_of: sequences of ", first.scalar_type(), " ",
                                      first.sizes(), " and of ", one.scalar_type(), " ",
                                      one.sizes(), " differ in more than dimension ", dim, "."));
    }
  }
  auto shape = first.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = rounded_up(longest, multiple);
  shape.insert(shape.begin(), static_cast<std::int64_t>(sequences.size()));
  auto batch = at::full(shape, options.value, first.options());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    batch[static_cast<std::int64_t>(i)].narrow(dim, 0, sequences[i].size(dim)).copy_(sequences[i]);
  }
  return batch;
}

}  // namespace accelerate
