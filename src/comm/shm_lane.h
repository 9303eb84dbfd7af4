// src/comm/shm_lane.h - carries out the collectives of one group, one after the other.
//
// Internal, without Torch. All ranks call collectives in the same order, so there is one queue, and
// whoever is at hand works at its front: the thread that calls, the one that waits, or the lane's
// own, which is started when it is first needed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/guard.h"
#include "comm/shm_collectives.h"
#include "comm/shm_segment.h"

namespace accelerate::detail {

struct ShmOperation {
  ShmCollective rounds;
  const char* kind = "";
  Ticket ticket = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Called after the last round of a success, before `settle`.
  std::function<void()> after = {};
  /// Called once, with null for success.
  std::function<void(std::exception_ptr)> settle = {};

  // For the lane alone.
  std::int64_t round = 0;
  bool arrived = false;
  bool settled = false;
  std::exception_ptr error = nullptr;
};

using ShmOperationPtr = std::shared_ptr<ShmOperation>;

enum class ShmHaste {
  kNow,    ///< on this thread, to its end
  kSoon,   ///< begun on this thread; whoever waits for it, or for the next one, ends it, and the
           ///< lane's thread when nobody does
  kLater,  ///< on the lane's thread
};

class ShmLane : public std::enable_shared_from_this<ShmLane> {
 public:
  ShmLane(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard);
  ~ShmLane() = default;
  ShmLane(const ShmLane&) = delete;
  ShmLane& operator=(const ShmLane&) = delete;

  /// Throws `StateError` after `close`.
  void submit(const ShmOperationPtr& operation, ShmHaste haste);
  /// Works until the operation is settled; false when it is not by then.
  [[nodiscard]] bool wait(const ShmOperationPtr& operation, ShmPatience::Clock::time_point until);
  /// Does what can be done without waiting.
  void look();
  /// Lets the lane's own thread do what is to be done.
  void hand_over();
  /// Ends everything that is under way with an error. To be called before the last owner goes.
  void close() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] bool run_front(Lock& lock, ShmPatience patience);
  [[nodiscard]] bool advance(ShmOperation& operation, const ShmPatience& patience);
  [[nodiscard]] bool wait(Lock& lock, const ShmOperationPtr& operation,
                          ShmPatience::Clock::time_point until);
  [[nodiscard]] std::exception_ptr failure(const ShmOperation& operation,
                                           const ShmOutcome& outcome) const;
  [[nodiscard]] std::exception_ptr verdict(const ShmOperation& operation, const std::string& what,
                                           int rank) const;
  void settle(Lock& lock, const ShmOperationPtr& operation);
  void start_worker();
  void call_worker();
  void leave_to_its_caller();
  void work();

  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<CallGuard> guard_;
  std::mutex mutex_;
  std::deque<ShmOperationPtr> queue_;
  bool busy_ = false;  // somebody works at the front
  bool closed_ = false;
  bool worker_wanted_ = false;
  bool left_to_callers_ = false;  // something that may be forgotten was begun
  std::uint64_t ended_ = 0;       // how many operations have come to their end
  std::condition_variable changed_;
  std::condition_variable for_worker_;
  std::thread worker_;
};

}  // namespace accelerate::detail
