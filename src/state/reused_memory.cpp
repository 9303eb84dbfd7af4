#include "accelerate/detail/state/reused_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "core/huge_pages.h"

namespace accelerate::detail::state {
namespace {

// Below this the C library keeps the memory at hand by itself.
constexpr std::size_t kReusedBytes = 1 << 20;
constexpr std::size_t kAlignment = 64;
// A block of more than so many times what is needed waits for something larger.
constexpr std::size_t kMostWaste = 2;
// A block that so many others were preferred to is of no use any more.
constexpr std::uint64_t kPassedOver = 64;

void* allocate(std::size_t bytes) {
  const bool huge = bytes >= kHugePage;
  void* const data = std::aligned_alloc(huge ? kHugePage : kAlignment, bytes);
  if (data == nullptr) throw std::bad_alloc();
  if (huge) advise_huge_pages(data, bytes);
  return data;
}

}  // namespace

struct ReusedMemory::Loan {
  Block block;
  std::weak_ptr<ReusedMemory> owner;

  static void end(void* context) {
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
    if (const auto owner = loan->owner.lock()) {
      owner->give_back(loan->block);
    } else {
      std::free(loan->block.data);
    }
  }
};

ReusedMemory& ReusedMemory::of_results() {
  // Never destroyed: tensors may outlive everything.
  static auto& memory = *new std::shared_ptr<ReusedMemory>(std::make_shared<ReusedMemory>());
  return *memory;
}

ReusedMemory::~ReusedMemory() {
  for (const auto& block : free_) std::free(block.data);
}

at::Tensor ReusedMemory::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto bytes =
      options.dtype().itemsize() * static_cast<std::size_t>(c10::multiply_integers(sizes));
  if (!options.device().is_cpu() || options.pinned_memory() || bytes < kReusedBytes) {
    return at::empty(sizes, options);
  }
  auto loan = std::make_unique<Loan>(Loan{take(bytes), weak_from_this()});
  void* const data = loan->block.data;
  c10::DataPtr pointer(data, loan.release(), &Loan::end, at::kCPU);
  // A tensor like any other: it can be resized, and gets ordinary memory then.
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer),
                             c10::GetCPUAllocator(), /*resizable=*/true);
  auto result = at::empty({0}, options);
  result.set_(storage, 0, sizes);
  return result;
}

ReusedMemory::Block ReusedMemory::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  ++taken_;
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const bool fits = at->bytes >= bytes && at->bytes <= kMostWaste * std::max(bytes, kHugePage);
    if (fits && (best == free_.end() || at->bytes < best->bytes)) best = at;
  }
  Block block;
  if (best != free_.end()) {
    block = *best;
    free_.erase(best);
    free_bytes_ -= block.bytes;
  } else {
    const std::size_t unit = bytes >= kHugePage ? kHugePage : kAlignment;
    block.bytes = (bytes + unit - 1) / unit * unit;
    block.data = allocate(block.bytes);
  }
  used_bytes_ += block.bytes;
  most_used_ = std::max(most_used_, used_bytes_);
  return block;
}

void ReusedMemory::give_back(Block block) {
  std::vector<Block> dropped;
  {
    const std::lock_guard lock(mutex_);
    block.freed_at = taken_;
    free_.push_back(block);
    free_bytes_ += block.bytes;
    used_bytes_ -= block.bytes;
    while (free_bytes_ + used_bytes_ > most_used_ ||
           free_.front().freed_at + kPassedOver < taken_) {
      dropped.push_back(free_.front());
      free_bytes_ -= free_.front().bytes;
      free_.erase(free_.begin());
    }
  }
  for (const auto& old : dropped) std::free(old.data);
}

void ReusedMemory::release() {
  std::vector<Block> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(free_);
    free_bytes_ = 0;
    most_used_ = used_bytes_;
  }
  for (const auto& block : dropped) std::free(block.data);
}

}  // namespace accelerate::detail::state
