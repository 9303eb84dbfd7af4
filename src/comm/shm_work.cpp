#include "comm/shm_work.h"

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {

using Clock = ShmPatience::Clock;

ShmWork::ShmWork(About about) : c10d::Work(about.rank, about.type), about_(std::move(about)) {}

bool ShmWork::isCompleted() {
  if (!done_.load()) look();
  return done_.load();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!done_.load()) {
    const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    if (!bring_about(until)) {
      throw CommError(str(about_.kind, " is not complete after ", timeout.count(),
                          " ms. It goes on; wait for it again."));
    }
  }
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [&] { return completed_; });
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void ShmWork::abort() {
  throw UnsupportedError(str(about_.kind,
                             " cannot be aborted on its own: the other ranks wait for this one. "
                             "Destroy the process group instead."));
}

void ShmWork::settle(const std::exception_ptr& error) {
  finish(error);
  done_.store(true);
  complete_future();
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
  }
  if (done_.load()) {
    complete_future();
  } else {
    hand_over();
  }
  return future_;
}

// Callbacks run here, so without the lock.
void ShmWork::complete_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!future_ || future_settled_ || !completed_) return;
    future_settled_ = true;
    future = future_;
    error = exception_;
  }
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(about_.results));
  }
}

}  // namespace accelerate::detail
