// src/checkpoint/offload.h - writers and checks of offload folders.
#pragma once

#include <filesystem>

#include "accelerate/checkpoint/offload.h"
#include "core/descriptor.h"

namespace accelerate::detail::checkpoint {

/// Tensors on their way into an offload folder. The folder is created, and locked against other
/// writers until the object is gone.
class OffloadWriter {
 public:
  /// Throws `CheckpointError` if another process writes the folder.
  explicit OffloadWriter(const std::filesystem::path& folder);

  void add(const at::Tensor& weight, const std::string& name) {
    offload_weight(weight, name, folder_, &index_);
  }
  [[nodiscard]] const OffloadIndex& index() const noexcept { return index_; }
  /// Adds the tensors to the index.json of the folder.
  void finish();

 private:
  std::filesystem::path folder_;
  Descriptor lock_;
  OffloadIndex index_;
};

/// Throws `CheckpointError` that names the first tensor of `state` that the folder does not hold:
/// not in the index, of another shape, or with a file that is missing or of another length. The
/// dtype may be another one.
ACCELERATE_API void check_offloaded(const StateDict& state, const OffloadIndex& index,
                                    const std::filesystem::path& folder);

}  // namespace accelerate::detail::checkpoint
