#include "launch/channel.h"

namespace accelerate::detail::launch {

std::pair<Channel, Channel> Channel::pair(Clock::time_point now) {
  auto [left, right] = LineChannel::pair(now);
  return {Channel(std::move(left)), Channel(std::move(right))};
}

void Channel::keep_alive(std::chrono::milliseconds interval, Clock::time_point now) {
  if (now - last_said() >= interval) send({.kind = AgentMessage::Kind::kAlive});
}

std::vector<AgentMessage> Channel::exchange(Clock::time_point now) {
  auto messages = std::exchange(waiting_, {});
  for (const auto& line : LineChannel::exchange(now)) {
    auto message = from_line(line);
    if (!message) {  // any program may have found the port
      close();
      break;
    }
    messages.push_back(std::move(*message));
  }
  return messages;
}

}  // namespace accelerate::detail::launch
