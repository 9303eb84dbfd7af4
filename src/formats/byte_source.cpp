#include "formats/byte_source.h"

#include <cstring>

#include "formats/format_error.h"

namespace accelerate::detail::formats {
namespace {

/// Checkpoints of many processes have as many files.
constexpr std::size_t kMaxOpenFiles = 64;

}  // namespace

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

const FileBytes& OpenFiles::open(const std::filesystem::path& path) {
  if (files_.size() == kMaxOpenFiles && !files_.contains(path)) files_.clear();
  auto& file = files_[path];
  if (file == nullptr) file = std::make_unique<FileBytes>(path);
  return *file;
}

}  // namespace accelerate::detail::formats
