// src/sharding/tape.h - the collectives of a phase (a forward, a backward), in an order that all
// processes keep.
//
// The first pass records which unit is gathered and which gradients are reduced, in order. When all
// processes have recorded the same, `learn` makes a schedule of it, with gathers moved ahead of
// their use. From then on processes carry out the schedule, whatever they use: the order of
// collectives depends on the tape alone. A process that skips a unit gathers it in vain, and
// reduces zeros; it never lets others wait.
//
// Knows nothing of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::sharding {

struct TapeEvent {
  enum class Kind : std::uint8_t { kGather, kReduce };
  Kind kind = Kind::kGather;
  /// Of a unit for a gather, of a flat buffer for a reduction.
  std::size_t index = 0;

  bool operator==(const TapeEvent&) const = default;
};

class ACCELERATE_API Tape {
 public:
  /// `ahead`: how many gathers are under way before their use. They begin where a unit is used, or
  /// `after_reductions` where its gradients are reduced.
  explicit Tape(std::int64_t ahead = 0, bool after_reductions = false)
      : ahead_(ahead), after_reductions_(after_reductions) {}

  /// A pass begins.
  void begin();
  [[nodiscard]] bool is_learned() const { return learned_; }

  // ---- while it is not learned
  void record(TapeEvent event) { events_.push_back(event); }
  /// Of what was recorded.
  [[nodiscard]] std::uint64_t hash() const;
  /// Makes the schedule; the pass that recorded it is over.
  void learn();
  /// Each pass records, and none is learned: passes are too different.
  [[nodiscard]] bool is_given_up() const { return failures_ > kMostFailures; }

  // ---- when it is learned
  struct Gather {
    std::size_t unit = 0;
    /// The part of the schedule up to and with what is gathered ahead at its use.
    std::size_t until = 0;
  };
  /// The place among all gathers of the next one of `unit`; nullopt if this pass has no further
  /// one. Then the next pass records the tape again.
  [[nodiscard]] std::optional<std::size_t> reach(std::size_t unit);
  [[nodiscard]] const Gather& gather(std::size_t ordinal) const { return gathers_[ordinal]; }
  /// The part of the schedule that a pass begins with: what is gathered ahead of the first use.
  [[nodiscard]] std::size_t start() const { return start_; }
  [[nodiscard]] std::size_t end() const { return schedule_.size(); }
  [[nodiscard]] std::size_t position() const { return position_; }
  /// The event at `position`, which moves on.
  TapeEvent take();
  /// How many gathers `take` has returned.
  [[nodiscard]] std::size_t taken_gathers() const { return taken_gathers_; }
  /// The event that `take` would return, or null.
  [[nodiscard]] const TapeEvent* next() const {
    return position_ < schedule_.size() ? &schedule_[position_] : nullptr;
  }
  /// Whether the pass still reduces the buffer.
  [[nodiscard]] bool reduces_later(std::size_t buffer) const;

 private:
  static constexpr int kMostFailures = 3;

  std::int64_t ahead_;
  bool after_reductions_;
  bool learned_ = false;
  bool missed_ = false;  // a pass used a unit that the tape does not have
  int failures_ = 0;
  std::vector<TapeEvent> events_ = {};    // as recorded
  std::vector<TapeEvent> schedule_ = {};  // with gathers moved ahead
  std::vector<Gather> gathers_ = {};
  std::size_t start_ = 0;
  std::size_t position_ = 0;
  std::size_t next_gather_ = 0;
  std::size_t taken_gathers_ = 0;
};

}  // namespace accelerate::detail::sharding
