// src/formats/file_hash.h - checksums of files and of parts of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "formats/mapped_file.h"

namespace accelerate::detail::formats {

/// Called now and then with the bytes that were read so far, in ascending order.
using HashProgress = std::function<void(std::int64_t bytes)>;

/// XXH3-64 of `size` bytes from `offset` on; the range must lie inside the file. A few threads
/// read a large range. Throws `CheckpointError` as `MappedFile::read`
/// does.
[[nodiscard]] std::uint64_t xxh3_of(const MappedFile& file, std::int64_t offset, std::int64_t size,
                                    const HashProgress& progress = {});

/// As `xxhsum` prints it: 16 hexadecimal digits, lower case.
[[nodiscard]] std::string xxh3_text(std::uint64_t sum);

}  // namespace accelerate::detail::formats
