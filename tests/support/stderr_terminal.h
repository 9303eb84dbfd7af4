// tests/support/stderr_terminal.h - stderr as a terminal, for what draws on it.
#pragma once

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

namespace accelerate::test {

/// Makes stderr a terminal until the end of the scope and keeps what it shows.
class StderrTerminal {
 public:
  explicit StderrTerminal(unsigned short columns) : master_(::posix_openpt(O_RDWR | O_NOCTTY)) {
    ::grantpt(master_);
    ::unlockpt(master_);
    std::array<char, 128> name{};
    ::ptsname_r(master_, name.data(), name.size());
    slave_ = ::open(name.data(), O_RDWR | O_NOCTTY);
    resize(columns);
    before_ = ::dup(STDERR_FILENO);
    ::dup2(slave_, STDERR_FILENO);
  }
  ~StderrTerminal() {
    ::dup2(before_, STDERR_FILENO);
    for (const int fd : {before_, slave_, master_}) ::close(fd);
  }
  StderrTerminal(const StderrTerminal&) = delete;
  StderrTerminal& operator=(const StderrTerminal&) = delete;

  void resize(unsigned short columns) const {
    winsize size{.ws_row = 25, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    ::ioctl(slave_, TIOCSWINSZ, &size);
  }

  /// What was written since the last call.
  [[nodiscard]] std::string read() const {
    ::fcntl(master_, F_SETFL, O_NONBLOCK);
    std::array<char, 8192> bytes{};
    const auto count = ::read(master_, bytes.data(), bytes.size());
    return count > 0 ? std::string(bytes.data(), static_cast<std::size_t>(count)) : std::string();
  }

 private:
  int master_;
  int slave_ = -1;
  int before_ = -1;
};

}  // namespace accelerate::test
