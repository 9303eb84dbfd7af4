// tests/support/listening_socket.h - a port that a test has bound, as our launcher binds one.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>

namespace accelerate::test {

class ListeningSocket {
 public:
  /// A port that the system chooses, on all addresses of the family.
  explicit ListeningSocket(int family = AF_INET)
      : fd_(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_storage address = {};
    address.ss_family = static_cast<sa_family_t>(family);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::bind(fd_, any, length) != 0 || ::listen(fd_, 16) != 0 ||
        ::getsockname(fd_, any, &length) != 0) {
      throw std::runtime_error("no port");
    }
    port_ = ntohs(family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                    : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
  }
  ~ListeningSocket() { ::close(fd_); }
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int port() const { return port_; }

  [[nodiscard]] static bool has_ipv6() {
    const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in6 address = {};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    const bool works = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    return works;
  }

 private:
  int fd_;
  int port_ = 0;
};

}  // namespace accelerate::test
