#include "comm/call_queue.h"

#include <utility>

#include "accelerate/errors.h"

namespace accelerate::detail {
namespace {

constexpr auto kForever = CallQueue::Clock::time_point::max();

std::exception_ptr destroyed() {
  return std::make_exception_ptr(
      CommError("the process group was destroyed before the call had ended"));
}

}  // namespace

void CallQueue::push(const QueuedCallPtr& call) {
  Lock lock(mutex_);
  if (!closed_) return queue_.push_back(call);
  settle(lock, call, destroyed());
}

bool CallQueue::wait(const QueuedCallPtr& call, Clock::time_point until) {
  // A call that has begun is carried out to its end. Who has to be back earlier leaves it to
  // others.
  const bool helps = until == kForever || until - Clock::now() >= call->timeout;
  Lock lock(mutex_);
  const auto something_to_do = [&] {
    return call->settled || (helps && !busy_ && !queue_.empty());
  };
  for (;;) {
    if (until == kForever) {
      changed_.wait(lock, something_to_do);
    } else if (!changed_.wait_until(lock, until, something_to_do)) {
      return false;
    }
    if (call->settled) return true;
    run_front(lock);
  }
}

void CallQueue::call_worker() {
  const Lock lock(mutex_);
  if (queue_.empty() || closed_) return;
  worker_wanted_ = true;
  if (!worker_.joinable()) worker_ = std::thread([self = shared_from_this()] { self->work(); });
  changed_.notify_all();
}

void CallQueue::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || (worker_wanted_ && !busy_ && !queue_.empty()); });
    if (closed_) return;
    run_front(lock);
    if (queue_.empty()) worker_wanted_ = false;
  }
}

void CallQueue::run_front(Lock& lock) {
  const auto call = queue_.front();
  std::exception_ptr error;
  busy_ = true;
  lock.unlock();
  try {
    call->carry_out();
  } catch (...) {
    error = std::current_exception();
  }
  call->carry_out = nullptr;  // lets go of the caller's tensors
  lock.lock();
  busy_ = false;
  queue_.pop_front();
  settle(lock, call, error);
}

// Without the lock, and not as the one who works at the front: a callback of the caller may call
// the next collective.
void CallQueue::settle(Lock& lock, const QueuedCallPtr& call, const std::exception_ptr& error) {
  changed_.notify_all();
  lock.unlock();
  std::exchange(call->settle, nullptr)(error);
  lock.lock();
  call->settled = true;
  changed_.notify_all();
}

void CallQueue::close(const std::function<void()>& interrupt) noexcept {
  std::deque<QueuedCallPtr> rest;
  {
    Lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    changed_.notify_all();
    lock.unlock();
    interrupt();
    lock.lock();
    changed_.wait(lock, [&] { return !busy_; });
    rest = std::exchange(queue_, {});
  }
  for (const auto& call : rest) {
    call->carry_out = nullptr;
    Lock lock(mutex_);
    settle(lock, call, destroyed());
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
