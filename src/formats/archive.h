// src/formats/archive.h - files of torch.save: a pickle and its storages in a zip archive.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/value.h"
#include "formats/byte_source.h"
#include "formats/pickle_value.h"
#include "formats/zip.h"

namespace accelerate::detail::formats {

/// A torch archive that was opened for reading.
class ArchiveReader {
 public:
  /// Reads the pickle, with the tensors as `PickleTensor`, of a zip archive or of a file as it was
  /// before Torch 1.6. `source` must outlive this object. Throws `FormatError` for files that are
  /// no torch archive, naming what they are if it is known, and for those that break the rules of
  /// the format.
  explicit ArchiveReader(const ByteSource& source);

  [[nodiscard]] const Value& value() const { return value_; }
  /// Where the bytes of a storage are in the source. Throws `FormatError` if there is no such entry
  /// or if its size is another one than that of the storage.
  [[nodiscard]] const ZipEntry& entry(const PickleStorage& storage) const;
  /// All entries.
  [[nodiscard]] const ZipDirectory& directory() const { return directory_; }

 private:
  void read_archive();
  [[nodiscard]] const ZipEntry* find(std::string_view name) const;

  const ByteSource& source_;
  ZipDirectory directory_;
  std::string folder_;  // that all entries are in, with a slash; "" in files before version 1.6
  Value value_;
};

/// Writes a torch archive in one pass: the pickle, then storage after storage.
class ArchiveWriter {
 public:
  /// `name` is the folder of all entries; `archive_name` makes it.
  ArchiveWriter(ZipWriter::Write write, std::string name, std::string_view pickle);

  /// The storages in order: a call with the key and the size, then `append` until it is complete.
  void begin_storage(std::string_view key, std::uint64_t bytes);
  void append(std::string_view bytes) { zip_.append(bytes); }
  void end_storage() { zip_.end(); }

  void finish();

 private:
  ZipWriter zip_;
  std::string folder_;
};

/// A tensor without gaps that has the storage `key` for itself, for the pickle of an archive.
[[nodiscard]] Value described_tensor(const TorchDtype& dtype,
                                     const std::vector<std::int64_t>& sizes, std::string key);

/// The folder inside an archive, as torch.save names it: the file's name up to its last dot, or
/// "archive" if that is not plain ASCII.
[[nodiscard]] std::string archive_name(const std::filesystem::path& path);

}  // namespace accelerate::detail::formats
