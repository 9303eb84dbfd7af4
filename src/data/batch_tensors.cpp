#include "accelerate/batch_tensors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

// Rows are random: what the processor cannot foresee is asked for this many rows ahead, as far as
// that may be useful before its own prefetcher has caught on.
constexpr std::int64_t kRowsAhead = 12;
constexpr std::int64_t kCacheLine = 64;
constexpr std::int64_t kMostLinesAhead = 8;
// Below this, threads cost more than they copy.
constexpr std::int64_t kParallelBytes = 1 << 20;
constexpr std::int64_t kBytesPerThread = 1 << 18;
// Below this the C library keeps the memory at hand by itself.
constexpr std::size_t kReusedBytes = 1 << 20;
constexpr std::size_t kAlignment = 64;

/// Whether its bytes are its elements, one after the other.
bool is_plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized() && !tensor.is_nested();
}

at::Tensor empty_like_rows(const at::Tensor& like, at::IntArrayRef sizes,
                           const LoadContext& context) {
  const auto bytes = like.element_size() * static_cast<std::size_t>(c10::multiply_integers(sizes));
  if (context.memory && !context.pinned && bytes >= kReusedBytes) {
    return context.memory->empty(sizes, like.options(), bytes);
  }
  return at::empty(sizes, like.options().pinned_memory(context.pinned));
}

/// Copies rows `begin` to `end` of the list. Neighbours are copied together.
void copy_rows(std::byte* out, const std::byte* in, const std::int64_t* rows, std::int64_t begin,
               std::int64_t end, std::int64_t row_bytes) {
  const std::int64_t ahead_bytes = std::min(row_bytes, kMostLinesAhead * kCacheLine);
  for (std::int64_t i = begin; i < end;) {
    std::int64_t next = i + 1;
    while (next < end && rows[next] == rows[next - 1] + 1) ++next;
    if (i + kRowsAhead < end) {
      const std::byte* ahead = in + rows[i + kRowsAhead] * row_bytes;
      for (std::int64_t at = 0; at < ahead_bytes; at += kCacheLine) __builtin_prefetch(ahead + at);
    }
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

BatchMemory::~BatchMemory() {
  for (const auto& block : free_) std::free(block.data);
}

BatchMemory::Block BatchMemory::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->bytes >= bytes && (best == free_.end() || at->bytes < best->bytes)) best = at;
  }
  Block block{nullptr, (bytes + kAlignment - 1) / kAlignment * kAlignment};
  if (best != free_.end()) {
    block = *best;
    free_.erase(best);
    free_bytes_ -= block.bytes;
  } else {
    block.data = std::aligned_alloc(kAlignment, block.bytes);
    if (block.data == nullptr) throw std::bad_alloc();
  }
  used_bytes_ += block.bytes;
  most_used_ = std::max(most_used_, used_bytes_);
  return block;
}

void BatchMemory::give_back(Block block) {
  std::vector<Block> dropped;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
    free_bytes_ += block.bytes;
    used_bytes_ -= block.bytes;
    // The oldest goes: it has found no use for the longest time.
    while (free_bytes_ + used_bytes_ > most_used_) {
      dropped.push_back(free_.front());
      free_bytes_ -= free_.front().bytes;
      free_.erase(free_.begin());
    }
  }
  for (const auto& old : dropped) std::free(old.data);
}

at::Tensor BatchMemory::empty(at::IntArrayRef sizes, const at::TensorOptions& options,
                              std::size_t bytes) {
  const Block block = take(bytes);
  const auto give_back = [block, memory = weak_from_this()](void* data) {
    if (const auto alive = memory.lock()) {
      alive->give_back(block);
    } else {
      std::free(data);
    }
  };
  return at::from_blob(block.data, sizes, give_back, options);
}

at::Tensor gather_rows(const at::Tensor& tensor, const IndexBatch& rows,
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

at::Tensor copy_row(const at::Tensor& tensor, std::int64_t row, const LoadContext& context) {
  check_rows(tensor, {row});
  return pin(tensor.select(0, row).clone(at::MemoryFormat::Contiguous), context);
}

at::Tensor stack_samples(const std::vector<at::Tensor*>& samples, const TreePath& path,
                         const LoadContext& context) {
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

at::Tensor empty_column(std::size_t size, at::ScalarType type, const LoadContext& context) {
  return at::empty({static_cast<std::int64_t>(size)},
                   at::TensorOptions().dtype(type).device(at::kCPU).pinned_memory(context.pinned));
}

at::Tensor pin(const at::Tensor& tensor, const LoadContext& context) {
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

}  // namespace accelerate::detail
