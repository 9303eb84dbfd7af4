#include "comm/backend_work.h"

#include "accelerate/errors.h"
#include "comm/collective_range.h"
#include "core/text.h"

namespace accelerate::detail::comm {

using Clock = WaitBudget::Clock;

BackendWork::BackendWork(Info info) : c10d::Work(info.rank, info.type), info_(std::move(info)) {}

bool BackendWork::isCompleted() {
  if (!done_.load()) poll();
  return done_.load();
}

bool BackendWork::wait(std::chrono::milliseconds timeout) {
  if (!done_.load()) {
    const auto range = CollectiveRange::wait(info_.kind);
    const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    if (!complete_by(until)) {
      throw CommError(str(info_.kind, " is not complete after ", timeout.count(),
                          " ms. It continues; wait for it again."));
    }
  }
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [&] { return completed_; });
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void BackendWork::abort() {
  throw UnsupportedError(str(info_.kind,
                             " cannot be aborted on its own: the other ranks wait for this one. "
                             "Destroy the process group instead."));
}

void BackendWork::settle(const std::exception_ptr& error) {
  finish(error);
  done_.store(true);
  complete_future();
}

c10::intrusive_ptr<c10::ivalue::Future> BackendWork::getFuture() {
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
    run_in_background();
  }
  return future_;
}

// Callbacks run here, so the lock is not held.
void BackendWork::complete_future() {
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
    future->markCompleted(c10::IValue(info_.results));
  }
}

}  // namespace accelerate::detail::comm
