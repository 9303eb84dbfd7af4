#include "resume/fault_shim.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>

// The declarations of libc say that arguments are not null and nothing is thrown; ours need not.
#pragma GCC diagnostic ignored "-Wnonnull-compare"

namespace {

constexpr int kDescriptors = 1024;

std::mutex fault_mutex;
long calls_left = 0;
int fault_error = 0;
std::array<char, 512> fired = {};
std::array<std::atomic<bool>, kDescriptors> is_below = {};

bool below(const char* path) {
  static const char* const folder = std::getenv("FAULT_FOLDER");
  return folder != nullptr && path != nullptr && std::string_view(path).starts_with(folder);
}

bool tracked(int fd) { return fd >= 0 && fd < kDescriptors && is_below.at(fd); }

bool below(int folder, const char* path) {
  return below(path) || (path != nullptr && *path != '/' && tracked(folder));
}

int track(int fd, bool is) {
  if (fd >= 0 && fd < kDescriptors) is_below.at(fd) = is;
  return fd;
}

/// Counts a call. Returns what it shall fail with, 0 if it shall not.
int fault_of(const char* name, const char* path, bool is_write = false) {
  const std::lock_guard lock(fault_mutex);
  if (calls_left == 0 || (fault_error == kShortWrite && !is_write)) return 0;
  if (--calls_left > 0) return 0;
  std::snprintf(fired.data(), fired.size(), "%s %s", name, path != nullptr ? path : "");
  return fault_error;
}

/// Sets errno and returns true if the call shall fail.
bool fails(bool is_meant, const char* name, const char* path) {
  const int error = is_meant ? fault_of(name, path) : 0;
  if (error == 0) return false;
  errno = error;
  return true;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

template <class Write>
ssize_t faulty_write(int fd, std::size_t size, const char* name, Write write) {
  if (!tracked(fd)) return write(size);
  const int error =
      size > 1 || fault_error != kShortWrite ? fault_of(name, "", /*is_write=*/true) : 0;
  if (error == kShortWrite) return write(size / 2);
  if (error == 0) return write(size);
  errno = error;
  return -1;
}

}  // namespace

#define NEXT(name) static auto* const real = next<decltype(name)>(#name)

#pragma GCC visibility push(default)
extern "C" {

void fault_arm(long call, int error) {
  const std::lock_guard lock(fault_mutex);
  calls_left = call;
  fault_error = error;
  if (call != 0) fired[0] = '\0';
}

const char* fault_fired() { return fired.data(); }

#define OPEN(name)                                      \
  int name(const char* path, int flags, ...) {          \
    NEXT(name);                                         \
    va_list rest;                                       \
    va_start(rest, flags);                              \
    const auto mode = va_arg(rest, mode_t);             \
    va_end(rest);                                       \
    if (fails(below(path), #name, path)) return -1;     \
    return track(real(path, flags, mode), below(path)); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                    \
  int name(int folder, const char* path, int flags, ...) {              \
    NEXT(name);                                                         \
    va_list rest;                                                       \
    va_start(rest, flags);                                              \
    const auto mode = va_arg(rest, mode_t);                             \
    va_end(rest);                                                       \
    if (fails(below(folder, path), #name, path)) return -1;             \
    return track(real(folder, path, flags, mode), below(folder, path)); \
  }
OPENAT(openat)
OPENAT(openat64)

// The file is closed in any case, as Linux does.
int close(int fd) {
  NEXT(close);
  const bool was_below = tracked(fd);
  track(fd, false);
  const int result = real(fd);
  return fails(was_below, "close", "") ? -1 : result;
}

ssize_t write(int fd, const void* data, size_t size) {
  NEXT(write);
  return faulty_write(fd, size, "write", [&](size_t part) { return real(fd, data, part); });
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  NEXT(pwrite);
  return faulty_write(fd, size, "pwrite", [&](size_t part) { return real(fd, data, part, at); });
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  NEXT(pwrite64);
  return faulty_write(fd, size, "pwrite", [&](size_t part) { return real(fd, data, part, at); });
}

int fsync(int fd) {
  NEXT(fsync);
  return fails(tracked(fd), "fsync", "") ? -1 : real(fd);
}
int fdatasync(int fd) {
  NEXT(fdatasync);
  return fails(tracked(fd), "fdatasync", "") ? -1 : real(fd);
}
int fallocate(int fd, int mode, off_t offset, off_t length) {
  NEXT(fallocate);
  return fails(tracked(fd), "fallocate", "") ? -1 : real(fd, mode, offset, length);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
  NEXT(fallocate64);
  return fails(tracked(fd), "fallocate", "") ? -1 : real(fd, mode, offset, length);
}
int sync_file_range(int fd, off64_t offset, off64_t length, unsigned flags) {
  NEXT(sync_file_range);
  return fails(tracked(fd), "sync_file_range", "") ? -1 : real(fd, offset, length, flags);
}
int ftruncate(int fd, off_t size) noexcept {
  NEXT(ftruncate);
  return fails(tracked(fd), "ftruncate", "") ? -1 : real(fd, size);
}
int fchmod(int fd, mode_t mode) noexcept {
  NEXT(fchmod);
  return fails(tracked(fd), "fchmod", "") ? -1 : real(fd, mode);
}
int flock(int fd, int operation) noexcept;
int flock(int fd, int operation) noexcept {
  NEXT(flock);
  return fails(tracked(fd), "flock", "") ? -1 : real(fd, operation);
}

int rename(const char* from, const char* to) noexcept {
  NEXT(rename);
  return fails(below(from), "rename", from) ? -1 : real(from, to);
}
int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  NEXT(renameat);
  return fails(below(from_folder, from), "renameat", from) ? -1
                                                           : real(from_folder, from, to_folder, to);
}
int mkdir(const char* path, mode_t mode) noexcept {
  NEXT(mkdir);
  return fails(below(path), "mkdir", path) ? -1 : real(path, mode);
}
int mkdirat(int folder, const char* path, mode_t mode) noexcept {
  NEXT(mkdirat);
  return fails(below(folder, path), "mkdirat", path) ? -1 : real(folder, path, mode);
}
int unlink(const char* path) noexcept {
  NEXT(unlink);
  return fails(below(path), "unlink", path) ? -1 : real(path);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  NEXT(unlinkat);
  return fails(below(folder, path), "unlinkat", path) ? -1 : real(folder, path, flags);
}
int rmdir(const char* path) noexcept {
  NEXT(rmdir);
  return fails(below(path), "rmdir", path) ? -1 : real(path);
}
int remove(const char* path) noexcept {
  NEXT(remove);
  return fails(below(path), "remove", path) ? -1 : real(path);
}
}
#pragma GCC visibility pop
