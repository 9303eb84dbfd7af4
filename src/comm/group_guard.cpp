#include "comm/group_guard.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/call_site.h"
#include "core/exception_text.h"
#include "core/failure_hook.h"
#include "core/log.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

// The jury waits two seconds for the cause of a failed connection; then it names the connection.
constexpr auto kTimeForTheJury = std::chrono::milliseconds(3000);

constexpr int kRanksDisagree = 70;

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

// When this process ends, the others learn how: a rank that waits for us must not wait in vain.

std::terminate_handler& handler_before() {
  static std::terminate_handler handler = nullptr;
  return handler;
}

[[noreturn]] void end_by_exception() {
  if (std::current_exception()) {
    try {
      throw;
    } catch (const CommError& error) {
      // The others know it already. This exit code says that the ranks disagree, or one is gone.
      write_fully(STDERR_FILENO, str("accelerate: ", error.what(), "\n"));
      ::_exit(kRanksDisagree);
    } catch (...) {
      GroupGuard::this_process_threw(current_exception_text().text());
    }
  }
  if (handler_before() != nullptr) handler_before()();
  std::abort();
}

void install_end_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    handler_before() = std::set_terminate(end_by_exception);
    failure_hook = &GroupGuard::this_process_threw;
    std::atexit([] { GroupGuard::this_process_ends(); });
  });
}

}  // namespace

GroupGuard::GroupGuard(const WatchOptions& options, const Blackboard& blackboard)
    : rank_(options.rank) {
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
  const auto ticket = watch_->log().enter(facts, current_call_site());
  if (watch_->failed()) std::rethrow_exception(verdict(ticket));
  return ticket;
}

void GroupGuard::leave(const Ticket& ticket) noexcept {
  watch_->log().leave(ticket);
  const std::scoped_lock lock(mutex_);
  under_way_.erase(ticket.sequence);
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
  std::function<void()> when_failed;
  {
    const std::scoped_lock lock(mutex_);
    calls.swap(under_way_);
    when_failed.swap(when_failed_);
  }
  if (when_failed) when_failed();
  for (const auto& [sequence, cancel] : calls) cancel();
}

void GroupGuard::when_failed(std::function<void()> f) {
  const std::scoped_lock lock(mutex_);
  when_failed_ = std::move(f);
}

std::exception_ptr GroupGuard::verdict(const Ticket& ticket) const {
  const auto finding = watch_->finding(std::chrono::milliseconds(0)).value_or(Finding{});
  const auto own = watch_->log().tell(ticket.sequence);
  return std::make_exception_ptr(
      CommError(str(finding.text, "\n  this is rank ", rank_, ", in ", own.text), finding.rank));
}

std::exception_ptr GroupGuard::explain(const Ticket& ticket, const std::string& message, int rank) {
  watch_->transport_failed(ticket, message);
  if (watch_->finding(kTimeForTheJury)) return verdict(ticket);
  const auto own = watch_->log().tell(ticket.sequence);
  return std::make_exception_ptr(
      CommError(str(own.text, " failed on rank ", rank_, ": ", message), rank));
}

void GroupGuard::fail(const Ticket& ticket, const std::string& suspicion, int rank) {
  std::rethrow_exception(explain(ticket, suspicion, rank));
}

void GroupGuard::this_process_threw(const std::string& message) noexcept {
  for (const auto& watch : AllGuards::get().alive()) watch->threw(message);
}

void GroupGuard::this_process_ends() noexcept {
  for (const auto& watch : AllGuards::get().alive()) watch->farewell();
}

}  // namespace accelerate::detail
