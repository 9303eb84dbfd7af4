// src/comm/call_queue.h - carries out calls that cannot be interrupted, one after the other.
//
// Internal. All ranks call collectives in the same order, so there is one queue. The thread that
// waits for a call works at the front of the queue as long as its own is not done; only calls that
// nobody waits for need the thread of the queue, which is started when it is first needed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/shm_work.h"

namespace accelerate::detail {

struct QueuedCall {
  /// Throws what went wrong.
  std::function<void()> carry_out = {};
  /// Called once, with null for success.
  std::function<void(std::exception_ptr)> settle = {};
  /// `carry_out` ends by then.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  bool settled = false;  // for the queue alone
};

using QueuedCallPtr = std::shared_ptr<QueuedCall>;

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  using Clock = std::chrono::steady_clock;

  CallQueue() = default;
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Fails at once after `close`.
  void push(const QueuedCallPtr& call);
  /// Works until the call is settled; false when it is not by then.
  [[nodiscard]] bool wait(const QueuedCallPtr& call, Clock::time_point until);
  /// Lets the queue's own thread do what is to be done.
  void call_worker();
  /// Calls that have not begun fail. `interrupt` ends the one that has. To be called before the
  /// last owner goes.
  void close(const std::function<void()>& interrupt) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  void run_front(Lock& lock);
  void settle(Lock& lock, const QueuedCallPtr& call, const std::exception_ptr& error);
  void work();

  std::mutex mutex_;
  std::deque<QueuedCallPtr> queue_;
  bool busy_ = false;  // somebody works at the front
  bool closed_ = false;
  bool worker_wanted_ = false;
  std::condition_variable changed_;
  std::thread worker_;
};

/// What a call returns that is in a queue.
class QueuedWork final : public ShmWork {
 public:
  QueuedWork(About about, std::shared_ptr<CallQueue> queue, QueuedCallPtr call)
      : ShmWork(std::move(about)), queue_(std::move(queue)), call_(std::move(call)) {}

 protected:
  bool bring_about(CallQueue::Clock::time_point until) override {
    return queue_->wait(call_, until);
  }
  void look() override {}
  void hand_over() override {}  // whoever asks for it later has called the worker already

 private:
  std::shared_ptr<CallQueue> queue_;
  QueuedCallPtr call_;
};

}  // namespace accelerate::detail
