#include "formats/file_hash.h"

#include <algorithm>
#include <span>
#include <vector>

#include "core/python_text.h"
#include "core/xxh3.h"

namespace accelerate::detail::formats {

std::uint64_t xxh3_of(const MappedFile& file, std::int64_t offset, std::int64_t size,
                      const HashProgress& progress) {
  constexpr std::int64_t kChunk = 256 << 10;  // stays in the cache of a core
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(kChunk, size)));
  Xxh3 hash;
  for (std::int64_t at = 0; at < size; at += kChunk) {
    const auto length = std::min(kChunk, size - at);
    const auto part = std::span(buffer).first(static_cast<std::size_t>(length));
    file.read(offset + at, part);
    hash.update(part);
    if (progress) progress(at + length);
  }
  return hash.digest();
}

std::string xxh3_text(std::uint64_t sum) {
  std::string text;
  append_hex(text, static_cast<std::uint32_t>(sum >> 32), 8);
  append_hex(text, static_cast<std::uint32_t>(sum), 8);
  return text;
}

}  // namespace accelerate::detail::formats
