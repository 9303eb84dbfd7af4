#include "core/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/xxh3.h"

namespace accelerate::detail::inline core {
namespace {

namespace fs = std::filesystem;

constexpr ssize_t kLargePart = 1 << 20;

// So that the new name survives a crash too. Some file systems cannot: then it is not an error.
void sync_folder(const fs::path& folder) {
  const Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd) ::fsync(fd.get());
}

// Where a symbolic link leads, also if nothing is there yet.
fs::path end_of_links(fs::path path, std::error_code& error) {
  for (int links = 0; fs::is_symlink(path, error); ++links) {
    if (links == 40) {
      error = std::make_error_code(std::errc::too_many_symbolic_link_levels);
      break;
    }
    path = path.parent_path() / fs::read_symlink(path, error);
    if (error) break;
  }
  return path;
}

}  // namespace

OutputFile::OutputFile(fs::path path) : path_(std::move(path)), target_(path_) {
  std::error_code error;
  if (fs::is_symlink(path_, error)) target_ = end_of_links(path_, error);
  if (error && error != std::errc::no_such_file_or_directory) refuse(error.value());
  struct stat old{};
  const bool exists = ::stat(target_.c_str(), &old) == 0;
  if (exists && S_ISDIR(old.st_mode)) refuse(EISDIR);
  if (exists && !S_ISREG(old.st_mode)) {
    // Renaming would replace a device or pipe by a file.
    throw CheckpointError(str("Cannot write '", path_.string(),
                              "': it is a device, pipe or socket. Name a regular file."),
                          path_);
  }

  std::random_device random;
  int failed = EEXIST;
  for (int attempt = 0; attempt < 100 && failed == EEXIST; ++attempt) {
    fs::path temporary = target_;
    temporary += str(".", ::getpid(), ".", random(), ".tmp");
    fd_ = Descriptor(::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    failed = fd_ ? 0 : errno;
    if (fd_) temporary_ = std::move(temporary);
  }
  if (failed != 0) refuse(failed);
  if (exists) ::fchmod(fd_.get(), old.st_mode & 07777);
}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::refuse(int error) const {
  throw CheckpointError(
      str("Cannot write '", path_.string(), "': ", std::generic_category().message(error), "."),
      path_);
}

void OutputFile::write(std::string_view bytes) {
  write_at(position_, std::as_bytes(std::span(bytes)));
  position_ += static_cast<std::int64_t>(bytes.size());
}

void OutputFile::write_at(std::int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto written = ::pwrite(fd_.get(), bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse(errno);
    // The disk begins with large parts while the next ones are copied, not when all wait for it.
    if (written >= kLargePart) {
      static_cast<void>(::sync_file_range(fd_.get(), offset, written, SYNC_FILE_RANGE_WRITE));
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += written;
  }
}

void OutputFile::reserve(std::int64_t bytes) {
  if (bytes <= 0) return;
  // KEEP_SIZE: the size of the file is what was written.
  while (::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS) return;
    refuse(errno);
  }
}

void OutputFile::finish() {
  if (::fsync(fd_.get()) != 0) refuse(errno);
  if (const int failed = fd_.reset(); failed != 0) refuse(failed);
}

OutputFile::Sum OutputFile::sum() const {
  Xxh3 hash;
  Sum result;
  std::vector<std::byte> bytes(kLargePart);
  for (;;) {
    const auto count = ::pread(fd_.get(), bytes.data(), bytes.size(), result.size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(errno);
    if (count == 0) break;
    hash.update(std::span(bytes).first(static_cast<std::size_t>(count)));
    result.size += count;
  }
  result.xxh3 = hash.digest();
  return result;
}

OutputFile::Sum OutputFile::finish_and_sum() {
  // What was just written is in memory: reading it takes no time from the disk.
  auto reading = std::async(std::launch::async, [this] { return sum(); });
  const int failed = ::fsync(fd_.get()) == 0 ? 0 : errno;
  const auto result = reading.get();
  if (failed != 0) refuse(failed);
  if (const int not_closed = fd_.reset(); not_closed != 0) refuse(not_closed);
  return result;
}

void OutputFile::publish() {
  if (fd_) finish();
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) refuse(errno);
  temporary_.clear();
  sync_folder(target_.has_parent_path() ? target_.parent_path() : fs::path("."));
}

}  // namespace accelerate::detail::inline core
