// src/comm/group_guard.h - the guard of one process group: the log of its calls and the side
// channel.
//
// Internal. Shared by the backends of a group. When a rank has diverged, all calls under way fail
// with the same `CommError`, and so does every later one.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "comm/guard.h"
#include "comm/side_channel.h"
#include "core/processes.h"

namespace accelerate::detail::comm {

class GroupGuard : public DeviceCallGuard {
 public:
  /// Collective.
  GroupGuard(const SideChannelOptions& options, const Blackboard& blackboard);
  ~GroupGuard() override;

  [[nodiscard]] Ticket enter(const CallFacts& facts) override;
  void leave(const Ticket& ticket) noexcept override;
  [[noreturn]] void fail(const Ticket& ticket, const std::string& suspicion, int rank) override;
  [[nodiscard]] std::exception_ptr failure_of(const std::string& message,
                                              const std::string& suspicion, int rank) override;
  [[nodiscard]] bool failed() const noexcept override { return side_channel_->failed(); }

  /// A ticket for `on_failure` and `leave` of a message from rank to rank, which is not logged.
  [[nodiscard]] Ticket message() noexcept;
  /// Throws `StateError` in a forked copy of the process that made the group.
  void refuse_forked_copy(std::string_view call) const { owner_.refuse_forked_copy(call); }
  /// `cancel` is called, on the side thread, if the group fails before the call is complete; at
  /// once if it has failed already.
  void on_failure(const Ticket& ticket, std::function<void()> cancel);

  void transport_failed(const Ticket& ticket, const std::string& message) override {
    side_channel_->transport_failed(ticket, message);
  }
  /// As `transport_failed`, but waits for the diagnosis and returns the exception to throw.
  [[nodiscard]] std::exception_ptr explain(const Ticket& ticket, const std::string& message,
                                           int rank = -1);
  /// The exception of a call that was cancelled.
  [[nodiscard]] std::exception_ptr verdict(const Ticket& ticket) const;

  void add_time(std::chrono::nanoseconds time) noexcept override { add_time_in_collectives(time); }
  void end_process_on_failure(const Ticket& ticket) override;
  void when_failed(std::function<void()> f) override;
  void before_throw(std::function<void()> f) override;

  /// This process ends by an exception: tells the others of all groups. Called by the handler of
  /// uncaught exceptions.
  static void this_process_threw(const std::string& message) noexcept;
  /// This process ends in order.
  static void this_process_ends() noexcept;

 private:
  [[nodiscard]] CommError error_of(const Ticket& ticket) const;
  [[nodiscard]] CommError error_in(const std::string& own_call) const;
  void cancel_all();
  /// Calls what `before_throw` has registered.
  void notify_before_throw();
  /// Throws `error`, after what `before_throw` has registered.
  [[noreturn]] void throw_to_program(const std::exception_ptr& error);

  /// A rank of the group as a rank of the run.
  [[nodiscard]] int in_run(int rank) const;

  OwnerProcess owner_;
  int rank_;
  std::vector<int> global_ranks_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::function<void()>> under_way_;
  std::vector<std::function<void()>> when_failed_;
  std::vector<std::function<void()>> before_throw_;
  // Whether the program has got the failure as an exception.
  std::shared_ptr<std::atomic<bool>> thrown_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> ends_{false};
  std::atomic<std::uint64_t> messages_{0};
  std::shared_ptr<SideChannel> side_channel_;
};

}  // namespace accelerate::detail::comm
