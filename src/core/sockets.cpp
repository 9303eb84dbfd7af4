#include "core/sockets.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/world.h"

namespace accelerate::detail::inline core {
namespace {

// No honest message is longer: the last lines of a worker are cut.
constexpr std::size_t kLongestLine = 4 << 20;
// A machine that reads nothing for so long that this piles up is as good as gone.
constexpr std::size_t kMostOutgoing = 64 << 20;

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& host, int port, std::string& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
      code != 0) {
    error = str("the name does not resolve (", ::gai_strerror(code), ")");
    list = nullptr;
  }
  return {list, ::freeaddrinfo};
}

/// "" for what is no address of IPv4 or IPv6.
std::string numeric(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  const socklen_t length =
      address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  std::string result = text.data();
  // An IPv4 peer of a socket that serves both.
  constexpr std::string_view kMapped = "::ffff:";
  if (result.starts_with(kMapped)) result.erase(0, kMapped.size());
  return result;
}

int new_socket(int family) {
  return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

bool bind_to(const Descriptor& socket, const addrinfo& address, int ipv6_only = 0) {
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (address.ai_family == AF_INET6) {
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &ipv6_only, sizeof ipv6_only);
  }
  return ::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0;
}

/// Signals do not end the wait.
bool becomes_writable(const Descriptor& socket, LineChannel::Clock::time_point deadline) {
  using std::chrono::milliseconds;
  pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  int count = 0;
  do {
    const auto left = std::chrono::ceil<milliseconds>(deadline - LineChannel::Clock::now()).count();
    count = ::poll(&ready, 1, static_cast<int>(std::max<milliseconds::rep>(left, 0)));
  } while (count < 0 && errno == EINTR);
  return count == 1;
}

}  // namespace

LineChannel::LineChannel(Descriptor socket, Clock::time_point now)
    : socket_(std::move(socket)), last_heard_(now), last_said_(now) {
  set_nonblocking(socket_.get());
  const int yes = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

std::pair<LineChannel, LineChannel> LineChannel::pair(Clock::time_point now) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw Error(str("No pair of sockets: ", std::strerror(errno), "."));
  }
  return {LineChannel(Descriptor(ends[0]), now), LineChannel(Descriptor(ends[1]), now)};
}

void LineChannel::send(const std::string& line) {
  if (closed_) return;
  outgoing_ += line + "\n";
  last_said_ = Clock::now();
  write_some();
  if (outgoing_.size() > kMostOutgoing) closed_ = true;
}

pollfd LineChannel::wants() const {
  const auto events = static_cast<short>(outgoing_.empty() ? POLLIN : POLLIN | POLLOUT);
  return {.fd = closed_ ? -1 : socket_.get(), .events = events, .revents = 0};
}

void LineChannel::write_some() {
  while (!outgoing_.empty()) {
    const ssize_t count = ::send(socket_.get(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count < 0) {
      // What the other side said before it left can still be read.
      outgoing_.clear();
      return;
    }
    outgoing_.erase(0, static_cast<std::size_t>(count));
  }
}

std::vector<std::string> LineChannel::exchange(Clock::time_point now) {
  std::vector<std::string> lines;
  if (closed_) return lines;
  write_some();
  std::array<char, 65536> bytes;
  for (;;) {
    const ssize_t count = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return lines;
    if (count <= 0) {
      closed_ = true;
      return lines;
    }
    last_heard_ = now;
    const std::string_view text(bytes.data(), static_cast<std::size_t>(count));
    const auto end = text.rfind('\n');
    pending_bytes_ =
        end == std::string_view::npos ? pending_bytes_ + text.size() : text.size() - end - 1;
    lines_.append(text, [&](std::string_view line) { lines.emplace_back(line); });
    if (pending_bytes_ <= kLongestLine) continue;
    closed_ = true;
    return lines;
  }
}

std::optional<Descriptor> listen_on(int port, bool loopback_only, std::string& error) {
  if (loopback_only) return listen_at("127.0.0.1", port, error);
  // One socket for IPv6 and IPv4 where the system has both.
  for (const auto* host : {"::", "0.0.0.0"}) {
    if (auto socket = listen_at(host, port, error)) return socket;
    if (error == std::strerror(EADDRINUSE) || error == std::strerror(EACCES)) break;
  }
  return std::nullopt;
}

std::optional<Descriptor> listen_at(const std::string& host, int port, std::string& error) {
  const auto addresses = resolve(host, port, error);
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    Descriptor socket(new_socket(each->ai_family));
    if (socket && bind_to(socket, *each) && ::listen(socket.get(), SOMAXCONN) == 0) return socket;
    error = std::strerror(errno);
  }
  return std::nullopt;
}

bool is_bound(int port, bool ipv6) {
  std::string error;
  const auto address = resolve(ipv6 ? "::" : "0.0.0.0", port, error);
  const Descriptor socket(new_socket(ipv6 ? AF_INET6 : AF_INET));
  if (!socket || !address) return false;  // this host lacks the family
  return !bind_to(socket, *address, /*ipv6_only=*/1) && errno == EADDRINUSE;
}

int port_of(const Descriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::optional<Descriptor> connect_to(const std::string& host, int port,
                                     std::chrono::milliseconds limit, std::string& error) {
  using Clock = LineChannel::Clock;
  const auto addresses = resolve(host, port, error);
  std::ptrdiff_t left = 0;
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) ++left;
  const auto deadline = Clock::now() + limit;
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next, --left) {
    Descriptor socket(new_socket(each->ai_family));
    if (!socket) continue;
    if (::connect(socket.get(), each->ai_addr, each->ai_addrlen) == 0) return socket;
    if (errno != EINPROGRESS && errno != EINTR) {
      error = std::strerror(errno);
      continue;
    }
    const auto now = Clock::now();
    if (!becomes_writable(socket, now + (deadline - now) / left)) {
      error = "no answer";
      continue;
    }
    int code = 0;
    socklen_t size = sizeof code;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &size);
    if (code == 0) return socket;
    error = std::strerror(code);
  }
  return std::nullopt;
}

std::optional<std::pair<Descriptor, std::string>> accept_from(const Descriptor& listening) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  Descriptor socket(::accept4(listening.get(), reinterpret_cast<sockaddr*>(&address), &length,
                              SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return std::nullopt;
  return std::pair(std::move(socket), numeric(reinterpret_cast<sockaddr*>(&address)));
}

std::string own_address(const Descriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return {};
  return numeric(reinterpret_cast<sockaddr*>(&address));
}

std::vector<std::string> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  std::vector<std::string> addresses;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    const bool usable = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_LOOPBACK) == 0;
    const auto address = usable && each->ifa_addr != nullptr ? numeric(each->ifa_addr) : "";
    if (!address.empty() && !address.starts_with("fe80:") && !address.starts_with("169.254.")) {
      addresses.push_back(address);
    }
  }
  ::freeifaddrs(list);
  return addresses;
}

bool is_this_machine(const std::string& host) {
  if (is_loopback(host) || host == "localhost" || host == this_host_name()) return true;
  std::string error;
  const auto addresses = resolve(host, 0, error);
  const auto own = interface_addresses();
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    const auto text = numeric(each->ai_addr);
    if (is_loopback(text) || std::ranges::find(own, text) != own.end()) return true;
  }
  return false;
}

}  // namespace accelerate::detail::inline core
