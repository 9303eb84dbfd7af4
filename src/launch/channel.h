// src/launch/channel.h - messages between two launchers over one connection.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include "core/sockets.h"
#include "launch/messages.h"

namespace accelerate::detail {

/// Never waits for the other side.
class Channel {
 public:
  using Clock = std::chrono::steady_clock;

  Channel(Descriptor socket, Clock::time_point now) : lines_(std::move(socket), now) {}

  void send(const AgentMessage& message) { lines_.send(to_line(message)); }
  /// Says that we live, when we have said nothing for `interval`.
  void keep_alive(std::chrono::milliseconds interval, Clock::time_point now);

  /// What to wait for.
  [[nodiscard]] pollfd wants() const { return lines_.wants(); }
  /// Reads and writes what can be; returns the messages that came. After `closed()` no more come.
  [[nodiscard]] std::vector<AgentMessage> exchange(Clock::time_point now);
  /// The next `exchange` begins with these.
  void put_back(std::vector<AgentMessage> messages) { waiting_ = std::move(messages); }

  /// The other side has gone, or what it says is no message.
  [[nodiscard]] bool closed() const noexcept { return lines_.closed(); }
  [[nodiscard]] Clock::time_point last_heard() const noexcept { return lines_.last_heard(); }
  /// Counts as heard: it was us who did not listen.
  void forgive(Clock::time_point now) noexcept { lines_.forgive(now); }
  /// Everything that was sent has been handed to the system.
  [[nodiscard]] bool idle() const noexcept { return lines_.idle(); }
  /// Two ends of one connection inside this process.
  [[nodiscard]] static std::pair<Channel, Channel> pair(Clock::time_point now);

 private:
  explicit Channel(LineChannel lines) : lines_(std::move(lines)) {}

  LineChannel lines_;
  std::vector<AgentMessage> waiting_;
};

}  // namespace accelerate::detail
