// src/launch/meeting.h - the place where the launchers of a job's machines meet: the coordinator
// with its connections.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <vector>

#include "launch/channel.h"
#include "launch/coordinator.h"

namespace accelerate::detail {

struct MeetingOptions {
  CoordinatorRules rules = {};
  /// What workers are told about the store.
  int master_port = 0;
  bool agent_store = false;
  /// After this long without a word a machine counts as gone.
  std::chrono::milliseconds keep_alive = std::chrono::seconds(10);
};

class Meeting {
 public:
  using Clock = std::chrono::steady_clock;

  /// `door` is where other machines arrive; nullptr: there are none. It is looked at while machines
  /// gather, and always when they may come and go. It must outlive the meeting.
  Meeting(const MeetingOptions& options, const Descriptor* door, Clock::time_point now);

  /// The connection of this machine's own agent; it says hello like all others. Once.
  [[nodiscard]] Channel own_channel();

  /// What to wait for; appended.
  void wants(std::vector<pollfd>& fds) const;
  [[nodiscard]] Clock::time_point next_event(Clock::time_point now) const;
  /// Takes what came and does what is due.
  void work(Clock::time_point now);

  [[nodiscard]] bool gathering() const { return coordinator_.gathering(); }
  /// Who is not here yet, in words.
  [[nodiscard]] std::string missing() const { return coordinator_.missing(); }
  [[nodiscard]] bool ended() const { return coordinator_.ended(); }
  /// Everybody knows how it ended.
  [[nodiscard]] bool over() const;

 private:
  struct Guest {
    Channel channel;
    std::string address;
    bool introduced = false;
    Clock::time_point since;
  };

  [[nodiscard]] bool door_is_open() const;
  void accept_guests(Clock::time_point now);
  void listen_to(int id, Clock::time_point now);
  void hear(int id, const AgentMessage& message, Clock::time_point now);
  void carry_out(const std::vector<Coordinator::Order>& orders);
  void forgive_if_late(Clock::time_point now);

  MeetingOptions options_;
  const Descriptor* door_;
  Coordinator coordinator_;
  std::map<int, Guest> guests_;
  int next_id_ = 0;
  Clock::time_point last_look_;
};

}  // namespace accelerate::detail
