// accelerate/checkpoint.h - save models and data, and load them again, in files that Python opens.
//
//     accelerator.save_model(model, "out", {.max_shard_size = "2GB"});
//     auto report = load_checkpoint_in_model(*net, "out");
//     if (!report.missing_keys.empty()) ...
//
// Weights are safetensors files or torch archives; a model larger than `max_shard_size` becomes
// several files with an index. docs/formats.md says what each file is and what is refused.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/checkpoint/accelerator_state.h"
#include "accelerate/checkpoint/key_mapping.h"
#include "accelerate/checkpoint/merge_fsdp_weights.h"
#include "accelerate/checkpoint/offload.h"
#include "accelerate/checkpoint/shards.h"
#include "accelerate/constants.h"
#include "accelerate/modeling/device_map.h"
#include "accelerate/modeling/tensors.h"
#include "accelerate/state_dict.h"
#include "accelerate/torch_archive.h"
#include "accelerate/value.h"

namespace accelerate {

// ---- several files ------------------------------------------------------------------------------

/// Bytes, or a text such as "5GB" (see `parse_size_to_int`).
using ShardSize = std::variant<std::int64_t, std::string>;

/// "3MB" is 3000000. Units TB, GB, MB, KB of 1000, in any case. Throws `ArgumentError` with the
/// text for anything else, and for a size below one byte.
[[nodiscard]] ACCELERATE_API std::int64_t parse_size_to_int(std::string_view size);

struct SplitStateDictOptions {
  /// Of the files; `{suffix}` becomes "" or "-00001-of-00003".
  std::string filename_pattern = std::string(kSafeWeightsPatternName);
  ShardSize max_shard_size = "5GB";
};
/// Which tensors go into which file: Python's split (huggingface_hub), to the last tensor. The
/// bytes of a tensor are those of its whole storage; tensors that share one stay together.
[[nodiscard]] ACCELERATE_API StateDictSplit split_torch_state_dict_into_shards(
    const StateDict& state, const SplitStateDictOptions& options = {});
/// `split_torch_state_dict_into_shards` by its older name and arguments.
[[nodiscard]] ACCELERATE_API StateDictSplit
shard_checkpoint(const StateDict& state, const ShardSize& max_shard_size = "10GB",
                 std::string_view weights_name = kWeightsName);

/// What a safetensors file can hold of a state dict: contiguous tensors without aliases. Of several
/// names for the same elements the first is kept, with a warning that begins with "Removed shared
/// tensor"; other views of one storage are copied; tensors without elements all stay.
[[nodiscard]] ACCELERATE_API StateDict clean_state_dict_for_safetensors(const StateDict& state);

// ---- save ---------------------------------------------------------------------------------------

struct SaveOptions {
  /// The first process of every host writes, instead of the main process alone.
  bool save_on_each_node = false;
  /// A safetensors file instead of a torch archive.
  bool safe_serialization = false;
};
/// Writes on the main process; the other processes return at once, without waiting. The file
/// appears complete or not at all.
///
/// Throws `ArgumentError` for what the format cannot hold, `CheckpointError` if the file cannot be
/// written, on the process that writes.
ACCELERATE_API void save(const Value& object, const std::filesystem::path& path,
                         const SaveOptions& options = {});
/// Aliases are removed for safetensors, as `clean_state_dict_for_safetensors` does.
ACCELERATE_API void save(const StateDict& state, const std::filesystem::path& path,
                         const SaveOptions& options = {});

struct SaveModelOptions {
  ShardSize max_shard_size = "10GB";
  bool safe_serialization = true;
  /// As in `SaveOptions`; for `Accelerator::save_model` also that of its project configuration.
  bool save_on_each_node = false;
  /// Ours. Show a progress bar. Unset: if ACCELERATE_PROGRESS is 1.
  std::optional<bool> progress = std::nullopt;
};
/// Collective. Writes a model into a folder that `load_checkpoint_in_model` and Python load, and
/// returns on all processes when it is complete. Files of an earlier save of the same format that
/// would be stale are removed at the end.
///
/// Throws `ArgumentError` if `save_directory` is a file, `StateError` for tensors on the meta
/// device, `CheckpointError` if a file cannot be written. If a process cannot write, the others
/// throw `CommError` with its message.
ACCELERATE_API void save_model(const StateDict& state, const std::filesystem::path& save_directory,
                               const SaveModelOptions& options = {},
                               std::source_location where = std::source_location::current());

// ---- load ---------------------------------------------------------------------------------------

/// Python's `load`: what torch.save wrote, as data.
[[nodiscard]] inline Value load(const std::filesystem::path& path,
                                const TorchLoadOptions& options = {}) {
  return torch_load(path, options);
}

/// The tensors of one file (*.safetensors, torch archive) or of one folder of FSDP's shards, on the
/// devices of the map; names that it does not have, and those on "disk", are on the CPU.
///
/// Throws `FormatError` for a broken file, one that was written for another framework, and one that
/// does not hold a state dict.
[[nodiscard]] ACCELERATE_API StateDict load_state_dict(const std::filesystem::path& checkpoint_file,
                                                       const DeviceMap& device_map = {});

struct LoadCheckpointOptions {
  /// Where parameters and buffers are put, and all of them must be in it. Empty: where they are;
  /// those on the meta device go to the CPU.
  DeviceMap device_map = {};
  /// For parameters on "disk": they are written there, as `offload_weight` does it, and become meta
  /// tensors. Buffers on "disk" stay resident, on the first other device of the map.
  std::optional<std::filesystem::path> offload_folder = std::nullopt;
  /// What floating point parameters become. Unset: files are converted to what the model has.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Keep what the map puts on the CPU in files that are mapped, so that the system can drop it
  /// from memory; they are removed with the last tensor.
  bool offload_state_dict = false;
  /// Write buffers on "disk" to the offload folder, too.
  bool offload_buffers = false;
  /// Modules that stay in float32.
  std::vector<std::string> keep_in_fp32_modules = {};
  /// Throw `StateDictMismatch` for names that are missing or unexpected.
  bool strict = false;
  /// Collective. Rank 0 reads the files and sends the tensors to the others, which need not see
  /// them. For loading without a device map.
  bool broadcast_from_rank0 = false;
  /// Ours: from the names of the file to those of the model.
  KeyMapping key_mapping = {};
  /// Ours, a word of transformers: leave tensors of another shape out instead of throwing.
  bool ignore_mismatched_sizes = false;
  /// Ours. Show a progress bar. Unset: if ACCELERATE_PROGRESS is 1.
  std::optional<bool> progress = std::nullopt;
};

struct MismatchedKey {
  std::string name;
  std::vector<std::int64_t> checkpoint_shape;
  std::vector<std::int64_t> model_shape;
  bool operator==(const MismatchedKey&) const = default;
};

/// What did not fit. Names are those of the model.
struct LoadCheckpointReport {
  std::vector<std::string> missing_keys = {};
  std::vector<std::string> unexpected_keys = {};
  /// Left out, because `ignore_mismatched_sizes` was set.
  std::vector<MismatchedKey> mismatched_keys = {};
  /// Empty without a key mapping.
  KeyMappingReport key_mapping = {};
};

/// Copies weights into a model from a file, an index (*.json), or a folder with pytorch_model.bin,
/// else model.safetensors, else one *.index.json, else .metadata and *.distcp (FSDP's shards).
///
/// Names and shapes of all files are compared before the first tensor is copied: where it throws,
/// the model has not changed, unless a file gets unreadable meanwhile. A tensor that the model has
/// under several names may have any of them in the file. Unexpected names are a warning.
///
/// Throws `ArgumentError` if there is no checkpoint, the device map leaves a tensor out or has
/// "disk" without an `offload_folder`; `StateDictMismatch` for tensors of another shape and what
/// `strict` asks for; `FormatError` and `CheckpointError` for files that are wrong.
ACCELERATE_API LoadCheckpointReport
load_checkpoint_in_model(torch::nn::Module& model, const std::filesystem::path& checkpoint,
                         const LoadCheckpointOptions& options = {},
                         std::source_location where = std::source_location::current());

}  // namespace accelerate
