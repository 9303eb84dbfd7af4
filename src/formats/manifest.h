// src/formats/manifest.h - accelerate_state.json: the files of a checkpoint, their sizes and sums.
//
// It is written last, so that a folder that has it is complete. A folder without it was written by
// Python Accelerate, or its writer was interrupted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/file_hash.h"

namespace accelerate::detail::formats {

inline constexpr std::string_view kManifestName = "accelerate_state.json";
/// A manifest has some hundred bytes per file; larger ones are refused.
inline constexpr std::size_t kMaxManifestBytes = std::size_t{32} << 20;

struct ManifestFile {
  /// Relative to the folder, with '/', normalised.
  std::string name = {};
  std::int64_t size = 0;
  /// XXH3-64 of the whole file; 16 hexadecimal digits in the JSON.
  std::uint64_t xxh3 = 0;

  bool operator==(const ManifestFile&) const = default;
};

struct Manifest {
  /// Of the library that wrote it.
  std::string accelerate_version = {};
  std::string torch_version = {};
  /// Seconds since 1970.
  double saved_at = 0;
  std::int64_t num_processes = 1;
  /// The number of the checkpoint with automatic naming, else how many saves came before it.
  std::int64_t iteration = 0;
  /// Batches that `accumulate` had counted on the main process.
  std::int64_t step = 0;
  /// Sorted by name.
  std::vector<ManifestFile> files = {};

  bool operator==(const Manifest&) const = default;
};

/// JSON, indented, that begins with "format": "accelerate-checkpoint" and "format_version": 1.
[[nodiscard]] std::string write_manifest(const Manifest& manifest);

/// Reads a manifest; `path` names it in messages. Unknown keys are ignored, because a later version
/// may add some. Throws `FormatError` with the path and the problem: not JSON, a key twice, another
/// format or a newer version of it, a field that is missing, of another kind or out of range, a
/// file name that leads out of the folder (see `problem_with_inner_path`) or is there twice, sizes
/// whose sum does not fit into 64 bits.
[[nodiscard]] Manifest parse_manifest(std::string_view json, const std::filesystem::path& path);

/// The manifest in a folder; nullopt if there is none. Throws `FormatError` as `parse_manifest`,
/// also if it has more than `kMaxManifestBytes`, and `CheckpointError` if it cannot be read.
[[nodiscard]] std::optional<Manifest> read_manifest(const std::filesystem::path& folder);

/// Size and sum of a file as it is on the disk. Throws `CheckpointError` if it cannot be read.
[[nodiscard]] ManifestFile sum_of_file(const std::filesystem::path& folder, const std::string& name,
                                       const HashProgress& progress = {});

enum class VerifyDepth { kSizes, kSums };

/// The differences between a folder and its manifest, one line each that names the file: it is
/// missing or cannot be read, its size differs, its sum differs. Empty if there are none. Files
/// that the manifest does not name are not looked at.
///
/// Several files are hashed at once. `progress` counts the bytes of all of them; it is called by
/// one thread at a time, but not always by the same one, and must not throw.
[[nodiscard]] std::vector<std::string> verify_manifest(const std::filesystem::path& folder,
                                                       const Manifest& manifest, VerifyDepth depth,
                                                       const HashProgress& progress = {});

struct NumberedCheckpoint {
  std::int64_t number = 0;
  std::filesystem::path path = {};
};

/// The folders inside `folder` that are named exactly checkpoint_<digits>, by number, ascending.
/// Empty if there is no such folder; throws `CheckpointError` if it cannot be read.
[[nodiscard]] std::vector<NumberedCheckpoint> numbered_checkpoints(
    const std::filesystem::path& folder);

}  // namespace accelerate::detail::formats
