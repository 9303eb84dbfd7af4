// src/launch/channel.h - messages between two launchers over one connection.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include "core/sockets.h"
#include "launch/messages.h"

namespace accelerate::detail::launch {

/// A connection whose lines are messages. Never waits for the other side.
class Channel : public LineChannel {
 public:
  using LineChannel::LineChannel;

  void send(const AgentMessage& message) { LineChannel::send(to_line(message)); }
  /// Sends kAlive if nothing was sent for `interval`.
  void keep_alive(std::chrono::milliseconds interval, Clock::time_point now);
  /// Reads and writes without waiting; returns the messages that arrived. Closes the connection if
  /// a line is not a message.
  [[nodiscard]] std::vector<AgentMessage> exchange(Clock::time_point now);
  /// The next `exchange` returns these first.
  void put_back(std::vector<AgentMessage> messages) { waiting_ = std::move(messages); }
  /// Two ends of one connection inside this process.
  [[nodiscard]] static std::pair<Channel, Channel> pair(Clock::time_point now);

 private:
  explicit Channel(LineChannel lines) : LineChannel(std::move(lines)) {}

  std::vector<AgentMessage> waiting_;
};

}  // namespace accelerate::detail::launch
