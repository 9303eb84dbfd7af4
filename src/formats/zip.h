// src/formats/zip.h - zip files as torch.save writes them: stored entries only.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/byte_source.h"

namespace accelerate::detail::formats {

/// One entry; its bytes are `size` bytes of the source from `offset` on.
struct ZipEntry {
  std::string name;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
  std::uint32_t crc = 0;
};

/// The entries of a zip file, in the order of its directory.
class ZipDirectory {
 public:
  ZipDirectory() = default;
  explicit ZipDirectory(std::vector<ZipEntry> entries);
  ZipDirectory(ZipDirectory&&) = default;
  ZipDirectory& operator=(ZipDirectory&&) = default;

  [[nodiscard]] const std::vector<ZipEntry>& entries() const { return entries_; }
  /// The entry of this name, or null.
  [[nodiscard]] const ZipEntry* find(std::string_view name) const;

 private:
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string_view, std::size_t> index_;  // views of entries_
};

/// True if `source` begins as a zip file does.
[[nodiscard]] bool is_zip(const ByteSource& source);

/// Reads the directory. Every entry is checked: it lies in the source, overlaps no other entry, is
/// stored without compression under a relative name that no other entry has, and its own header
/// agrees with the directory. Throws `FormatError` otherwise.
[[nodiscard]] ZipDirectory read_zip(const ByteSource& source);

/// Throws `FormatError` if the bytes of `entry` have another checksum than the directory says.
void check_crc(const ByteSource& source, const ZipEntry& entry);

/// Writes a zip file entry by entry, in one pass: each entry begins at a multiple of 64 bytes and
/// is followed by its checksum, as in the files of torch.save.
class ZipWriter {
 public:
  using Write = std::function<void(std::string_view bytes)>;

  /// `write` appends to the file.
  explicit ZipWriter(Write write) : write_(std::move(write)) {}

  void add(std::string_view name, std::string_view bytes);

  /// An entry in pieces: `begin`, then `append` until `size` bytes were passed, then `end`.
  void begin(std::string_view name, std::uint64_t size);
  void append(std::string_view bytes);
  void end();

  /// A number made of the names and checksums of the entries so far.
  [[nodiscard]] std::uint64_t fingerprint() const;

  /// Writes the directory. Nothing may be added afterwards.
  void finish();

 private:
  struct Written {
    std::string name;
    std::uint64_t header = 0;
    std::uint64_t size = 0;
    std::uint32_t crc = 0;
  };
  void put(std::string_view bytes);

  Write write_;
  std::uint64_t position_ = 0;
  std::uint64_t left_ = 0;  // of the open entry
  std::vector<Written> written_;
};

}  // namespace accelerate::detail::formats
