#include "accelerate/detail/data/batch_tensors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::data {
namespace {

// Rows are random, which the processor cannot foresee. Short ones are asked for well ahead. Of a
// long one that would drive out what was asked for before: first its page is looked up, then it is
// asked for until the processor's own prefetcher has caught on.
constexpr std::int64_t kCacheLine = 64;
constexpr std::int64_t kShortRow = 8 * kCacheLine;
constexpr std::int64_t kShortRowsAhead = 12;
constexpr std::int64_t kPagesAhead = 4;
constexpr std::int64_t kLongRowsAhead = 2;
constexpr std::int64_t kMostLinesAhead = 12;
// Below this, threads cost more than they copy.
constexpr std::int64_t kParallelBytes = 1 << 20;
constexpr std::int64_t kBytesPerThread = 1 << 18;

/// Whether its bytes are its elements, one after the other.
bool is_plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized() && !tensor.is_nested();
}

at::Tensor empty_like_rows(const at::Tensor& like, at::IntArrayRef sizes,
                           const LoadContext& context) {
  if (context.memory && !context.pinned) return context.memory->empty(sizes, like.options());
  return at::empty(sizes, like.options().pinned_memory(context.pinned));
}

void ask_for(const std::byte* data, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(data + at);
}

/// Copies rows `begin` to `end` of the list. Neighbours are copied together.
void copy_rows(std::byte* out, const std::byte* in, const std::int64_t* rows, std::int64_t begin,
               std::int64_t end, std::int64_t row_bytes) {
  const bool is_short = row_bytes <= kShortRow;
  const std::int64_t ahead = is_short ? kShortRowsAhead : kLongRowsAhead;
  const std::int64_t ahead_bytes = std::min(row_bytes, kMostLinesAhead * kCacheLine);
  for (std::int64_t i = begin; i < end;) {
    std::int64_t next = i + 1;
    while (next < end && rows[next] == rows[next - 1] + 1) ++next;
    if (!is_short && i + kPagesAhead < end) ask_for(in + rows[i + kPagesAhead] * row_bytes, 1);
    if (i + ahead < end) ask_for(in + rows[i + ahead] * row_bytes, ahead_bytes);
    std::memcpy(out + i * row_bytes, in + rows[i] * row_bytes,
                static_cast<std::size_t>((next - i) * row_bytes));
    i = next;
  }
}

void check_rows(const at::Tensor& tensor, const IndexBatch& rows) {
  const std::int64_t size = tensor.size(0);
  for (const std::int64_t row : rows) {
    if (row >= 0 && row < size) continue;
    throw ArgumentError(
        str("Sample ", row, " was asked for, but the dataset has ", size, " samples."));
  }
}

}  // namespace

at::Tensor BatchTensors::rows(const at::Tensor& tensor, const IndexBatch& rows,
                              const LoadContext& context) {
  check_rows(tensor, rows);
  const auto count = static_cast<std::int64_t>(rows.size());
  if (!is_plain(tensor)) {
    const auto index = at::from_blob(const_cast<std::int64_t*>(rows.data()), {count}, at::kLong);
    return pin(at::index_select(tensor, 0, index.to(tensor.device())), context);
  }
  auto sizes = tensor.sizes().vec();
  sizes[0] = count;
  auto result = empty_like_rows(tensor, sizes, context);
  if (result.numel() == 0) return result;
  const auto row_bytes = static_cast<std::int64_t>(result.nbytes()) / count;
  auto* out = static_cast<std::byte*>(result.mutable_data_ptr());
  const auto* in = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (context.parallel && row_bytes * count >= kParallelBytes) {
    const auto grain = std::max<std::int64_t>(1, kBytesPerThread / row_bytes);
    at::parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
      copy_rows(out, in, rows.data(), begin, end, row_bytes);
    });
  } else {
    copy_rows(out, in, rows.data(), 0, count, row_bytes);
  }
  return result;
}

at::Tensor BatchTensors::row(const at::Tensor& tensor, std::int64_t row,
                             const LoadContext& context) {
  check_rows(tensor, {row});
  return pin(tensor.select(0, row).clone(at::MemoryFormat::Contiguous), context);
}

void RowsInPlace::move_in(std::size_t leaf, std::size_t row, at::Tensor& tensor) {
  if (row == 0) {
    auto sizes = tensor.sizes().vec();
    sizes.insert(sizes.begin(), static_cast<std::int64_t>(rows_));
    tensors_.push_back(is_plain(tensor) && tensor.numel() > 0
                           ? empty_like_rows(tensor, sizes, *context_)
                           : at::Tensor());
  }
  if (leaf >= tensors_.size() || !tensors_[leaf].defined()) return;
  const at::Tensor& whole = tensors_[leaf];
  if (tensor.sizes() != whole.sizes().slice(1) || tensor.scalar_type() != whole.scalar_type() ||
      !is_plain(tensor)) {
    return;
  }
  auto* const out = static_cast<std::byte*>(whole.mutable_data_ptr());
  std::memcpy(out + row * tensor.nbytes(), tensor.const_data_ptr(), tensor.nbytes());
  tensor = whole;
}

at::Tensor RowsInPlace::whole(const std::vector<at::Tensor*>& samples) const {
  const auto is_whole = [&](const at::Tensor& tensor) {
    return tensor.defined() && std::ranges::any_of(tensors_, [&](const at::Tensor& whole) {
             return whole.is_same(tensor);
           });
  };
  const at::Tensor first = *samples.front();
  if (is_whole(first) && samples.size() == rows_ &&
      std::ranges::all_of(samples, [&](const auto* sample) { return sample->is_same(first); })) {
    return first;
  }
  for (std::size_t row = 0; row < samples.size(); ++row) {
    if (is_whole(*samples[row])) *samples[row] = samples[row]->select(0, std::int64_t(row));
  }
  return {};
}

at::Tensor BatchTensors::stack(const std::vector<at::Tensor*>& samples, const TreePath& path,
                               const LoadContext& context) {
  if (context.in_place != nullptr) {
    if (auto whole = context.in_place->whole(samples); whole.defined()) return whole;
  }
  const at::Tensor& first = *samples.front();
  bool plain = first.defined();
  for (const auto* sample : samples) {
    if (!sample->defined()) {
      throw ArgumentError(detail::str("The samples of a batch cannot be stacked: the tensor",
                                      path.str().empty() ? "" : " at ", path.str(),
                                      " is not defined in some of them."));
    }
    if (sample->sizes() != first.sizes()) {
      throw ArgumentError(detail::str(
          "The samples of a batch cannot be stacked: the tensors", path.str().empty() ? "" : " at ",
          path.str(), " have shapes ", first.sizes(), " and ", sample->sizes(),
          ". Pad them in the dataset, or pass a collate function that does."));
    }
    plain = plain && is_plain(*sample) && sample->scalar_type() == first.scalar_type();
  }
  if (!plain) {
    std::vector<at::Tensor> tensors;
    for (const auto* sample : samples) tensors.push_back(*sample);
    return pin(at::stack(tensors), context);
  }
  auto sizes = first.sizes().vec();
  sizes.insert(sizes.begin(), static_cast<std::int64_t>(samples.size()));
  auto result = empty_like_rows(first, sizes, context);
  auto* out = static_cast<std::byte*>(result.mutable_data_ptr());
  for (const auto* sample : samples) {
    if (sample->nbytes() == 0) break;
    std::memcpy(out, sample->const_data_ptr(), sample->nbytes());
    out += sample->nbytes();
  }
  return result;
}

at::Tensor BatchTensors::empty_column(std::size_t size, at::ScalarType type,
                                      const LoadContext& context) {
  return at::empty({static_cast<std::int64_t>(size)},
                   at::TensorOptions().dtype(type).device(at::kCPU).pinned_memory(context.pinned));
}

at::Tensor BatchTensors::pin(const at::Tensor& tensor, const LoadContext& context) {
  const bool can_be = context.pinned && tensor.defined() && tensor.device().is_cpu() &&
                      tensor.layout() == at::kStrided;
  return can_be && !tensor.is_pinned() ? tensor.pin_memory() : tensor;
}

void CommonLength::add(const TreePath& path, const at::Tensor& tensor) {
  if (tensor.dim() == 0) {
    throw ArgumentError(str("A dataset of tensors needs rows, but the tensor",
                            path.str().empty() ? "" : " at ", path.str(), " has no dimension."));
  }
  if (length_ < 0) {
    length_ = tensor.size(0);
    first_path_ = path.str();
  } else if (tensor.size(0) != length_) {
    throw ArgumentError(str("The tensors of a dataset must have equally many rows, but ",
                            first_path_, " has ", length_, " and ", path.str(), " has ",
                            tensor.size(0), "."));
  }
}

std::int64_t CommonLength::get() const {
  if (length_ < 0) throw ArgumentError("There is no tensor in this dataset.");
  return length_;
}

}  // namespace accelerate::detail::data
