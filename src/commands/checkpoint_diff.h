// src/commands/checkpoint_diff.h - what differs between two checkpoints, tensor by tensor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "formats/file_hash.h"

namespace accelerate::detail::commands {

struct Difference {
  enum class Kind { kRemoved, kAdded, kChanged, kElements, kBytes };

  Kind kind = Kind::kChanged;
  /// Relative to the folders; "" if two files are compared.
  std::string file = {};
  /// Of the tensor or value; "" for the file itself.
  std::string name = {};
  /// Type and shape of a tensor, or a value. kBytes: why the content cannot be compared, in
  /// `after`.
  std::string before = {};
  std::string after = {};
  /// kElements: how many there are and how many of them differ. kBytes: the first that differs.
  std::int64_t elements = 0;
  std::int64_t differing = 0;
  /// The largest absolute difference; nullopt for types that are no numbers.
  std::optional<double> largest = std::nullopt;
};

struct CheckpointDiff {
  std::vector<Difference> differences = {};
  /// That were compared.
  std::int64_t files = 0;
};

/// Compares two folders (all files in them but the manifests) or two files. Tensors and values of
/// safetensors files and torch archives are matched by name, and files of other kinds are compared
/// byte by byte; files with the same content in another order do not differ. A megabyte of each
/// file is in memory at a time. `progress` gets the bytes that were compared so far.
///
/// Throws `ConfigError` if one is a folder and the other a file, and `CheckpointError` for files
/// that cannot be read. A file that breaks the rules of its format is compared byte by byte.
[[nodiscard]] CheckpointDiff diff_checkpoints(const std::filesystem::path& a,
                                              const std::filesystem::path& b,
                                              const formats::HashProgress& progress);

}  // namespace accelerate::detail::commands
