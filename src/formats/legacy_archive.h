// src/formats/legacy_archive.h - files of torch.save before version 1.6: pickles, then storages.
#pragma once

#include <vector>

#include "accelerate/value.h"
#include "formats/byte_source.h"
#include "formats/zip.h"

namespace accelerate::detail::formats {

struct LegacyArchive {
  Value value;
  /// The storages, as entries "data/<key>"; they have no checksums.
  std::vector<ZipEntry> storages;
};

/// True if `source` begins as such a file does.
[[nodiscard]] bool is_legacy_archive(const ByteSource& source);

/// Throws `FormatError` if the file breaks the rules of the format.
[[nodiscard]] LegacyArchive read_legacy_archive(const ByteSource& source);

}  // namespace accelerate::detail::formats
