// src/comm/watch.h - the side channel of a group: every rank tells rank 0 what it does, beside the
// data, and all learn from it when one has strayed.
//
// Internal, no Torch. One thread per group and process, and one connection from each rank to rank
// 0, where the jury sits. It is quiet: a beat twice a second, and calls are told only when somebody
// has waited for 100 ms.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/call_log.h"
#include "comm/jury.h"

namespace accelerate::detail {

struct WatchOptions {
  int rank = 0;
  int size = 1;
  /// The ranks of the group in the run; empty for the group of the run itself.
  std::vector<int> global_ranks = {};
  /// Where other ranks reach this one; the address of rank 0 is published.
  std::string address = "127.0.0.1";
  JuryTimes times = {};
  std::chrono::milliseconds beat = std::chrono::milliseconds(500);
  /// A call that has not completed after this is told to the others.
  std::chrono::milliseconds stall = std::chrono::milliseconds(100);
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  /// ", rank 5 of the run" for a rank of a sub-group, else "".
  [[nodiscard]] std::string place_of(int of_rank) const;
};

/// How the ranks of a group exchange a few words before they are connected: a c10d store.
struct Blackboard {
  std::function<void(const std::string& key, const std::string& value)> set;
  /// Waits until somebody has set it.
  std::function<std::string(const std::string& key)> get;
};

class Watch {
 public:
  /// Collective. `on_finding` runs once, on the side thread, when a finding is there; `on_notice`
  /// on rank 0, with what people should know. Throws `CommError` when rank 0 cannot be reached.
  Watch(const WatchOptions& options, const Blackboard& blackboard,
        std::function<void(const Finding&)> on_finding,
        std::function<void(const std::string&)> on_notice);
  /// Says farewell and waits for the side thread, never for other ranks.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  [[nodiscard]] CallLog& log() noexcept;

  /// This rank ends in an orderly way: others that wait for it later are right to complain.
  void farewell() noexcept;
  /// This rank ends by an exception.
  void threw(const std::string& message) noexcept;
  /// The transport failed under a call.
  void transport_failed(const Ticket& ticket, const std::string& message);

  [[nodiscard]] bool failed() const noexcept;
  /// What was found; waits up to `patience` for it.
  [[nodiscard]] std::optional<Finding> finding(std::chrono::milliseconds patience) const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace accelerate::detail
