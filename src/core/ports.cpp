#include "core/ports.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "core/sockets.h"
#include "core/text.h"

namespace accelerate {

using detail::str;

// Port 0 lets the system choose.
static void check_port_number(int port) {
  if (port < 0 || port > 65535) {
    throw ArgumentError(str(port, " is not a port: ports are numbers from 0 to 65535."));
  }
}

bool is_port_in_use(std::optional<int> port) {
  const int number = port.value_or(detail::kDefaultPort);
  check_port_number(number);
  if (number == 0) return false;  // not a port: it asks the system for one
  // Binding first: a server too busy to answer would let a connect wait. Connecting still finds
  // ports that are forwarded to another host.
  const auto answers = [number](const char* host) {
    std::string error;
    return detail::connect_to(host, number, std::chrono::seconds(5), error).has_value();
  };
  return detail::is_bound(number, /*ipv6=*/false) || detail::is_bound(number, /*ipv6=*/true) ||
         answers("127.0.0.1") || answers("::1");
}

int get_free_port() { return ReservedPort().port(); }

ReservedPort::ReservedPort(int port) {
  check_port_number(port);
  std::string error;
  auto socket = detail::listen_on(port, /*loopback_only=*/false, error);
  if (!socket) {
    if (error != std::strerror(EADDRINUSE)) {
      throw ConfigError(str("Port ", port, " cannot be listened on: ", error, "."));
    }
    throw ConfigError(str("Port ", port, " is in use on this host. Give another one, or 0 to let ",
                          "the system choose."));
  }
  port_ = detail::port_of(*socket);
  fd_ = socket->release();
  // Its next owner may accept connections without polling first.
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) & ~O_NONBLOCK);
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
