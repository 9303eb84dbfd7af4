#include "comm/group_guard.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/call_site.h"
#include "core/failure_hook.h"
#include "core/log.h"
#include "core/text.h"
#include "core/uncaught.h"

namespace accelerate::detail {
namespace {

// The jury waits two seconds for the cause of a failed connection; then it names the connection.
constexpr auto kTimeForTheJury = std::chrono::milliseconds(3000);

// How long a program with a call on a device may take to reach its next call, which throws.
constexpr auto kTimeToBeTold = std::chrono::milliseconds(500);

/// The guards of this process. Never destroyed: processes end in any order of things.
struct AllGuards {
  std::mutex mutex;
  std::vector<std::weak_ptr<Watch>> watches;

  static AllGuards& get() {
    static auto* const all = new AllGuards;
    return *all;
  }
  std::vector<std::shared_ptr<Watch>> alive() {
    const std::scoped_lock lock(mutex);
    std::erase_if(watches, [](const auto& watch) { return watch.expired(); });
    std::vector<std::shared_ptr<Watch>> result;
    for (const auto& watch : watches) result.push_back(watch.lock());
    std::erase(result, nullptr);
    return result;
  }
};

/// Gradients are reduced as they become ready, on whichever thread of autograd comes to them: the
/// line that this thread was called from may differ between ranks.
CallSite place_of_call() {
  if (!torch::autograd::get_current_node()) return current_call_site();
  return {.name = "backward"};
}

// When this process ends, the others learn how: a rank that waits for us must not wait in vain.

void install_end_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    handle_uncaught_exceptions();
    failure_hook = &GroupGuard::this_process_threw;
    std::atexit([] { GroupGuard::this_process_ends(); });
  });
}

}  // namespace

GroupGuard::GroupGuard(const WatchOptions& options, const Blackboard& blackboard)
    : rank_(options.rank), global_ranks_(options.global_ranks) {
  install_end_handlers();
  watch_ = std::make_shared<Watch>(
      options, blackboard, [this](const Finding&) { cancel_all(); },
      [](const std::string& text) { warn(text); });
  auto& all = AllGuards::get();
  const std::scoped_lock lock(all.mutex);
  all.watches.push_back(watch_);
}

GroupGuard::~GroupGuard() = default;

Ticket GroupGuard::enter(const CallFacts& facts) {
  const auto ticket = watch_->log().enter(facts, place_of_call());
  if (watch_->failed()) tell(verdict(ticket));
  return ticket;
}

void GroupGuard::leave(const Ticket& ticket) noexcept {
  watch_->log().leave(ticket);
  const std::scoped_lock lock(mutex_);
  under_way_.erase(ticket.sequence);
}

Ticket GroupGuard::message() noexcept {
  // Collectives never count so far.
  constexpr std::uint64_t kFirst = std::uint64_t{1} << 63;
  return {.sequence = kFirst + ++messages_, .signature = 1};
}

void GroupGuard::on_failure(const Ticket& ticket, std::function<void()> cancel) {
  {
    const std::scoped_lock lock(mutex_);
    under_way_[ticket.sequence] = std::move(cancel);
  }
  // The finding may have come in between, and then nobody else looks at this call.
  if (watch_->failed()) cancel_all();
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

void GroupGuard::when_told(std::function<void()> f) {
  const std::scoped_lock lock(mutex_);
  when_told_.push_back(std::move(f));
}

void GroupGuard::end_with(const Ticket& ticket) {
  on_failure(ticket, [this, ticket] {
    if (ends_.exchange(true)) return;
    // A program that meets the error in its next call may have something to save first.
    std::thread([error = error_of(ticket), told = told_] {
      std::this_thread::sleep_for(kTimeToBeTold);
      if (!*told) end_with_error(error);
    }).detach();
  });
}

CommError GroupGuard::error_of(const Ticket& ticket) const {
  return error_in(watch_->log().tell(ticket.sequence).text);
}

CommError GroupGuard::error_in(const std::string& own_call) const {
  const auto finding = watch_->finding(std::chrono::milliseconds(0)).value_or(Finding{});
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
  watch_->transport_failed(ticket, message);
  if (watch_->finding(kTimeForTheJury)) return verdict(ticket);
  const auto own = watch_->log().tell(ticket.sequence);
  return std::make_exception_ptr(
      CommError(str(own.text, " failed on rank ", rank_, ": ", message), in_run(rank)));
}

void GroupGuard::fail(const Ticket& ticket, const std::string& suspicion, int rank) {
  tell(explain(ticket, suspicion, rank));
}

std::exception_ptr GroupGuard::failure_of(const std::string& message, const std::string& suspicion,
                                          int rank) {
  watch_->transport_failed(Ticket{}, str(message, ": ", suspicion));
  const bool found = watch_->finding(kTimeForTheJury).has_value();
  program_is_told();
  return std::make_exception_ptr(
      found ? error_in(message)
            : CommError(str(message, " failed on rank ", rank_, ": ", suspicion), in_run(rank)));
}

void GroupGuard::program_is_told() {
  *told_ = true;
  std::vector<std::function<void()>> when_told;
  {
    const std::scoped_lock lock(mutex_);
    when_told.swap(when_told_);
  }
  for (const auto& f : when_told) f();
}

void GroupGuard::tell(const std::exception_ptr& error) {
  program_is_told();
  std::rethrow_exception(error);
}

void GroupGuard::this_process_threw(const std::string& message) noexcept {
  for (const auto& watch : AllGuards::get().alive()) watch->threw(message);
}

void GroupGuard::this_process_ends() noexcept {
  for (const auto& watch : AllGuards::get().alive()) watch->farewell();
}

}  // namespace accelerate::detail
