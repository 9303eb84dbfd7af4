// src/comm/call_executor.h - carries out the collectives of one group, one after the other.
//
// Internal, without Torch. All ranks call collectives in the same order, so there is one queue. The
// call at its front is carried out by whichever thread is available: the one that submits it, the
// one that waits for it, or the worker thread, which is started when it is first needed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/guard.h"
#include "comm/shm_segment.h"
#include "core/processes.h"

namespace accelerate::detail::comm {

/// A collective as the executor carries it out. `advance` and `release` run without its lock, by
/// one thread at a time.
class ExecutorCall {
 public:
  virtual ~ExecutorCall() = default;

  /// Continues the call; returns false if it is incomplete at the end of `budget`. Throws if the
  /// call has failed.
  [[nodiscard]] virtual bool advance(const WaitBudget& budget) = 0;
  /// Called when the call has ended: drops the caller's tensors.
  virtual void release() noexcept = 0;
  /// False if `advance` ignores the budget and returns only when the call has ended.
  [[nodiscard]] virtual bool pausable() const noexcept { return true; }
  /// Whether the other ranks need nothing more from this one after the first `advance`.
  [[nodiscard]] virtual bool single_round() const noexcept { return false; }

  const char* kind = "";  ///< "all_reduce"; a literal
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Called once, with null for success, without the lock of the executor.
  std::function<void(std::exception_ptr)> on_end = {};
  Ticket ticket = {};    ///< set by the executor
  bool settled = false;  ///< owned by the executor: `on_end` has returned
};

using ExecutorCallPtr = std::shared_ptr<ExecutorCall>;

enum class Schedule {
  kInline,       ///< completed on the caller's thread before `submit` returns
  kStartInline,  ///< started on the caller's thread; completed by a thread that waits for it, by
                 ///< the next `submit`, or by the worker if neither happens
  kBackground,   ///< carried out by the worker
};

class CallExecutor : public std::enable_shared_from_this<CallExecutor> {
 public:
  CallExecutor(int rank, std::shared_ptr<CallGuard> guard)
      : rank_(rank), guard_(std::move(guard)) {}
  ~CallExecutor() = default;
  CallExecutor(const CallExecutor&) = delete;
  CallExecutor& operator=(const CallExecutor&) = delete;

  /// Announces the call to the guard and queues it; both under one lock, so that the calls of
  /// several threads have the same order in the log and in the queue. Throws `StateError` after
  /// `close` and, as `wait` does, in a forked process; and what `CallGuard::enter` throws.
  void submit(const ExecutorCallPtr& call, const CallFacts& facts, Schedule schedule);
  /// Helps until the call has ended; returns false if it has not by `until`.
  [[nodiscard]] bool wait(const ExecutorCallPtr& call, WaitBudget::Clock::time_point until);
  /// Does what can be done without waiting.
  void poll();
  /// Lets the worker carry out what is queued.
  void run_in_background();
  /// Ends all calls with `CommError`. `interrupt` makes the `advance` that is running return. To be
  /// called before the last owner is destroyed.
  void close(const std::function<void()>& interrupt) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] bool run_front(Lock& lock, WaitBudget budget);
  [[nodiscard]] bool wait(Lock& lock, const ExecutorCallPtr& call,
                          WaitBudget::Clock::time_point until);
  void settle(Lock& lock, const ExecutorCallPtr& call, const std::exception_ptr& error);
  void notify();
  void start_worker();
  void call_worker();
  void leave_to_waiters();
  void work();

  OwnerProcess owner_;
  int rank_;
  std::shared_ptr<CallGuard> guard_;
  std::mutex mutex_;
  std::deque<ExecutorCallPtr> queue_;
  bool busy_ = false;  // a thread works on the front of the queue
  bool closed_ = false;
  bool worker_wanted_ = false;
  bool left_to_waiters_ = false;  // a call was started that no thread may ever wait for
  std::uint64_t ended_ = 0;       // number of calls that have ended
  std::condition_variable changed_;
  std::condition_variable for_worker_;
  std::thread worker_;
};

}  // namespace accelerate::detail::comm
