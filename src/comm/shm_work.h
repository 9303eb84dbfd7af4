// src/comm/shm_work.h - what a call of the shared-memory backend returns.
//
// Internal. A work is brought to its end by the thread that waits for it, unless another thread was
// faster; asking for its future hands it to a thread of the backend.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/shm_lane.h"
#include "comm/shm_mailbox.h"

namespace accelerate::detail {

class ShmWork : public c10d::Work {
 public:
  struct About {
    int rank = 0;
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* kind = "";  ///< "all_reduce"; a literal
    std::vector<at::Tensor> results = {};
    std::uint64_t sequence = 0;
  };
  explicit ShmWork(About about);

  bool isCompleted() override;
  /// Throws `CommError` when the work has failed, or is not complete after `timeout`, 0 being no
  /// limit. It goes on in the latter case.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override { return about_.results; }
  std::uint64_t getSequencenumber() const override { return about_.sequence; }
  /// Its value is the list of `result()`.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Once, by whoever brought it to its end; null for success.
  void settle(const std::exception_ptr& error);

 protected:
  /// False when it is not at its end by then.
  [[nodiscard]] virtual bool bring_about(ShmPatience::Clock::time_point until) = 0;
  virtual void look() = 0;
  virtual void hand_over() = 0;

 private:
  void complete_future();

  About about_;
  std::atomic<bool> done_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_settled_ = false;
};

class ShmCollectiveWork final : public ShmWork {
 public:
  ShmCollectiveWork(About about, std::shared_ptr<ShmLane> lane, ShmOperationPtr operation)
      : ShmWork(std::move(about)), lane_(std::move(lane)), operation_(std::move(operation)) {}

 protected:
  bool bring_about(ShmPatience::Clock::time_point until) override {
    return lane_->wait(operation_, until);
  }
  void look() override { lane_->look(); }
  void hand_over() override { lane_->hand_over(); }

 private:
  std::shared_ptr<ShmLane> lane_;
  ShmOperationPtr operation_;
};

class ShmMessageWork final : public ShmWork {
 public:
  ShmMessageWork(About about, std::shared_ptr<ShmMailbox> mailbox, ShmMessagePtr message)
      : ShmWork(std::move(about)), mailbox_(std::move(mailbox)), message_(std::move(message)) {}

  int sourceRank() const override { return message_->source; }

 protected:
  bool bring_about(ShmPatience::Clock::time_point until) override {
    return mailbox_->wait(message_, until);
  }
  void look() override { static_cast<void>(mailbox_->done(message_)); }
  void hand_over() override {}  // messages are looked after anyway

 private:
  std::shared_ptr<ShmMailbox> mailbox_;
  ShmMessagePtr message_;
};

}  // namespace accelerate::detail
