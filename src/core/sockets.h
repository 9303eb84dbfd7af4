// src/core/sockets.h - TCP sockets: listening, connecting, and lines of text over a connection.
//
// Used between launchers of several machines, and between the ranks of a group beside their data.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/descriptor.h"
#include "core/subprocess.h"

namespace accelerate::detail::inline core {

/// Lines over one connection, without ever waiting for the other side.
class LineChannel {
 public:
  using Clock = std::chrono::steady_clock;

  LineChannel(Descriptor socket, Clock::time_point now);

  /// `line` without its end.
  void send(const std::string& line);
  /// The events to poll for.
  [[nodiscard]] pollfd wants() const;
  /// Reads and writes without waiting; returns the lines that came. After `closed()` none come.
  [[nodiscard]] std::vector<std::string> exchange(Clock::time_point now);

  /// The other side has gone.
  [[nodiscard]] bool closed() const noexcept { return closed_; }
  void close() noexcept { closed_ = true; }
  [[nodiscard]] Clock::time_point last_heard() const noexcept { return last_heard_; }
  [[nodiscard]] Clock::time_point last_said() const noexcept { return last_said_; }
  /// Counts as heard now: this side did not read for a while.
  void forgive(Clock::time_point now) noexcept { last_heard_ = now; }
  /// Everything that was sent has been handed to the system.
  [[nodiscard]] bool idle() const noexcept { return outgoing_.empty(); }
  /// Two ends of one connection inside this process.
  [[nodiscard]] static std::pair<LineChannel, LineChannel> pair(Clock::time_point now);

 private:
  void write_some();

  Descriptor socket_;
  LineBuffer lines_;
  std::size_t pending_bytes_ = 0;  // of a line that has not ended yet
  std::string outgoing_;
  bool closed_ = false;
  Clock::time_point last_heard_;
  Clock::time_point last_said_;
};

/// A listening TCP socket; port 0 takes a free one. `loopback_only`: not reachable from elsewhere.
/// `error` says why there is none.
[[nodiscard]] std::optional<Descriptor> listen_on(int port, bool loopback_only, std::string& error);
/// A listening TCP socket at one address of this machine, or at the address of a name.
[[nodiscard]] std::optional<Descriptor> listen_at(const std::string& host, int port,
                                                  std::string& error);
[[nodiscard]] int port_of(const Descriptor& socket);
/// True if a socket of this host is bound to the port, in IPv6 or else in IPv4 alone.
[[nodiscard]] bool is_bound(int port, bool ipv6);

/// One try to connect, at most `limit` long for all addresses of the host together: each has its
/// share of what the ones before it left. `error` says why there is no connection.
[[nodiscard]] std::optional<Descriptor> connect_to(const std::string& host, int port,
                                                   std::chrono::milliseconds limit,
                                                   std::string& error);

/// Accepts a waiting connection, if there is one: its socket and the address of its other side.
[[nodiscard]] std::optional<std::pair<Descriptor, std::string>> accept_from(
    const Descriptor& listening);

/// The numeric address of our own side of a connection.
[[nodiscard]] std::string own_address(const Descriptor& socket);

/// True if a host name or address is of this machine.
[[nodiscard]] bool is_this_machine(const std::string& host);

}  // namespace accelerate::detail::inline core
