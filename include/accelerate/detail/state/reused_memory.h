// accelerate/detail/state/reused_memory.h - large tensors of the host, in memory that is used
// again.
//
// Internal. Fresh pages of the system cost several times what it takes to write to them, and the C
// library returns large blocks to the system each time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::state {

/// Blocks go back with the last reference to their tensor, in whatever thread that is. Not more is
/// held than was once in use, and nothing that was of no use for a while.
class ACCELERATE_API ReusedMemory : public std::enable_shared_from_this<ReusedMemory> {
 public:
  ReusedMemory() = default;
  ~ReusedMemory();
  ReusedMemory(const ReusedMemory&) = delete;
  ReusedMemory& operator=(const ReusedMemory&) = delete;

  /// That of the results of collectives.
  [[nodiscard]] static ReusedMemory& of_results();

  /// Below a certain size, and on devices, an ordinary tensor.
  [[nodiscard]] at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

  /// Gives back to the system what is not in use.
  void release();

 private:
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t freed_at = 0;
  };
  struct Loan;
  [[nodiscard]] Block take(std::size_t bytes);
  void give_back(Block block);

  std::mutex mutex_;
  std::vector<Block> free_;  // the oldest first
  std::uint64_t taken_ = 0;
  std::size_t free_bytes_ = 0;
  std::size_t used_bytes_ = 0;
  std::size_t most_used_ = 0;
};

}  // namespace accelerate::detail::state
