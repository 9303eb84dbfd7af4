// src/launch/rendezvous_host.h - the coordinator with its connections to the agents of all
// machines.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <vector>

#include "launch/channel.h"
#include "launch/coordinator.h"

namespace accelerate::detail::launch {

struct RendezvousHostOptions {
  CoordinatorRules rules = {};
  /// The workers' store: its port, and whether a helper process serves it.
  int master_port = 0;
  bool agent_store = false;
  /// A machine that sends nothing for this long is lost.
  std::chrono::milliseconds keep_alive = std::chrono::seconds(10);
};

class RendezvousHost {
 public:
  using Clock = std::chrono::steady_clock;

  /// Other machines connect to `listener`, which must outlive this; nullptr if there are none. With
  /// fixed ranks connections are accepted only while machines gather.
  RendezvousHost(const RendezvousHostOptions& options, const Descriptor* listener,
                 Clock::time_point now);

  /// The connection of this machine's own agent, which joins like all others. To be called once.
  [[nodiscard]] Channel own_channel();

  /// Appends the descriptors to poll.
  void wants(std::vector<pollfd>& fds) const;
  [[nodiscard]] Clock::time_point next_event(Clock::time_point now) const;
  /// Handles new messages and expired timeouts.
  void work(Clock::time_point now);

  [[nodiscard]] bool gathering() const { return coordinator_.gathering(); }
  /// The missing machines as text.
  [[nodiscard]] std::string missing() const { return coordinator_.missing(); }
  [[nodiscard]] bool ended() const { return coordinator_.ended(); }
  /// True if the job has ended and all machines have been sent the verdict.
  [[nodiscard]] bool over() const;

 private:
  struct Peer {
    Channel channel;
    std::string address;
    bool introduced = false;
    Clock::time_point since;
  };

  [[nodiscard]] bool is_accepting() const;
  void accept_peers(Clock::time_point now);
  void serve(int id, Clock::time_point now);
  void handle(int id, const AgentMessage& message, Clock::time_point now);
  void carry_out(const std::vector<Coordinator::Order>& orders);
  void forgive_after_pause(Clock::time_point now);

  RendezvousHostOptions options_;
  const Descriptor* listener_;
  Coordinator coordinator_;
  std::map<int, Peer> peers_;
  int next_id_ = 0;
  Clock::time_point last_work_;
};

}  // namespace accelerate::detail::launch
