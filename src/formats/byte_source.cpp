#include "formats/byte_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::formats {
namespace {

[[noreturn]] void refuse(const std::string& name, std::string_view reason) {
  throw CheckpointError(str("'", name, "' cannot be read: ", reason, "."), name);
}

}  // namespace

std::string ByteSource::read(std::uint64_t offset, std::uint64_t size) const {
  std::string bytes(size, '\0');
  read(offset, bytes);
  return bytes;
}

FileBytes::FileBytes(const std::filesystem::path& path)
    // O_NONBLOCK: opening a pipe must not wait for a writer.
    : name_(path.string()), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) refuse(name_, std::generic_category().message(errno));
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) refuse(name_, std::generic_category().message(errno));
  if (!S_ISREG(status.st_mode)) {
    refuse(name_, S_ISDIR(status.st_mode) ? "it is a folder" : "it is not a regular file");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

void FileBytes::read(std::uint64_t offset, std::span<char> out) const {
  while (!out.empty()) {
    const auto got = ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(name_, std::generic_category().message(errno));
    if (got == 0) refuse(name_, str("it ends at byte ", offset, ", before the data it had"));
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

void MemoryBytes::read(std::uint64_t offset, std::span<char> out) const {
  if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
}

}  // namespace accelerate::detail::formats
