// src/launch/coordinator.h - decides for all machines of a job: which of them take part, when
// workers start, when they are stopped, and how the job ends.
//
// A state machine without sockets, processes or clock: events come in as calls, and each call
// returns orders for the machines. It runs on the machine that hosts the rendezvous; the agent of
// that machine is a member like all others.
//
//     gathering --complete--> running --success--> ended
//         ^                      | a worker fails, a machine leaves or joins
//         +---- stopping <-------+                         stopping --no restart left--> ended
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/messages.h"

namespace accelerate::detail::launch {

struct CoordinatorRules {
  int min_nodes = 1;
  int max_nodes = 1;
  /// True: machines have fixed ranks and all of them are needed. False: they come and go (c10d).
  bool fixed = true;
  int max_restarts = 0;
  /// How long workers have to end by themselves after one of them was preempted.
  std::chrono::milliseconds shutdown_timeout = std::chrono::seconds(30);
  /// How long to wait for machines.
  std::chrono::milliseconds join_timeout = std::chrono::seconds(900);
  /// How long to wait for more machines after `min_nodes` have joined.
  std::chrono::milliseconds last_call = std::chrono::seconds(30);
};

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  using Id = int;

  struct Order {
    Id to = 0;
    /// kStart (without port and store), kStop, kEnd or kNotice.
    AgentMessage message = {};
  };
  using Orders = std::vector<Order>;

  Coordinator(CoordinatorRules rules, Clock::time_point now);

  // Events. Each returns the orders that follow from it.
  [[nodiscard]] Orders join(Id id, const Member& member, Clock::time_point now);
  [[nodiscard]] Orders failed(Id id, const WorkerFailure& failure, Clock::time_point now);
  /// No worker of the machine runs any more; some of them failed.
  [[nodiscard]] Orders all_ended(Id id, Clock::time_point now);
  [[nodiscard]] Orders succeeded(Id id, Clock::time_point now);
  [[nodiscard]] Orders stopped(Id id, const std::vector<WorkerFailure>& terminated,
                               Clock::time_point now);
  /// The connection to the machine is lost; `why` completes "machine 1 (host) ".
  [[nodiscard]] Orders lost(Id id, const std::string& why, Clock::time_point now);
  /// A signal ends the launcher of the machine, which ends its own workers.
  [[nodiscard]] Orders leaves(Id id, int signal, Clock::time_point now);
  /// A launcher got the signal and passed it on. Workers that end because of it stay ended.
  void passed_on(int signal) noexcept { passed_on_ = signal; }
  /// To be called at the time of `next_event`, or earlier.
  [[nodiscard]] Orders tick(Clock::time_point now);

  [[nodiscard]] Clock::time_point next_event() const;
  [[nodiscard]] bool gathering() const noexcept { return phase_ == Phase::kGathering; }
  [[nodiscard]] bool ended() const noexcept { return phase_ == Phase::kEnded; }
  /// The missing machines as text: "missing: machine 1, machine 2".
  [[nodiscard]] std::string missing() const;

 private:
  enum class Phase : std::uint8_t { kGathering, kRunning, kStopping, kEnded };
  enum class Doing : std::uint8_t { kWaits, kRuns, kSucceeded, kStops };
  struct Node {
    Member member;
    Doing doing = Doing::kWaits;
    bool all_ended = false;
  };

  [[nodiscard]] std::optional<std::string> objection(const Member& member) const;
  [[nodiscard]] std::string describe(const Node& node) const;
  [[nodiscard]] std::vector<Id> in_rank_order() const;
  [[nodiscard]] bool enough() const;
  void gather(Clock::time_point now);
  [[nodiscard]] Orders start_if_complete(Clock::time_point now);
  [[nodiscard]] Orders start();
  [[nodiscard]] Orders stop(Clock::time_point now);
  [[nodiscard]] Orders after_stop(Clock::time_point now);
  [[nodiscard]] Orders end(const Verdict& verdict);
  [[nodiscard]] Orders end_if_all_succeeded();
  /// A notice for all machines, before the other orders.
  void announce(const std::string& text, Orders& orders) const;
  [[nodiscard]] Orders fail_or_restart(Verdict verdict, Clock::time_point now);
  /// Whether workers ended because a launcher was asked to stop.
  [[nodiscard]] bool ended_on_request(const WorkerFailure& cause) const noexcept;
  [[nodiscard]] bool more_to_learn() const;
  /// Decides about the failures if the time has come or no more is to be learnt.
  [[nodiscard]] Orders decide_if_due(Clock::time_point now);
  [[nodiscard]] Orders decide_about_failures(Clock::time_point now);

  CoordinatorRules rules_;
  Phase phase_ = Phase::kGathering;
  std::map<Id, Node> nodes_;
  Clock::time_point gather_until_ = {};
  std::optional<Clock::time_point> last_call_until_ = std::nullopt;
  std::optional<Clock::time_point> decide_at_ = std::nullopt;
  std::vector<WorkerFailure> failures_ = {};
  int passed_on_ = 0;  // a signal; 0 for none
  /// Set while stopping for the last time.
  std::optional<Verdict> verdict_ = std::nullopt;
  int rounds_ = 0;
  int restarts_ = 0;
};

}  // namespace accelerate::detail::launch
