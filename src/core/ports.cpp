#include "core/ports.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;

/// An address of either family, as the socket calls want it.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

enum class Scope { kLoopback, kAnyInterface };

Address address_of(int family, Scope scope, int port) {
  Address address;
  const auto number = htons(static_cast<std::uint16_t>(port));
  if (family == AF_INET) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = number;
    v4.sin_addr.s_addr = htonl(scope == Scope::kLoopback ? INADDR_LOOPBACK : INADDR_ANY);
    std::memcpy(&address.storage, &v4, sizeof v4);
    address.size = sizeof v4;
  } else {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = number;
    v6.sin6_addr = scope == Scope::kLoopback ? in6addr_loopback : in6addr_any;
    std::memcpy(&address.storage, &v6, sizeof v6);
    address.size = sizeof v6;
  }
  return address;
}

/// A TCP socket that closes itself. Invalid where the host lacks the family.
class Socket {
 public:
  explicit Socket(int family) : fd_(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

  void option(int level, int name, int value) const {
    ::setsockopt(fd_, level, name, &value, sizeof value);
  }
  [[nodiscard]] bool connect(const Address& to) const {
    return ::connect(fd_, to.get(), to.size) == 0;
  }
  [[nodiscard]] bool bind(const Address& to) const { return ::bind(fd_, to.get(), to.size) == 0; }

 private:
  int fd_;
};

int port_of(int fd) {
  Address address;
  address.size = sizeof address.storage;
  if (::getsockname(fd, address.get(), &address.size) != 0) return 0;
  // The port lies at the same place in both families.
  return ntohs(reinterpret_cast<const sockaddr_in*>(address.get())->sin_port);
}

bool port_answers(int family, int port) {
  const Socket socket(family);
  return socket.valid() && socket.connect(address_of(family, Scope::kLoopback, port));
}

/// A socket that is bound but does not listen, or listens on another interface, answers no connect.
bool port_is_bound(int family, int port) {
  const Socket socket(family);
  if (!socket.valid()) return false;
  // A connection of a server that has ended may linger for a minute; it blocks no new server.
  socket.option(SOL_SOCKET, SO_REUSEADDR, 1);
  if (family == AF_INET6) socket.option(IPPROTO_IPV6, IPV6_V6ONLY, 1);
  return !socket.bind(address_of(family, Scope::kAnyInterface, port)) && errno == EADDRINUSE;
}

/// Listens on every interface with one socket where the host has IPv6, else on those of IPv4.
int listen_on(int port) {
  int error = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    Socket socket(family);
    if (!socket.valid()) {
      error = errno;
      continue;
    }
    socket.option(SOL_SOCKET, SO_REUSEADDR, 1);
    if (family == AF_INET6) socket.option(IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (socket.bind(address_of(family, Scope::kAnyInterface, port)) &&
        ::listen(socket.fd(), SOMAXCONN) == 0) {
      return socket.release();
    }
    error = errno;
    if (error == EADDRINUSE || error == EACCES) break;
  }
  const auto reason = std::generic_category().message(error);
  if (error == EADDRINUSE) {
    throw ConfigError(str("Port ", port,
                          " is in use on this host. Give another one, or 0 to let the ",
                          "system choose."));
  }
  throw ConfigError(str("Port ", port, " cannot be listened on: ", reason, "."));
}

}  // namespace

namespace detail {

void check_port_number(int port) {
  if (port < 0 || port > 65535) {
    throw ArgumentError(str(port, " is not a port: ports are numbers from 0 to 65535."));
  }
}

}  // namespace detail

bool is_port_in_use(std::optional<int> port) {
  const int number = port.value_or(detail::kDefaultPort);
  detail::check_port_number(number);
  if (number == 0) return false;  // not a port: it asks the system for one
  // Binding first: a server too busy to answer would let a connect wait for minutes. Connecting
  // still finds ports that are forwarded to another host.
  return port_is_bound(AF_INET, number) || port_is_bound(AF_INET6, number) ||
         port_answers(AF_INET, number) || port_answers(AF_INET6, number);
}

int get_free_port() { return ReservedPort().port(); }

ReservedPort::ReservedPort(int port) {
  detail::check_port_number(port);
  fd_ = listen_on(port);
  port_ = port_of(fd_);
}

ReservedPort::~ReservedPort() {
  if (fd_ >= 0) ::close(fd_);
}

ReservedPort::ReservedPort(ReservedPort&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), port_(std::exchange(other.port_, 0)) {}

ReservedPort& ReservedPort::operator=(ReservedPort&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(port_, other.port_);
  return *this;
}

}  // namespace accelerate
