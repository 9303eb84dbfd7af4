// src/state/roster.h - the ranks that form a group: which have arrived, and which are missing.
//
// Internal. While a group is made, the ranks read in a store what the others have written there.
// All such waits go through here: they end at the timeout setting, or when a rank has died, and all
// ranks then throw the same error, which names the missing ranks.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelerate/fwd.h"
#include "state/countdown.h"
#include "state/startup_watch.h"

namespace accelerate::detail::state {

class Roster {
 public:
  /// Registers this rank. Two groups need stores with different prefixes.
  Roster(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
         std::chrono::milliseconds timeout);

  /// The roster with another prefix of the store for `publish` and `read`.
  [[nodiscard]] Roster under(const std::string& prefix) const;

  /// Collective. Returns when all ranks have registered.
  void await_all(Countdown countdown) const;

  /// Waits for and returns what `rank` publishes under `key`.
  [[nodiscard]] std::string read(const std::string& key, int rank) const;
  /// Waits for and returns what each rank publishes under `key`/rank.
  [[nodiscard]] std::vector<std::string> read_all(const std::string& key) const;
  /// Returns when all ranks from `first` on have published something under `key`/rank.
  void await_each(const std::string& key, int first) const;
  void publish(const std::string& key, const std::string& text) const;

  /// Throws `CommError` with `message`, or with the name of a rank that has ended and may be the
  /// cause.
  [[noreturn]] void fail(const std::string& message) const;

 private:
  struct Awaited {
    std::string key;
    int rank;
  };
  enum class Step { kArrival, kLater };

  [[nodiscard]] std::vector<Awaited> from(int first, const std::string& key) const;
  void await(const std::vector<Awaited>& awaited, Countdown countdown, Step step) const;
  struct HostProcess {
    int pid;
    std::string text;  // "host, process 4711"
  };

  void look_around(const std::vector<Awaited>& awaited, Countdown& countdown, Step step,
                   StoppedProcesses& stopped) const;
  [[nodiscard]] bool come(std::span<const Awaited>& rest) const;
  [[nodiscard]] std::vector<int> missing_of(const std::vector<Awaited>& awaited) const;
  [[nodiscard]] bool is_first_of_those_here(const std::vector<Awaited>& awaited) const;
  [[nodiscard]] std::optional<HostProcess> process_on_this_host(int rank) const;
  [[nodiscard]] std::string process_that_ended(int rank) const;
  void refuse_stopped(const std::vector<int>& missing, StoppedProcesses& stopped) const;
  void refuse_what_is_given_up() const;
  void stay_until_all_have_read(int except) const;
  /// Makes all ranks throw this error.
  [[noreturn]] void give_up(const std::string& why, int blamed) const;
  [[noreturn]] void give_up_for(int ended, const std::string& process) const;

  c10::intrusive_ptr<c10d::Store> store_;     // for `publish` and `read`
  c10::intrusive_ptr<c10d::Store> presence_;  // the registered ranks, and the error of all
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
};

}  // namespace accelerate::detail::state
