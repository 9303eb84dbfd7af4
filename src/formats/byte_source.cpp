#include "formats/byte_source.h"

#include <cstring>

#include "formats/format_error.h"

namespace accelerate::detail::formats {

std::string ByteSource::read(std::uint64_t offset, std::uint64_t size) const {
  std::string bytes(size, '\0');
  read(offset, bytes);
  return bytes;
}

void ByteSource::refuse(std::uint64_t offset, std::string_view reason) const {
  throw format_error(name(), origin() + offset, reason);
}

FileBytes::FileBytes(const std::filesystem::path& path)
    : file_(MappedFile::open(path)), name_(path.string()) {}

void FileBytes::read(std::uint64_t offset, std::span<char> out) const {
  file_->read(static_cast<std::int64_t>(offset), std::as_writable_bytes(out));
}

void MemoryBytes::read(std::uint64_t offset, std::span<char> out) const {
  if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
}

}  // namespace accelerate::detail::formats
