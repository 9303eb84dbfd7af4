// src/comm/jury.h - finds the rank that strayed, from what all ranks say about their collectives.
//
// Internal, no Torch. It runs beside rank 0. No sockets, no clock: what the ranks say comes in as
// calls, and as soon as it is certain that a collective can never complete, `finding` says whose
// doing that is. A rank that is merely busy is never blamed.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::detail {

/// A collective as a rank tells of it.
struct ToldCall {
  std::uint64_t sequence = 0;  ///< 0: none yet
  std::uint64_t signature = 0;
  std::string text = {};  ///< "gather float32[4] at train.cpp:31"
  bool complete = false;
  /// The oldest one that the rank had not completed when it told this; the next one where it had
  /// completed all. Several can be under way, and a later one be complete before an earlier one.
  std::uint64_t open = 0;
};

struct JuryTimes {
  using Milliseconds = std::chrono::milliseconds;
  /// Ranks that have not said what they do in a disputed collective are waited for this long.
  Milliseconds dispute = Milliseconds(300);
  /// A rank that says nothing at all for this long is blamed.
  Milliseconds silence = Milliseconds(10'000);
  /// A failure of the transport is a consequence: its cause is waited for this long.
  Milliseconds transport = Milliseconds(2'000);
  /// When a rank that others wait for is named, without blame.
  Milliseconds notice = Milliseconds(60'000);
  /// How long the transport lets a collective wait: the timeout setting of the group.
  Milliseconds timeout = std::chrono::minutes(30);
};

/// What is wrong. The same for all ranks.
struct Finding {
  int rank = -1;  ///< -1 where ranks disagree and none is in the minority
  std::string text = {};
};

class Jury {
 public:
  using Clock = std::chrono::steady_clock;

  /// `names[r]` is how rank r is called in messages: "rank 1 (host a)".
  Jury(std::vector<std::string> names, const JuryTimes& times, Clock::time_point now);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks_.size()); }
  /// Another name for a rank.
  void call(int rank, const std::string& name) { ranks_.at(rank).name = name; }

  // What a rank says, or what happens to it.
  void heard(int rank, Clock::time_point now);
  /// It has been waiting in `call` for a while.
  void waits(int rank, const ToldCall& call, Clock::time_point now);
  /// It waits no more.
  void moves_on(int rank);
  /// Asked by us, or by itself: what it did in collective number `call.sequence`, or, where it has
  /// not come so far, its latest one.
  void tells(int rank, const ToldCall& call, Clock::time_point now);
  /// It ended in an orderly way, after `last`.
  void left(int rank, const ToldCall& last);
  void threw(int rank, const std::string& message);
  /// Its connection is closed without farewell.
  void died(int rank);
  void transport_failed(int rank, const ToldCall& call, const std::string& message,
                        Clock::time_point now);
  /// All ranks were out of reach, because we were: forget what their silence seemed to say.
  void forgive(Clock::time_point now);
  /// Its state as the system of its host tells it, e.g. "stopped", and its exact last call.
  void seen(int rank, const std::string& state, const ToldCall& last);

  /// The latest call that a rank told of.
  [[nodiscard]] const ToldCall& latest(int rank) const { return ranks_.at(rank).latest; }
  /// The collective that somebody waits in and all are to tell about; 0: none.
  [[nodiscard]] std::uint64_t disputed() const;
  /// Who has not said a word for half of the time that it is given: its host should be asked.
  [[nodiscard]] std::vector<int> suspects(Clock::time_point now) const;

  [[nodiscard]] std::optional<Finding> finding(Clock::time_point now);
  /// "rank 1 is waited for ...", once per collective.
  [[nodiscard]] std::optional<std::string> notice(Clock::time_point now);

 private:
  struct Rank {
    std::string name;
    Clock::time_point heard;
    std::optional<ToldCall> waits = std::nullopt;
    Clock::time_point waits_since = {};
    std::map<std::uint64_t, ToldCall> told = {};
    ToldCall latest = {};
    std::uint64_t open = 0;
    bool has_left = false;
    bool is_dead = false;
    std::string state = {};
    std::optional<std::string> exception = std::nullopt;
    std::optional<std::string> transport = std::nullopt;
    ToldCall transport_in = {};
    Clock::time_point transport_at = {};
    std::uint64_t last_broken = 0;  // the latest call that the transport failed in

    void learn(const ToldCall& call);
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
  JuryTimes times_;
  std::map<std::uint64_t, Clock::time_point> disputes_;  // since when signatures differ
  std::uint64_t noticed_ = 0;
};

}  // namespace accelerate::detail
