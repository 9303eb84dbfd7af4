#include "core/files.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(std::string_view what, const fs::path& path, int error) {
  throw ConfigError(
      str(what, " '", path.string(), "': ", std::generic_category().message(error), "."));
}

// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  [[nodiscard]] int get() const { return fd_; }
  /// The errno of close(), which may be the first to tell of a full disk.
  [[nodiscard]] int close() { return ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno; }

 private:
  int fd_;
};

// A file that is removed unless it was renamed into place.
class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& beside) {
    std::random_device random;
    for (int attempt = 0; attempt < 100; ++attempt) {
      path_ = beside;
      path_ += str(".", ::getpid(), ".", random(), ".tmp");
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ >= 0) return;
      if (errno != EEXIST) break;
    }
    refuse("Cannot write", beside, errno);
  }
  ~TemporaryFile() {
    if (!renamed_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  [[nodiscard]] int fd() const { return fd_; }

  void rename_to(const fs::path& path) {
    if (::rename(path_.c_str(), path.c_str()) != 0) refuse("Cannot write", path, errno);
    renamed_ = true;
  }

 private:
  fs::path path_;
  int fd_ = -1;
  bool renamed_ = false;
};

void write_all(int fd, std::string_view content, const fs::path& path) {
  while (!content.empty()) {
    const auto written = ::write(fd, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse("Cannot write", path, errno);
    content.remove_prefix(static_cast<std::size_t>(written));
  }
}

// So that the new name survives a crash too. Some file systems cannot: then it is not an error.
void sync_folder(const fs::path& folder) {
  const Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() >= 0) ::fsync(fd.get());
}

}  // namespace

std::string read_whole_file(const fs::path& path, std::size_t max_bytes) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) refuse("Cannot read", path, errno);
  std::string content;
  std::array<char, 65536> buffer{};
  for (;;) {
    const auto count = ::read(fd.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse("Cannot read", path, errno);
    if (count == 0) return content;
    content.append(buffer.data(), static_cast<std::size_t>(count));
    if (content.size() > max_bytes) {
      throw ConfigError(
          str("Cannot read '", path.string(), "': it is larger than ", max_bytes, " bytes."));
    }
  }
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  std::error_code error;
  fs::path target = path;
  if (fs::is_symlink(path, error)) target = fs::weakly_canonical(path, error);
  if (error && error != std::errc::no_such_file_or_directory) {
    refuse("Cannot write", path, error.value());
  }

  TemporaryFile temporary(target);
  Descriptor fd(temporary.fd());
  struct stat old{};
  if (::stat(target.c_str(), &old) == 0) ::fchmod(fd.get(), old.st_mode & 07777);
  write_all(fd.get(), content, target);
  if (::fsync(fd.get()) != 0) refuse("Cannot write", target, errno);
  if (const int failed = fd.close(); failed != 0) refuse("Cannot write", target, failed);
  temporary.rename_to(target);
  sync_folder(target.has_parent_path() ? target.parent_path() : fs::path("."));
}

fs::path expand_user(const std::string& path, const Environment& environment) {
  if (path != "~" && !path.starts_with("~/")) return path;
  std::string home = environment.get("HOME").value_or("");
  if (home.empty()) {
    const passwd* entry =
        ::getpwuid(::getuid());  // NOLINT(concurrency-mt-unsafe): nothing edits it
    if (entry == nullptr || entry->pw_dir == nullptr) return path;
    home = entry->pw_dir;
  }
  return home + path.substr(1);
}

}  // namespace accelerate::detail::inline core
