// src/core/output_file.h - a file that appears whole under its name, or not at all.
//
//     OutputFile file("model.safetensors");
//     file.reserve(header.size() + data.size());
//     file.write(header);
//     file.write_at(header.size(), data);
//     file.publish();
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "core/descriptor.h"

namespace accelerate::detail::inline core {

/// Written under a temporary name beside its target and renamed by `publish`, so that readers, a
/// full disk and a killed writer meet the old file or the new one. Unless published, it is removed
/// with its object. If the target is a symbolic link, the link stays and the file it points to is
/// replaced; permissions of an old file are kept.
///
/// All members throw `CheckpointError` with the path of the target and the reason.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Appends behind what `write` wrote before.
  void write(std::string_view bytes);
  /// Writes at an offset from the start. Several threads may write disjoint ranges at once.
  void write_at(std::int64_t offset, std::span<const std::byte> bytes);
  /// Allocates disk space for a file of `bytes` bytes, so that a full disk is reported now. Has no
  /// effect on file systems that cannot do so.
  void reserve(std::int64_t bytes);
  /// Flushes the file to disk and closes it. Nothing may be written afterwards.
  void finish();
  /// As `finish`; meanwhile reads the file back, and returns its XXH3-64 and size.
  struct Sum {
    std::uint64_t xxh3 = 0;
    std::int64_t size = 0;
  };
  [[nodiscard]] Sum finish_and_sum();
  /// Gives the file its name, finished if it is not yet, and flushes the name.
  void publish();
  /// As `publish`, without the flush, for several files in a folder: `flush_path` of it follows.
  void publish_unflushed();

  /// The path that was passed in.
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// Where the file is until it is published.
  [[nodiscard]] const std::filesystem::path& temporary() const noexcept { return temporary_; }
  /// How many bytes `write` has written, which is where its next call begins.
  [[nodiscard]] std::int64_t position() const noexcept { return position_; }

 private:
  [[noreturn]] void refuse(int error) const;
  [[nodiscard]] Sum sum() const;

  std::filesystem::path path_;
  std::filesystem::path target_;     // path_ without symbolic links
  std::filesystem::path temporary_;  // empty once it was renamed
  Descriptor fd_;
  std::int64_t position_ = 0;
};

}  // namespace accelerate::detail::inline core
