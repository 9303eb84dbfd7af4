// src/checkpoint/exchange.h - how the processes that write a checkpoint agree.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <source_location>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace accelerate::detail::checkpoint {

/// Collective. Calls the function on each process and returns what all of them gave, in rank order.
/// If one throws, all do: it the same exception, the others a `CommError` with its message.
using Exchange =
    std::function<std::vector<std::string>(const std::function<std::string()>& encode)>;

/// By a collective of the process group, which names a process that does not take part.
[[nodiscard]] Exchange exchange_by_collective(const char* operation, std::source_location where);

struct StoreExchange {
  c10::intrusive_ptr<c10d::Store> store;
  /// Of the keys.
  std::string prefix;
  int rank = 0;
  int size = 1;
  /// How long a process that is alive is waited for.
  std::chrono::milliseconds timeout;
};

/// Rounds of an exchange through keys of the store, so that it may run beside collectives of the
/// training thread. All processes have one at the same time. Each adds to a counter while it is
/// alive: a process that has died is noticed within some seconds.
class StoreRounds {
 public:
  /// `stop` ends waiting for others.
  StoreRounds(StoreExchange where, std::stop_token stop);
  StoreRounds(const StoreRounds&) = delete;
  StoreRounds& operator=(const StoreRounds&) = delete;

  /// As `Exchange`. Throws `CommError` also if a process is gone, does not answer within the
  /// timeout, or `stop` is requested.
  [[nodiscard]] std::vector<std::string> exchange(const std::function<std::string()>& encode);

  /// After the last round. Rank 0, which may serve the store, returns when all have read what they
  /// need, or some seconds later, and removes the keys.
  void finish() noexcept;

 private:
  class Watch;
  [[nodiscard]] std::string key(int round, int rank) const;
  [[nodiscard]] std::string beat_key(int rank) const;
  void set(int round, const std::string& answer);
  [[nodiscard]] std::string answer_of(int rank) const;
  [[nodiscard]] std::vector<std::string> all_answers();

  StoreExchange where_;
  std::stop_token stop_;
  int round_ = 0;
  std::jthread beat_;
};

}  // namespace accelerate::detail::checkpoint
