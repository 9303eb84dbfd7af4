// src/comm/side_channel.h - the side channel of a group: every rank reports its calls to rank 0,
// beside the data, and rank 0 tells all ranks when one of them has diverged.
//
// Internal, no Torch. One thread per group and process, and one connection from each rank to rank
// 0, where the desync detector runs. Traffic is low: a heartbeat twice a second, and calls are
// reported only when a rank has waited for 100 ms.
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
#include "comm/desync_detector.h"

namespace accelerate::detail::comm {

struct SideChannelOptions {
  int rank = 0;
  int size = 1;
  /// The ranks of the group in the run; empty for the group of the run itself.
  std::vector<int> global_ranks = {};
  /// Where other ranks reach this one; the address of rank 0 is published.
  std::string address = "127.0.0.1";
  DetectorTimes times = {};
  std::chrono::milliseconds beat = std::chrono::milliseconds(500);
  /// A call that has not completed after this is reported to rank 0.
  std::chrono::milliseconds stall = std::chrono::milliseconds(100);
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  /// ", rank 5 of the run" for a rank of a sub-group, else "".
  [[nodiscard]] std::string place_of(int of_rank) const;
};

/// Where the ranks of a group exchange addresses before they are connected: a c10d store.
struct Blackboard {
  std::function<void(const std::string& key, const std::string& value)> set;
  /// Waits until the key is set.
  std::function<std::string(const std::string& key)> get;
};

class SideChannel {
 public:
  /// Collective. `on_finding` runs once, on the side thread, when a rank has diverged; `on_notice`
  /// runs on rank 0, with a text for the log. Throws `CommError` when rank 0 cannot be reached.
  SideChannel(const SideChannelOptions& options, const Blackboard& blackboard,
              std::function<void(const Finding&)> on_finding,
              std::function<void(const std::string&)> on_notice);
  /// As `end`.
  ~SideChannel();
  SideChannel(const SideChannel&) = delete;
  SideChannel& operator=(const SideChannel&) = delete;

  /// Sends the farewell and waits for the side thread, never for other ranks. No callback runs
  /// after it has returned; called by a callback it does not wait, and that callback is the last.
  void end() noexcept;

  [[nodiscard]] CallLog& log() noexcept;

  /// This rank ends in an orderly way; ranks that wait for it later report it as missing.
  void farewell() noexcept;
  /// This rank ends by an exception.
  void threw(const std::string& message) noexcept;
  /// The transport failed under a call.
  void transport_failed(const Ticket& ticket, const std::string& message);

  [[nodiscard]] bool failed() const noexcept;
  /// The finding; waits up to `patience` for it.
  [[nodiscard]] std::optional<Finding> finding(std::chrono::milliseconds patience) const;

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
};

}  // namespace accelerate::detail::comm
