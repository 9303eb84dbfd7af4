// src/state/roll.h - the ranks that make a group: who is here, and who is missing.
//
// Internal. While a group is made, the ranks read in a store what the others have written there.
// All such waits go through here: they end at the timeout setting, or when a rank has died, and all
// ranks then throw the same error, which names who is missing.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "accelerate/fwd.h"
#include "state/countdown.h"

namespace accelerate::detail {

class Roll {
 public:
  /// Writes down that this rank is here. Two groups need stores with different prefixes.
  Roll(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
       std::chrono::milliseconds timeout);

  /// The same ranks, at a part of the store.
  [[nodiscard]] Roll under(const std::string& prefix) const;

  /// Collective. Returns when all ranks are here.
  void await_all(Countdown countdown) const;

  /// What `rank` says under `key`, as soon as it does.
  [[nodiscard]] std::string hear(const std::string& key, int rank) const;
  /// What each rank says under `key`/rank.
  [[nodiscard]] std::vector<std::string> hear_all(const std::string& key) const;
  /// Returns when all ranks from `first` on have said something under `key`/rank.
  void await_each(const std::string& key, int first) const;
  void say(const std::string& key, const std::string& text) const;

  /// A step of this rank failed with `message`. Throws `CommError` with it, or with the name of a
  /// rank that has ended and may be the cause.
  [[noreturn]] void fail(const std::string& message) const;

 private:
  struct Awaited {
    std::string key;
    int rank;
  };
  enum class Step { kArrival, kLater };

  [[nodiscard]] std::vector<Awaited> from(int first, const std::string& key) const;
  void await(const std::vector<Awaited>& awaited, Countdown countdown, Step step) const;
  void look_around(const std::vector<Awaited>& awaited, Countdown& countdown, Step step) const;
  [[nodiscard]] bool come(std::span<const Awaited>& rest) const;
  [[nodiscard]] std::vector<int> missing_of(const std::vector<Awaited>& awaited) const;
  [[nodiscard]] bool is_first_of_those_here(const std::vector<Awaited>& awaited) const;
  [[nodiscard]] std::string process_that_ended(int rank) const;
  void refuse_what_is_given_up() const;
  void stay_until_all_have_read(int except) const;
  /// All ranks throw this.
  [[noreturn]] void give_up(const std::string& why, int blamed) const;
  [[noreturn]] void give_up_for(int ended, const std::string& process) const;

  c10::intrusive_ptr<c10d::Store> store_;     // for what the ranks say
  c10::intrusive_ptr<c10d::Store> presence_;  // for who is here, and what all give up for
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
};

}  // namespace accelerate::detail
