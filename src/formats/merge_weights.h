// src/formats/merge_weights.h - the shards of a distributed checkpoint, or of DeepSpeed, as one
// file.
#pragma once

#include <filesystem>
#include <optional>

namespace accelerate::detail::formats {

struct MergeOptions {
  /// model.safetensors, else pytorch_model.bin.
  bool safe_serialization = true;
  /// Delete the folder of the checkpoint after success.
  bool remove_checkpoint_dir = false;
  /// Show a progress bar, see `ByteBar`.
  std::optional<bool> progress = std::nullopt;
};

/// Merges the checkpoint in `folder`, of torch.distributed.checkpoint or the weights of one of
/// DeepSpeed, into a file in `output`, which is created if needed, tensor by
/// tensor: memory holds one of them. If the state dict has one key at the top, as FSDP's {"model":
/// ...}, the file has what is below it. Returns the path of the file.
///
/// Throws `CheckpointError` if `folder` is no such checkpoint, `FormatError` if it is damaged, and
/// `ArgumentError` if it has values that safetensors cannot hold.
std::filesystem::path merge_weights(const std::filesystem::path& folder,
                                    const std::filesystem::path& output,
                                    const MergeOptions& options);

}  // namespace accelerate::detail::formats
