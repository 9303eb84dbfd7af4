// src/commands/checkpoint_folders.h - which checkpoints a folder has, and whether they are
// complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "formats/manifest.h"

namespace accelerate::detail::commands {

struct CheckpointFolder {
  std::filesystem::path path = {};
  /// nullopt if there is none, or it cannot be read.
  std::optional<formats::Manifest> manifest = std::nullopt;
  /// Why it is not complete; "" if it is. Files are compared by size only.
  std::string problem = {};
  /// Seconds since 1970: of the manifest, else of the newest file.
  double saved_at = 0;
  /// Of the manifest, else of the folder.
  std::int64_t files = 0;
  std::int64_t bytes = 0;

  /// "complete", "damaged: ..." or "no manifest (written by Python, or torn)".
  [[nodiscard]] std::string state() const;
};

struct CheckpointList {
  /// By number.
  std::vector<CheckpointFolder> checkpoints = {};
  /// Where saves are prepared before they get their name; empty if nothing was left there.
  std::filesystem::path staging = {};
  std::int64_t unfinished = 0;

  /// The complete one that was saved last, or null.
  [[nodiscard]] const CheckpointFolder* newest() const;
};

/// The checkpoints of a project folder (its checkpoints/), of a folder with checkpoint_N folders,
/// or a single checkpoint. Throws `ConfigError` if the folder is none of these.
[[nodiscard]] CheckpointList list_checkpoints(const std::filesystem::path& folder);

/// All regular files in a folder and below, relative to it and sorted; without the manifest.
[[nodiscard]] std::vector<std::string> files_of(const std::filesystem::path& folder);

/// Throws `ConfigError` that suggests the nearest name if nothing is at `path`.
void require_existing(const std::filesystem::path& path);

}  // namespace accelerate::detail::commands
