#include "comm/shm_lane.h"

#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using Clock = ShmPatience::Clock;

constexpr auto kJustLook = Clock::time_point::min();
constexpr auto kForever = Clock::time_point::max();
// After this long in which nothing moved, nobody seems to wait for what was begun.
constexpr auto kForgotten = std::chrono::milliseconds(10);

}  // namespace

ShmLane::ShmLane(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard)
    : segment_(std::move(segment)), guard_(std::move(guard)) {}

void ShmLane::submit(const ShmOperationPtr& operation, ShmHaste haste) {
  Lock lock(mutex_);
  if (closed_) {
    throw StateError(str(operation->kind, ": the process group was destroyed. Make a new one."));
  }
  if (haste == ShmHaste::kSoon) {
    // The step before must be complete; it mostly is, or all but.
    while (!busy_ && !queue_.empty() && run_front(lock, {.sleep = false})) {
    }
  }
  const bool clear = !busy_ && queue_.empty();
  queue_.push_back(operation);
  if (haste == ShmHaste::kNow) {
    static_cast<void>(wait(lock, operation, kForever));
  } else if (haste == ShmHaste::kLater || !clear) {
    call_worker();
  } else if (operation->rounds->last(0)) {
    // When we have arrived, nobody but our caller needs us for this one.
    if (!run_front(lock, {.until = kJustLook})) leave_to_its_caller();
  } else if (!run_front(lock, {.sleep = false})) {
    call_worker();  // the others need us for the rounds that follow
  }
}

bool ShmLane::wait(const ShmOperationPtr& operation, Clock::time_point until) {
  Lock lock(mutex_);
  return wait(lock, operation, until);
}

bool ShmLane::wait(Lock& lock, const ShmOperationPtr& operation, Clock::time_point until) {
  const auto something_to_do = [&] { return operation->settled || (!busy_ && !queue_.empty()); };
  while (!operation->settled) {
    if (!busy_ && !queue_.empty()) {
      if (!run_front(lock, {.until = until}) && Clock::now() >= until) break;
    } else if (until == kForever) {
      changed_.wait(lock, something_to_do);
    } else if (!changed_.wait_until(lock, until, something_to_do)) {
      break;
    }
  }
  return operation->settled;
}

void ShmLane::look() {
  Lock lock(mutex_);
  while (!busy_ && !queue_.empty() && run_front(lock, {.until = kJustLook})) {
  }
}

void ShmLane::hand_over() {
  const Lock lock(mutex_);
  if (!queue_.empty() && !closed_) call_worker();
}

void ShmLane::start_worker() {
  if (!worker_.joinable()) worker_ = std::thread([self = shared_from_this()] { self->work(); });
}

void ShmLane::call_worker() {
  worker_wanted_ = true;
  start_worker();
  for_worker_.notify_one();
}

// Waking the worker takes longer than a small collective, so it is told once and then looks again
// by itself.
void ShmLane::leave_to_its_caller() {
  if (std::exchange(left_to_callers_, true)) return;
  start_worker();
  for_worker_.notify_one();
}

void ShmLane::work() {
  Lock lock(mutex_);
  const auto called = [&] { return closed_ || (worker_wanted_ && !busy_ && !queue_.empty()); };
  for (;;) {
    for_worker_.wait(lock, [&] { return called() || left_to_callers_; });
    if (!called()) {
      const auto ended_before = ended_;
      for_worker_.wait_for(lock, kForgotten, called);
      if (!queue_.empty() && !busy_ && ended_ == ended_before) worker_wanted_ = true;
      left_to_callers_ = !queue_.empty() && !worker_wanted_;
    }
    if (closed_) return;
    if (called()) static_cast<void>(run_front(lock, {}));
  }
}

// True when the operation at the front has come to its end.
bool ShmLane::run_front(Lock& lock, ShmPatience patience) {
  const auto operation = queue_.front();
  patience.timeout = operation->timeout;
  busy_ = true;
  lock.unlock();
  const bool ended = advance(*operation, patience);
  lock.lock();
  busy_ = false;
  if (ended) {
    queue_.pop_front();
    ++ended_;
    settle(lock, operation);
  }
  changed_.notify_all();
  if (queue_.empty()) worker_wanted_ = false;
  if (worker_wanted_) for_worker_.notify_one();
  return ended;
}

// Without the lock, and not as the one who works at the front: a callback of the caller may call
// the next collective. Those who wait for this one go on when the callback is through.
void ShmLane::settle(Lock& lock, const ShmOperationPtr& operation) {
  lock.unlock();
  const auto settle = std::exchange(operation->settle, nullptr);
  if (settle) settle(operation->error);
  lock.lock();
  operation->settled = true;
}

bool ShmLane::advance(ShmOperation& operation, const ShmPatience& patience) {
  try {
    for (;; ++operation.round) {
      if (!operation.arrived) {
        operation.rounds->fill(operation.round, segment_->next_slots());
        segment_->arrive(operation.ticket.signature);
        operation.arrived = true;
      }
      const auto outcome = segment_->await(patience, guard_.get());
      if (outcome.fault == ShmFault::kPending) return false;
      if (outcome.fault != ShmFault::kNone) {
        operation.error = failure(operation, outcome);
        break;
      }
      operation.rounds->drain(operation.round, segment_->slots());
      operation.arrived = false;
      if (operation.rounds->last(operation.round)) break;
    }
    if (!operation.error && operation.after) operation.after();
  } catch (const ShmDisagreement& disagreement) {
    operation.error = verdict(operation, disagreement.what, disagreement.rank);
  } catch (...) {
    operation.error = std::current_exception();
  }
  operation.after = nullptr;  // lets go of the caller's tensors
  guard_->leave(operation.ticket);
  return true;
}

std::exception_ptr ShmLane::failure(const ShmOperation& operation,
                                    const ShmOutcome& outcome) const {
  const auto what = segment_->describe(outcome);
  if (outcome.fault == ShmFault::kClosed) {
    return std::make_exception_ptr(CommError(str(operation.kind, ": ", what, ".")));
  }
  return verdict(operation, what, outcome.rank);
}

std::exception_ptr ShmLane::verdict(const ShmOperation& operation, const std::string& what,
                                    int rank) const {
  std::exception_ptr error;
  try {
    guard_->fail(operation.ticket, str(operation.kind, ": ", what, "."), rank);
  } catch (...) {
    error = std::current_exception();
  }
  return error;
}

void ShmLane::close() noexcept {
  std::deque<ShmOperationPtr> rest;
  {
    Lock lock(mutex_);
    closed_ = true;
    segment_->close();
    for_worker_.notify_all();
    changed_.wait(lock, [&] { return !busy_; });
    rest = std::exchange(queue_, {});
  }
  for (const auto& operation : rest) {
    operation->error = failure(*operation, {ShmFault::kClosed, segment_->rank()});
    guard_->leave(operation->ticket);
    Lock lock(mutex_);
    settle(lock, operation);
    changed_.notify_all();
  }
  if (!worker_.joinable()) return;
  // A callback that runs on our own thread may let go of the last owner.
  if (worker_.get_id() == std::this_thread::get_id()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

}  // namespace accelerate::detail
