#include "comm/call_executor.h"

#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using Clock = WaitBudget::Clock;

constexpr auto kDoNotWait = Clock::time_point::min();
constexpr auto kForever = Clock::time_point::max();
// A started call that makes no progress for this long is taken over by the worker: no thread seems
// to wait for it.
constexpr auto kAbandoned = std::chrono::milliseconds(10);

}  // namespace

void CallExecutor::submit(const ExecutorCallPtr& call, const CallFacts& facts, Schedule schedule) {
  owner_.refuse_forked_copy(call->kind);  // its threads, which may hold the lock, are not there
  Lock lock(mutex_);
  if (schedule == Schedule::kStartInline) {
    // The call before must be complete; mostly it is, or almost.
    while (!busy_ && !queue_.empty() && run_front(lock, {.sleep = false})) {
    }
  }
  if (closed_) {
    throw StateError(str(call->kind, ": the process group was destroyed. Make a new one."));
  }
  call->ticket = guard_->enter(facts);
  const bool clear = !busy_ && queue_.empty();
  queue_.push_back(call);
  if (schedule == Schedule::kInline) {
    static_cast<void>(wait(lock, call, kForever));
  } else if (schedule == Schedule::kBackground || !clear) {
    call_worker();
  } else if (call->single_round()) {
    // Once this rank has arrived, only our caller needs the rest.
    if (!run_front(lock, {.until = kDoNotWait})) leave_to_waiters();
  } else if (!run_front(lock, {.sleep = false})) {
    call_worker();  // the other ranks need this one for the rounds that follow
  }
}

bool CallExecutor::wait(const ExecutorCallPtr& call, Clock::time_point until) {
  owner_.refuse_forked_copy(call->kind);
  Lock lock(mutex_);
  return wait(lock, call, until);
}

bool CallExecutor::wait(Lock& lock, const ExecutorCallPtr& call, Clock::time_point until) {
  // A call that cannot pause is left to other threads by a caller with less time than it may take.
  const bool helps = call->pausable() || until == kForever || until - Clock::now() >= call->timeout;
  const auto can_help = [&] { return helps && !busy_ && !queue_.empty(); };
  const auto ready = [&] { return call->settled || can_help(); };
  while (!call->settled) {
    if (can_help()) {
      if (!run_front(lock, {.until = until}) && Clock::now() >= until) break;
    } else if (until == kForever) {
      changed_.wait(lock, ready);
    } else if (!changed_.wait_until(lock, until, ready)) {
      break;
    }
  }
  return call->settled;
}

void CallExecutor::poll() {
  if (owner_.is_forked_copy()) return;
  Lock lock(mutex_);
  while (!busy_ && !queue_.empty() && queue_.front()->pausable() &&
         run_front(lock, {.until = kDoNotWait})) {
  }
}

void CallExecutor::run_in_background() {
  const Lock lock(mutex_);
  if (!queue_.empty() && !closed_) call_worker();
}

void CallExecutor::start_worker() {
  if (!worker_.joinable()) worker_ = std::thread([self = shared_from_this()] { self->work(); });
}

void CallExecutor::call_worker() {
  worker_wanted_ = true;
  start_worker();
  for_worker_.notify_one();
}

// Waking the worker takes longer than a small collective, so it is notified once and then looks
// again by itself.
void CallExecutor::leave_to_waiters() {
  if (std::exchange(left_to_waiters_, true)) return;
  start_worker();
  for_worker_.notify_one();
}

void CallExecutor::work() {
  Lock lock(mutex_);
  const auto called = [&] { return closed_ || (worker_wanted_ && !busy_ && !queue_.empty()); };
  for (;;) {
    for_worker_.wait(lock, [&] { return called() || left_to_waiters_; });
    if (!called()) {
      const auto ended_before = ended_;
      for_worker_.wait_for(lock, kAbandoned, called);
      if (!queue_.empty() && !busy_ && ended_ == ended_before) worker_wanted_ = true;
      left_to_waiters_ = !queue_.empty() && !worker_wanted_;
    }
    if (closed_) return;
    if (called()) static_cast<void>(run_front(lock, {}));
  }
}

void CallExecutor::notify() {
  changed_.notify_all();
  if (queue_.empty()) worker_wanted_ = false;
  if (worker_wanted_) for_worker_.notify_one();
}

// True when the call at the front has ended.
bool CallExecutor::run_front(Lock& lock, WaitBudget budget) {
  const auto call = queue_.front();
  budget.timeout = call->timeout;
  busy_ = true;
  lock.unlock();
  bool ended = true;
  std::exception_ptr error;
  try {
    ended = call->advance(budget);
  } catch (...) {
    error = std::current_exception();
  }
  if (ended) {
    call->release();
    guard_->leave(call->ticket);
  }
  lock.lock();
  busy_ = false;
  if (ended) {
    queue_.pop_front();
    ++ended_;
    if (!queue_.empty()) notify();  // `on_end` may take long
    settle(lock, call, error);
  }
  notify();
  return ended;
}

// Without the lock and with `busy_` unset: `on_end` may submit the next call. Threads that wait for
// this one continue when it has returned.
void CallExecutor::settle(Lock& lock, const ExecutorCallPtr& call,
                          const std::exception_ptr& error) {
  lock.unlock();
  if (const auto on_end = std::exchange(call->on_end, nullptr)) on_end(error);
  lock.lock();
  call->settled = true;
}

void CallExecutor::close(const std::function<void()>& interrupt) noexcept {
  std::deque<ExecutorCallPtr> rest;
  {
    Lock lock(mutex_);
    if (std::exchange(closed_, true)) return;
    for_worker_.notify_all();
    lock.unlock();
    interrupt();
    lock.lock();
    changed_.wait(lock, [&] { return !busy_; });
    rest = std::exchange(queue_, {});
  }
  for (const auto& call : rest) {
    call->release();
    guard_->leave(call->ticket);
    const auto error = std::make_exception_ptr(CommError(
        str(call->kind, ": rank ", rank_, " closed the group while the call was under way.")));
    Lock lock(mutex_);
    settle(lock, call, error);
    changed_.notify_all();
  }
  if (!worker_.joinable()) return;
  // `on_end` runs on the worker and may destroy the last owner of the executor.
  if (worker_.get_id() == std::this_thread::get_id()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

}  // namespace accelerate::detail::comm
