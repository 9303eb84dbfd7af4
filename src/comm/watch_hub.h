// src/comm/watch_hub.h - rank 0's side of the watch: hears all ranks, asks, and tells what was
// found.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/jury.h"
#include "comm/shared_page.h"
#include "comm/watch_notes.h"
#include "core/sockets.h"

namespace accelerate::detail {

class WatchHub {
 public:
  using Clock = std::chrono::steady_clock;

  /// `door` is where members arrive; who does not know the password is sent away.
  WatchHub(Descriptor door, std::string password, int size, const JuryTimes& times,
           std::chrono::milliseconds beat, Clock::time_point now);

  /// The connection of rank 0 itself.
  [[nodiscard]] LineChannel own_channel(Clock::time_point now);

  void wants(std::vector<pollfd>& fds) const;
  /// Takes what came, asks what has to be asked, tells what was found. Returns a notice for people.
  [[nodiscard]] std::optional<std::string> work(Clock::time_point now);
  /// We were not running for a while: silence is not the ranks' fault.
  void forgive(Clock::time_point now) { jury_.forgive(now); }
  /// Rank 0 ends: the others are told, and must do without a hub.
  void farewell(const ToldCall& last);
  [[nodiscard]] bool idle() const;

 private:
  struct Member {
    LineChannel channel;
    int rank = -1;  // until it has said hello
    int pid = 0;
    std::string host = {};
    std::string page_path = {};
    std::shared_ptr<const CallPage> page = nullptr;
    std::uint64_t asked = 0;
    bool looked_at = false;
  };

  void accept(Clock::time_point now);
  void listen(Member& member, Clock::time_point now);
  void hear(Member& member, const Note& note, Clock::time_point now);
  void welcome(Member& member, const Note& hello, Clock::time_point now);
  void ask_around(Clock::time_point now);
  void look_at(Member& suspect);
  void announce(const Finding& finding);
  [[nodiscard]] Member* member_of(int rank);

  Descriptor door_;
  std::string password_;
  std::string host_;
  Jury jury_;
  std::chrono::milliseconds beat_;
  std::vector<std::unique_ptr<Member>> members_;
  bool found_ = false;
};

}  // namespace accelerate::detail
