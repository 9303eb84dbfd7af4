// src/comm/backend_work.h - what the calls of our backends return.
//
// Internal. A work is completed by the thread that waits for it, unless another thread was faster;
// asking for its future lets a thread of the backend complete it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/call_executor.h"
#include "comm/shm_mailbox.h"

namespace accelerate::detail::comm {

class BackendWork : public c10d::Work {
 public:
  struct Info {
    int rank = 0;
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* kind = "";  ///< "all_reduce"; a literal
    std::vector<at::Tensor> results = {};
    std::uint64_t sequence = 0;
  };
  explicit BackendWork(Info info);

  bool isCompleted() override;
  /// Throws `CommError` if the work has failed, or is incomplete after `timeout` (0 means no
  /// limit); it continues in the latter case.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override { return info_.results; }
  std::uint64_t getSequencenumber() const override { return info_.sequence; }
  /// Its value is the list of `result()`.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Called once, by the thread that completed it; null for success.
  void settle(const std::exception_ptr& error);

 protected:
  /// Returns false if the work is incomplete at `until`.
  [[nodiscard]] virtual bool complete_by(WaitBudget::Clock::time_point until) = 0;
  /// Does what can be done without waiting.
  virtual void poll() = 0;
  /// Lets a thread of the backend complete the work.
  virtual void run_in_background() = 0;

 private:
  void complete_future();

  Info info_;
  std::atomic<bool> done_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_settled_ = false;
};

/// A collective in the queue of an executor.
class ExecutorWork final : public BackendWork {
 public:
  ExecutorWork(Info info, std::shared_ptr<CallExecutor> executor, ExecutorCallPtr call)
      : BackendWork(std::move(info)), executor_(std::move(executor)), call_(std::move(call)) {}

 protected:
  bool complete_by(WaitBudget::Clock::time_point until) override {
    return executor_->wait(call_, until);
  }
  void poll() override { executor_->poll(); }
  void run_in_background() override { executor_->run_in_background(); }

 private:
  std::shared_ptr<CallExecutor> executor_;
  ExecutorCallPtr call_;
};

/// A message from rank to rank.
class ShmMessageWork final : public BackendWork {
 public:
  ShmMessageWork(Info info, std::shared_ptr<ShmMailbox> mailbox, ShmMessagePtr message)
      : BackendWork(std::move(info)), mailbox_(std::move(mailbox)), message_(std::move(message)) {}

  int sourceRank() const override { return message_->source; }

 protected:
  bool complete_by(WaitBudget::Clock::time_point until) override {
    return mailbox_->wait(message_, until);
  }
  void poll() override { static_cast<void>(mailbox_->done(message_)); }
  void run_in_background() override {}  // a thread of the mailbox moves all messages

 private:
  std::shared_ptr<ShmMailbox> mailbox_;
  ShmMessagePtr message_;
};

}  // namespace accelerate::detail::comm
