// accelerate/checkpoint/accelerator_state.h - the state of a run in a folder.
//
// Part of accelerate/checkpoint.h. `Accelerator::save_state` and `load_state` are made of these
// functions; programs without an accelerator may call them with objects of their own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/state/stateful.h"
#include "accelerate/state_dict.h"

namespace accelerate {

/// Where the tensors of a file are put: "cpu" or "on_device", which is the device of the process.
enum class MapLocation : std::uint8_t { kCpu, kOnDevice };
namespace detail::inline core {
template <>
inline constexpr EnumTable kEnumTable<MapLocation>{"MapLocation", {"cpu", "on_device"}};
}  // namespace detail::inline core

struct SaveStateOptions {
  /// Weights as safetensors files instead of torch archives.
  bool safe_serialization = true;
  /// Ours. Return when the state is copied; threads write it while training goes on. An error is
  /// thrown by the next `save_state`, `load_state` or `wait_for_save_state`.
  bool asynchronous = false;
  /// Ours. Show a progress bar. Unset: if ACCELERATE_PROGRESS is 1.
  std::optional<bool> progress = std::nullopt;
};

struct LoadStateOptions {
  /// Where the tensors of files are put before they are copied into place. Unset: straight into
  /// place where that is possible, else on the device of the process.
  std::optional<MapLocation> map_location = std::nullopt;
  /// Whether models must find all of their tensors in the files, and no others.
  bool strict = true;
  /// Ours. Compare sizes and checksums of all files before anything is loaded. Off, only sizes are.
  bool verify = true;
  /// Ours. Throw for a random state that cannot be restored, instead of a warning.
  bool strict_rng = false;
  /// Ours. Show progress bars. Unset: if ACCELERATE_PROGRESS is 1.
  std::optional<bool> progress = std::nullopt;
};

struct SaveAcceleratorStateOptions {
  int process_index = 0;
  bool save_on_each_node = false;
  bool safe_serialization = true;
};
/// Writes the files of this process: weights as "model.safetensors", "model_1.safetensors", ...,
/// and of each entry, models left out, the file of its name. The main process writes what is common
/// to all, each one its random states. Each file appears complete or not at all. Returns the
/// folder.
///
/// Throws as `save`. `Accelerator::save_state` does this for all processes at once, or for none.
ACCELERATE_API std::filesystem::path save_accelerator_state(
    const std::filesystem::path& output_dir, std::span<const StateDict> model_states,
    std::span<const StateEntry> entries, const SaveAcceleratorStateOptions& options = {});

struct LoadAcceleratorStateOptions {
  int process_index = 0;
  /// As in `LoadStateOptions`.
  std::optional<MapLocation> map_location = std::nullopt;
  bool strict_rng = false;
  std::optional<bool> progress = std::nullopt;
};
/// Loads the file of each entry into its object, in the order of the entries. Random states are
/// restored part by part: one that does not fit is a warning.
///
/// Throws `CheckpointError` if a file is missing, and what the objects throw.
ACCELERATE_API void load_accelerator_state(const std::filesystem::path& input_dir,
                                           std::span<const StateEntry> entries,
                                           const LoadAcceleratorStateOptions& options = {});

/// Writes "custom_checkpoint_{index}.pkl", by the rules of `save`.
ACCELERATE_API void save_custom_state(Stateful& object, const std::filesystem::path& path,
                                      std::int64_t index = 0, bool save_on_each_node = false);
ACCELERATE_API void load_custom_state(Stateful& object, const std::filesystem::path& path,
                                      std::int64_t index = 0);
template <HasStateDict T>
void save_custom_state(T& object, const std::filesystem::path& path, std::int64_t index = 0,
                       bool save_on_each_node = false) {
  save_custom_state(*detail::state::make_stateful(object), path, index, save_on_each_node);
}
template <HasStateDict T>
void load_custom_state(T& object, const std::filesystem::path& path, std::int64_t index = 0) {
  load_custom_state(*detail::state::make_stateful(object), path, index);
}

}  // namespace accelerate
