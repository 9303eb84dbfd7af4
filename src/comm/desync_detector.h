// src/comm/desync_detector.h - finds the rank that diverged, from what all ranks report about their
// collectives.
//
// Internal, no Torch. It runs in rank 0, without sockets and clocks: reports and times are passed
// in. As soon as it is certain that a collective can never complete, `finding` names the rank at
// fault. A rank that is only busy is never blamed.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::detail::comm {

/// A collective as a rank reports it.
struct ReportedCall {
  std::uint64_t sequence = 0;  ///< 0: none yet
  std::uint64_t signature = 0;
  std::string text = {};  ///< "gather float32[4] at train.cpp:31"
  bool complete = false;
  /// The oldest call that the rank had not completed when it reported this; the next one if it had
  /// completed all. Several can be under way, and a later one may complete before an earlier one.
  std::uint64_t open = 0;
};

struct DetectorTimes {
  using Milliseconds = std::chrono::milliseconds;
  /// How long to wait for the reports of the other ranks when two disagree.
  Milliseconds dispute = Milliseconds(300);
  /// A rank that sends nothing for this long is blamed.
  Milliseconds silence = Milliseconds(10'000);
  /// A failure of the transport is a consequence: its cause is waited for this long.
  Milliseconds transport = Milliseconds(2'000);
  /// After this time a rank that others wait for is named in the log, without blame.
  Milliseconds notice = Milliseconds(60'000);
  /// How long the transport lets a collective wait: the timeout setting of the group.
  Milliseconds timeout = std::chrono::minutes(30);
};

/// The diagnosis, which is the same text on all ranks.
struct Finding {
  int rank = -1;  ///< -1 if ranks disagree and none is in the minority
  std::string text = {};
};

class DesyncDetector {
 public:
  using Clock = std::chrono::steady_clock;

  /// `names[r]` is the name of rank r in messages: "rank 1 (host a)".
  DesyncDetector(std::vector<std::string> names, const DetectorTimes& times, Clock::time_point now);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks_.size()); }
  /// Another name for a rank.
  void call(int rank, const std::string& name) { ranks_.at(rank).name = name; }

  // Reports of a rank, and events.
  void heard(int rank, Clock::time_point now);
  /// The rank has been waiting in `call` for a while.
  void waits(int rank, const ReportedCall& call, Clock::time_point now);
  /// The rank waits no more.
  void moves_on(int rank);
  /// What the rank did in collective number `call.sequence`, or its latest call if it has not
  /// reached that number.
  void reports(int rank, const ReportedCall& call, Clock::time_point now);
  /// The rank ended in an orderly way, after `last`.
  void left(int rank, const ReportedCall& last);
  void threw(int rank, const std::string& message);
  /// The connection of the rank was closed without a farewell.
  void died(int rank);
  void transport_failed(int rank, const ReportedCall& call, const std::string& message,
                        Clock::time_point now);
  /// This process was not running: the silence of the ranks up to now does not count.
  void forgive(Clock::time_point now);
  /// The state of the process according to its host, e.g. "stopped", and its exact last call.
  void seen(int rank, const std::string& state, const ReportedCall& last);

  /// The latest call that a rank reported.
  [[nodiscard]] const ReportedCall& latest(int rank) const { return ranks_.at(rank).latest; }
  /// The first collective in which a rank waits, about which all are asked; 0 means none.
  [[nodiscard]] std::uint64_t disputed() const;
  /// The ranks that were silent for half of the time limit: their hosts should be asked.
  [[nodiscard]] std::vector<int> suspects(Clock::time_point now) const;

  [[nodiscard]] std::optional<Finding> finding(Clock::time_point now);
  /// "rank 1 is waited for ...", once per collective.
  [[nodiscard]] std::optional<std::string> notice(Clock::time_point now);

 private:
  struct Rank {
    std::string name;
    Clock::time_point heard;
    std::optional<ReportedCall> waits = std::nullopt;
    Clock::time_point waits_since = {};
    std::map<std::uint64_t, ReportedCall> reported = {};
    ReportedCall latest = {};
    std::uint64_t open = 0;
    bool has_left = false;
    bool is_dead = false;
    std::string state = {};
    std::optional<std::string> exception = std::nullopt;
    std::optional<std::string> transport = std::nullopt;
    ReportedCall transport_in = {};
    Clock::time_point transport_at = {};
    std::uint64_t last_broken = 0;  // the latest call that the transport failed in

    void learn(const ReportedCall& call);
    [[nodiscard]] bool is_gone() const noexcept { return is_dead || has_left; }
  };

  [[nodiscard]] std::string where(const Rank& rank) const;
  [[nodiscard]] std::string end_of(const Rank& rank) const;
  [[nodiscard]] std::optional<Finding> by_exception() const;
  [[nodiscard]] std::optional<Finding> by_dispute(Clock::time_point now);
  [[nodiscard]] std::optional<Finding> by_end() const;
  [[nodiscard]] std::optional<Finding> by_misfit(Clock::time_point now) const;
  [[nodiscard]] std::optional<Finding> by_silence(Clock::time_point now) const;
  [[nodiscard]] std::optional<Finding> by_transport(Clock::time_point now) const;
  [[nodiscard]] Finding disagreement(std::uint64_t sequence) const;
  [[nodiscard]] std::vector<int> late_for(std::uint64_t sequence) const;
  [[nodiscard]] std::string where_are(const std::vector<int>& ranks) const;

  std::vector<Rank> ranks_;
  DetectorTimes times_;
  std::map<std::uint64_t, Clock::time_point> disputes_;  // since when signatures differ
  std::uint64_t noticed_ = 0;
};

}  // namespace accelerate::detail::comm
