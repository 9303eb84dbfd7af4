#include "formats/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <system_error>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/uninterrupted.h"

namespace accelerate::detail::formats {
namespace {

[[noreturn]] void refuse_to_map(const std::filesystem::path& path, std::string_view reason) {
  throw CheckpointError(str("Cannot read '", path.string(), "': ", reason, "."), path);
}

[[noreturn]] void refuse_to_map(const std::filesystem::path& path, int error) {
  refuse_to_map(path, std::generic_category().message(error));
}

[[noreturn]] void refuse_cut(const std::filesystem::path& path, std::int64_t before,
                             std::int64_t most) {
  refuse_to_map(path, str("it had ", before, " bytes when it was opened and was cut to ", most,
                          " or fewer meanwhile. Replace a file by renaming a new one over it"));
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  return std::shared_ptr<const MappedFile>(new MappedFile(path));
}

std::shared_ptr<const MappedFile> MappedFile::open_pages(const std::filesystem::path& path) {
  std::shared_ptr<MappedFile> file(new MappedFile(path));
  file->fd_.reset();
  return file;
}

MappedFile::MappedFile(const std::filesystem::path& path)
    // Without NONBLOCK, a pipe would make us wait for its writer.
    : path_(path),
      fd_(uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); })) {
  if (!fd_) refuse_to_map(path_, errno);
  struct stat facts{};
  if (::fstat(fd_.get(), &facts) != 0) refuse_to_map(path_, errno);
  if (S_ISDIR(facts.st_mode)) refuse_to_map(path_, EISDIR);
  if (!S_ISREG(facts.st_mode)) refuse_to_map(path_, "it is no regular file");
  const auto size = static_cast<std::size_t>(facts.st_size);
  if (size == 0) return;
  // NORESERVE: no memory is set aside for pages that are never written.
  void* address =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd_.get(), 0);
  if (address == MAP_FAILED) refuse_to_map(path_, errno);
  bytes_ = {static_cast<std::byte*>(address), size};
  name_.emplace(address, size, path_.string());
}

MappedFile::~MappedFile() {
  name_.reset();
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

void MappedFile::check_not_cut() const {
  struct stat facts{};
  if (::fstat(fd_.get(), &facts) != 0) refuse_to_map(path_, errno);
  if (facts.st_size < size()) refuse_cut(path_, size(), facts.st_size);
}

void MappedFile::read(std::int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const auto count =
        uninterrupted([&] { return ::pread(fd_.get(), out.data(), out.size(), offset); });
    if (count < 0) refuse_to_map(path_, errno);
    if (count == 0) refuse_cut(path_, size(), offset);
    out = out.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
}

std::string MappedFile::read(std::int64_t offset, std::int64_t size) const {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  read(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

}  // namespace accelerate::detail::formats
