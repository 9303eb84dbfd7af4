#include "core/folders.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string_view>
#include <system_error>
#include <thread>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/uninterrupted.h"

namespace accelerate::detail::inline core {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// A process that was killed gives its lock back when its memory is freed.
constexpr auto kLockPatience = std::chrono::seconds(5);
constexpr auto kLockPoll = std::chrono::milliseconds(20);

[[noreturn]] void refuse(std::string_view what, const fs::path& path,
                         const std::error_code& error) {
  throw CheckpointError(str("Cannot ", what, " '", path.string(), "': ", error.message(), "."),
                        path);
}

[[noreturn]] void refuse(std::string_view what, const fs::path& path) {
  refuse(what, path, {errno, std::generic_category()});
}

/// Calls a function of std::filesystem again as long as a signal interrupts it.
void retried(const std::function<void(std::error_code&)>& call, std::error_code& error) {
  do {
    error.clear();
    call(error);
  } while (error == std::errc::interrupted);
}

fs::path parent_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

}  // namespace

void make_folders(const fs::path& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  const auto named = folder.has_filename() ? folder : folder.parent_path();  // not "a/"
  if (named.has_parent_path() && named.parent_path() != named) make_folders(named.parent_path());
  if (uninterrupted([&] { return ::mkdir(named.c_str(), 0777); }) != 0) {
    // Another process may have been faster.
    const int failed = errno;
    if (failed == EEXIST && fs::is_directory(named, error)) return;
    refuse("create the folder", named, {failed, std::generic_category()});
  }
  flush_path(parent_of(named));
}

void flush_path(const fs::path& path) {
  const Descriptor fd(uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (!fd || (uninterrupted([&] { return ::fsync(fd.get()); }) != 0 && errno != EINVAL)) {
    refuse("flush", path);
  }
}

void rename_path(const fs::path& from, const fs::path& to) {
  if (uninterrupted([&] { return ::rename(from.c_str(), to.c_str()); }) == 0) return;
  const int failed = errno;
  refuse(str("rename '", from.string(), "' to"), to, {failed, std::generic_category()});
}

void replace_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  if (!fs::exists(to, error)) return rename_path(from, to);
  const auto exchanged = uninterrupted(
      [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE); });
  if (exchanged != 0) {
    if (errno != EINVAL && errno != ENOSYS) refuse("replace the folder", to);
    remove_path(to);  // a file system that cannot exchange names
    return rename_path(from, to);
  }
  remove_path(from);
}

void remove_path(const fs::path& path) {
  std::error_code error;
  retried([&](std::error_code& code) { fs::remove_all(path, code); }, error);
  if (error) refuse("remove", path, error);
}

std::vector<fs::directory_entry> entries_in(const fs::path& folder) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  retried(
      [&](std::error_code& code) {
        entries.clear();
        for (fs::directory_iterator it(folder, code), end; !code && it != end; it.increment(code)) {
          entries.push_back(*it);
        }
      },
      error);
  if (error) refuse("read the folder", folder, error);
  std::ranges::sort(entries);
  return entries;
}

void refuse_lock(const fs::path& folder, std::string_view purpose) {
  throw CheckpointError(str("Another process or object uses '", folder.string(), "' for ", purpose,
                            ". Name another folder, or wait until it has ended."),
                        folder);
}

bool change_lock(const Descriptor& lock, LockKind kind) {
  const int wanted = kind == LockKind::kShared ? LOCK_SH : LOCK_EX;
  return uninterrupted([&] { return ::flock(lock.get(), wanted | LOCK_NB); }) == 0 ||
         errno != EWOULDBLOCK;
}

Descriptor lock_folder(const fs::path& folder, std::string_view purpose, LockKind kind) {
  Descriptor fd(
      uninterrupted([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!fd) refuse("open the folder", folder);
  const auto deadline = Clock::now() + kLockPatience;
  while (!change_lock(fd, kind)) {
    if (Clock::now() > deadline) refuse_lock(folder, purpose);
    std::this_thread::sleep_for(kLockPoll);
  }
  return fd;
}

}  // namespace accelerate::detail::inline core
