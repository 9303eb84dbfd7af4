// src/checkpoint/offload.h - writers and checks of offload folders.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "accelerate/checkpoint/offload.h"
#include "core/descriptor.h"
#include "core/folders.h"

namespace accelerate::detail::checkpoint {

/// Tensors on their way into an offload folder. The folder is created, and locked against other
/// writers until the object is gone.
///
/// Files that an index has are replaced one by one. From the first one on until `finish` the index
/// has none of the tensors that will be replaced, so that a full disk or a killed process does not
/// leave the weights of two models under one index.
class OffloadWriter {
 public:
  /// `names` are what will be added, as far as they are known. Throws `CheckpointError` if others
  /// write the folder, or use its weights.
  explicit OffloadWriter(const std::filesystem::path& folder,
                         const std::vector<std::string>& names = {});
  /// For a folder that exists, with an exclusive lock on it.
  OffloadWriter(const std::filesystem::path& folder, const std::vector<std::string>& names,
                Descriptor lock);

  void add(const at::Tensor& weight, const std::string& name);
  [[nodiscard]] const OffloadIndex& index() const noexcept { return index_; }
  /// Adds the tensors to the index.json of the folder.
  void finish();
  /// The lock, which the caller has from now on.
  [[nodiscard]] Descriptor release_lock() { return std::move(lock_); }

 private:
  void withdraw(const std::string& name);

  std::filesystem::path folder_;
  std::unordered_set<std::string> names_;
  Descriptor lock_;
  OffloadIndex index_;
  std::optional<OffloadIndex> published_;  // what is in the folder; read when it is needed
};

/// Throws `CheckpointError` that names the first tensor of `state` that the folder does not hold:
/// not in the index, of another shape or dtype, or with a file that is missing or of another
/// length.
ACCELERATE_API void check_offloaded(const StateDict& state, const OffloadIndex& index,
                                    const std::filesystem::path& folder);
/// Names of the tensors of `state` of which the folder has other bytes. All are in the index.
[[nodiscard]] ACCELERATE_API std::vector<std::string> differing(
    const StateDict& state, const OffloadIndex& index, const std::filesystem::path& folder);

/// Creates the folder, and locks it for weights that are used where they are: against writers, with
/// an exclusive lock against all others. `lacking` is called with the lock held, perhaps several
/// times, and returns tensors that are written before. Throws `CheckpointError` if others use the
/// folder.
[[nodiscard]] ACCELERATE_API Descriptor hold_folder(const std::filesystem::path& folder,
                                                    LockKind kind,
                                                    const std::function<StateDict()>& lacking);

}  // namespace accelerate::detail::checkpoint
