// src/core/descriptor.h - a file descriptor with an owner.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace accelerate::detail::inline core {

/// Reads and writes return at once from now on.
inline void set_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

/// A descriptor that is closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }
  /// The descriptor, which the caller closes from now on.
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  /// Returns the errno of close(), which may be the first to report a full disk; 0 if all is well.
  /// A signal does not matter: Linux has closed the file then.
  int reset() noexcept {
    const int fd = release();
    return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : errno;
  }

 private:
  int fd_ = -1;
};

}  // namespace accelerate::detail::inline core
