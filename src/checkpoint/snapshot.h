// src/checkpoint/snapshot.h - a copy of the tensors to be saved, in memory that is used again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/state_files.h"

namespace accelerate::detail::checkpoint {

/// Buffers for one snapshot at a time; pinned where a device can copy into them by itself.
class SnapshotBuffers {
 public:
  /// Replaces the tensors of `files` by copies on the CPU and returns when the copies are complete.
  /// Tensors that share a storage share its copy. The copies of the call before become invalid.
  void copy(std::span<StateFile> files);

 private:
  [[nodiscard]] Value copied(const Value& value);
  [[nodiscard]] at::Tensor copied(const at::Tensor& tensor);
  /// The copy of a storage, as bytes.
  [[nodiscard]] at::Tensor copied_storage(const at::Tensor& tensor);
  void copy_host_memory();

  std::vector<at::Tensor> buffers_;
  std::size_t used_ = 0;
  std::unordered_map<const at::StorageImpl*, at::Tensor> copies_;
  std::vector<std::pair<at::Tensor, at::Tensor>> host_copies_;  // to, from; for the end
  std::unordered_set<c10::Device> devices_;                     // that copy by themselves
};

}  // namespace accelerate::detail::checkpoint
