#include "comm/group_guard.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "core/uncaught.h"

namespace accelerate::detail::comm {
namespace {

// The detector waits two seconds for the cause of a failed connection, then it names the
// connection.
constexpr auto kDetectionTime = std::chrono::milliseconds(3000);

// How long a program with a call on a device may take to reach its next call, which throws.
constexpr auto kTimeToThrow = std::chrono::milliseconds(500);

/// The side channels of this process. Never destroyed: static objects end in any order.
struct AllGuards {
  OwnerProcess owner;
  std::mutex mutex;
  std::vector<std::weak_ptr<SideChannel>> channels;

  static AllGuards& get() {
    static std::atomic<AllGuards*> all = new AllGuards;
    auto* current = all.load();
    if (!current->owner.is_forked_copy()) return *current;
    // A forked copy has groups of its own. The mutex of its parent's may be locked by a thread that
    // is not here.
    auto own = std::make_unique<AllGuards>();
    return all.compare_exchange_strong(current, own.get()) ? *own.release() : *current;
  }
  std::vector<std::shared_ptr<SideChannel>> alive() {
    const std::scoped_lock lock(mutex);
    std::erase_if(channels, [](const auto& channel) { return channel.expired(); });
    std::vector<std::shared_ptr<SideChannel>> result;
    for (const auto& channel : channels) result.push_back(channel.lock());
    std::erase(result, nullptr);
    return result;
  }
};

/// Gradients are reduced as they become ready, on any thread of autograd: the line that this thread
/// was called from, and its name, may differ between ranks.
CallSite place_of_call() {
  const auto place = current_call_site();
  if (!torch::autograd::get_current_node()) return place;
  return {.name = place.name_in_backward != nullptr ? place.name_in_backward : "backward"};
}

// When this process ends, it tells the others how, so that no rank waits for it in vain.

void install_end_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    handle_uncaught_exceptions();
    failure_hook = &GroupGuard::this_process_threw;
    std::atexit([] { GroupGuard::this_process_ends(); });
  });
}

}  // namespace

GroupGuard::GroupGuard(const SideChannelOptions& options, const Blackboard& blackboard)
    : rank_(options.rank), global_ranks_(options.global_ranks) {
  install_end_handlers();
  side_channel_ = std::make_shared<SideChannel>(
      options, blackboard, [this](const Finding&) { cancel_all(); },
      [](const std::string& text) { warn(text); });
  auto& all = AllGuards::get();
  const std::scoped_lock lock(all.mutex);
  all.channels.push_back(side_channel_);
}

// Its callbacks refer to this object, and another thread may hold the channel for a moment.
GroupGuard::~GroupGuard() { side_channel_->end(); }

Ticket GroupGuard::enter(const CallFacts& facts) {
  refuse_forked_copy(facts.kind);
  const auto ticket = side_channel_->log().enter(facts, place_of_call());
  if (side_channel_->failed()) throw_to_program(verdict(ticket));
  return ticket;
}

void GroupGuard::leave(const Ticket& ticket) noexcept {
  side_channel_->log().leave(ticket);
  const std::scoped_lock lock(mutex_);
  under_way_.erase(ticket.sequence);
}

Ticket GroupGuard::message() noexcept {
  // Larger than the number of any collective.
  constexpr std::uint64_t kFirst = std::uint64_t{1} << 63;
  return {.sequence = kFirst + ++messages_, .signature = 1};
}

void GroupGuard::on_failure(const Ticket& ticket, std::function<void()> cancel) {
  {
    const std::scoped_lock lock(mutex_);
    under_way_[ticket.sequence] = std::move(cancel);
  }
  // The finding may have come in between; then this call would not be cancelled.
  if (side_channel_->failed()) cancel_all();
}

void GroupGuard::cancel_all() {
  std::map<std::uint64_t, std::function<void()>> calls;
  std::vector<std::function<void()>> when_failed;
  {
    const std::scoped_lock lock(mutex_);
    calls.swap(under_way_);
    when_failed.swap(when_failed_);
  }
  for (const auto& f : when_failed) f();
  for (const auto& [sequence, cancel] : calls) cancel();
}

void GroupGuard::when_failed(std::function<void()> f) {
  const std::scoped_lock lock(mutex_);
  when_failed_.push_back(std::move(f));
}

void GroupGuard::before_throw(std::function<void()> f) {
  const std::scoped_lock lock(mutex_);
  before_throw_.push_back(std::move(f));
}

void GroupGuard::end_process_on_failure(const Ticket& ticket) {
  on_failure(ticket, [this, ticket] {
    if (ends_.exchange(true)) return;
    // A program that gets the error in its next call may have something to save first.
    std::thread([error = error_of(ticket), thrown = thrown_] {
      std::this_thread::sleep_for(kTimeToThrow);
      if (!*thrown) end_with_error(error);
    }).detach();
  });
}

CommError GroupGuard::error_of(const Ticket& ticket) const {
  return error_in(side_channel_->log().report(ticket.sequence).text);
}

CommError GroupGuard::error_in(const std::string& own_call) const {
  const auto finding = side_channel_->finding(std::chrono::milliseconds(0)).value_or(Finding{});
  return CommError(str(finding.text, "\n  this is rank ", rank_, ", in ", own_call),
                   in_run(finding.rank));
}

int GroupGuard::in_run(int rank) const {
  return rank < 0 || global_ranks_.empty() ? rank : global_ranks_.at(rank);
}

std::exception_ptr GroupGuard::verdict(const Ticket& ticket) const {
  return std::make_exception_ptr(error_of(ticket));
}

std::exception_ptr GroupGuard::explain(const Ticket& ticket, const std::string& message, int rank) {
  side_channel_->transport_failed(ticket, message);
  if (side_channel_->finding(kDetectionTime)) return verdict(ticket);
  const auto own = side_channel_->log().report(ticket.sequence);
  return std::make_exception_ptr(
      CommError(str(own.text, " failed on rank ", rank_, ": ", message), in_run(rank)));
}

void GroupGuard::fail(const Ticket& ticket, const std::string& suspicion, int rank) {
  throw_to_program(explain(ticket, suspicion, rank));
}

std::exception_ptr GroupGuard::failure_of(const std::string& message, const std::string& suspicion,
                                          int rank) {
  side_channel_->transport_failed(Ticket{}, str(message, ": ", suspicion));
  const bool found = side_channel_->finding(kDetectionTime).has_value();
  notify_before_throw();
  return std::make_exception_ptr(
      found ? error_in(message)
            : CommError(str(message, " failed on rank ", rank_, ": ", suspicion), in_run(rank)));
}

void GroupGuard::notify_before_throw() {
  *thrown_ = true;
  std::vector<std::function<void()>> before_throw;
  {
    const std::scoped_lock lock(mutex_);
    before_throw.swap(before_throw_);
  }
  for (const auto& f : before_throw) f();
}

void GroupGuard::throw_to_program(const std::exception_ptr& error) {
  notify_before_throw();
  std::rethrow_exception(error);
}

void GroupGuard::this_process_threw(const std::string& message) noexcept {
  for (const auto& channel : AllGuards::get().alive()) channel->threw(message);
}

void GroupGuard::this_process_ends() noexcept {
  for (const auto& channel : AllGuards::get().alive()) channel->farewell();
}

}  // namespace accelerate::detail::comm
