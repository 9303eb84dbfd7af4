// accelerate/checkpoint/merge_fsdp_weights.h - sharded weights of FSDP as one file.
//
// Included by accelerate/checkpoint.h; include that. `accelerate merge-weights` does the same on
// the command line.
#pragma once

#include <filesystem>
#include <source_location>

#include "accelerate/api.h"

namespace accelerate {

/// Collective. Merges the folder of a sharded checkpoint (SHARDED_STATE_DICT, the one with the file
/// .metadata) into `output_path`/model.safetensors, or pytorch_model.bin if `safe_serialization` is
/// false. Ours: also the folder of a checkpoint of DeepSpeed, of which the float32 weights are
/// merged. The main process works, tensor by tensor; the others wait for it. Creates `output_path`,
/// and deletes `checkpoint_dir` after success if `remove_checkpoint_dir`. Returns the path of the
/// file.
///
/// Throws `CheckpointError` if there is no checkpoint in the folder, `FormatError` if it is
/// damaged, `ArgumentError` if safetensors cannot hold its values, as those of an optimizer.
ACCELERATE_API std::filesystem::path merge_fsdp_weights(
    const std::filesystem::path& checkpoint_dir, const std::filesystem::path& output_path,
    bool safe_serialization = true, bool remove_checkpoint_dir = false,
    std::source_location where = std::source_location::current());

}  // namespace accelerate
