// src/formats/mapped_file.h - a file of a checkpoint, open for reading and mapped into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/descriptor.h"
#include "formats/bus_errors.h"

namespace accelerate::detail::formats {

/// Shared by all who use its bytes. `read` is how to read a file that others may change: a file
/// that was cut meanwhile is an exception there, while touching `bytes()` beyond its new end is
/// SIGBUS (after one line that names the file): a load from memory cannot throw, and zeros in the
/// place of weights would be computed with.
class MappedFile {
 public:
  /// Throws `CheckpointError` with the path if it cannot be opened or is no regular file.
  [[nodiscard]] static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  /// As `open`, for one who needs `bytes()` alone and maps many files: keeps no descriptor, and is
  /// not to be read or checked.
  [[nodiscard]] static std::shared_ptr<const MappedFile> open_pages(
      const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// When it was opened.
  [[nodiscard]] std::int64_t size() const noexcept {
    return static_cast<std::int64_t>(bytes_.size());
  }

  /// Throws `CheckpointError` if the file has been cut since it was opened.
  void check_not_cut() const;

  /// Copies from an offset; the range must lie inside the file. Several threads may read at once.
  /// Throws `CheckpointError` if the disk fails or the file has been cut since it was opened.
  void read(std::int64_t offset, std::span<std::byte> out) const;
  [[nodiscard]] std::string read(std::int64_t offset, std::int64_t size) const;

  /// The whole file, mapped. Pages come from the page cache when they are touched. Writing changes
  /// this mapping alone, never the file.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  explicit MappedFile(const std::filesystem::path& path);

  std::filesystem::path path_;
  Descriptor fd_;
  std::span<std::byte> bytes_;
  std::optional<MappingName> name_;
};

}  // namespace accelerate::detail::formats
