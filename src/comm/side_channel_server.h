// src/comm/side_channel_server.h - rank 0's end of the side channel: receives the reports of all
// ranks, asks for more, and sends them what was found.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/desync_detector.h"
#include "comm/shared_page.h"
#include "comm/side_channel_messages.h"
#include "core/sockets.h"

namespace accelerate::detail::comm {

class SideChannelServer {
 public:
  using Clock = std::chrono::steady_clock;

  /// `door` is the listening socket; connections without the password are closed.
  SideChannelServer(Descriptor door, std::string password, int size, const DetectorTimes& times,
                    std::chrono::milliseconds beat, Clock::time_point now);

  /// The connection of rank 0 itself.
  [[nodiscard]] LineChannel own_channel(Clock::time_point now);

  void wants(std::vector<pollfd>& fds) const;
  /// Receives reports, sends questions and the finding. Returns a text for the log, if any.
  [[nodiscard]] std::optional<std::string> work(Clock::time_point now);
  /// This process was not running for a while: the silence of the ranks does not count.
  void forgive(Clock::time_point now) { detector_.forgive(now); }
  /// Rank 0 ends: tells the others, which continue without a server.
  void farewell(const ReportedCall& last);
  [[nodiscard]] bool idle() const;

 private:
  struct Member {
    LineChannel channel;
    int rank = -1;  // -1 until its hello has arrived
    int pid = 0;
    std::string host = {};
    std::string page_path = {};
    std::shared_ptr<const CallPage> page = nullptr;
    std::uint64_t asked = 0;
    bool looked_at = false;
  };

  void accept(Clock::time_point now);
  void listen(Member& member, Clock::time_point now);
  void hear(Member& member, const SideChannelMessage& message, Clock::time_point now);
  void welcome(Member& member, const SideChannelMessage& hello, Clock::time_point now);
  void ask_around(Clock::time_point now);
  void look_at(Member& suspect);
  void announce(const Finding& finding);
  [[nodiscard]] Member* member_of(int rank);

  Descriptor door_;
  std::string password_;
  std::string host_;
  DesyncDetector detector_;
  std::chrono::milliseconds beat_;
  std::vector<std::unique_ptr<Member>> members_;
  bool found_ = false;
};

}  // namespace accelerate::detail::comm
