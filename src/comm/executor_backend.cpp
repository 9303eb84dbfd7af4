#include "comm/executor_backend.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/backend_work.h"
#include "comm/collective_range.h"

namespace accelerate::detail::comm {
namespace {

// Some programs ask for the longest duration there is, to which nothing can be added.
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);

}  // namespace

ExecutorBackend::ExecutorBackend(int rank, int size, std::chrono::milliseconds timeout,
                                 std::shared_ptr<CallGuard> guard)
    : c10d::Backend(rank, size),
      executor_(std::make_shared<CallExecutor>(rank, std::move(guard))),
      timeout_(timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> ExecutorBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
}

std::chrono::milliseconds ExecutorBackend::timeout_of(std::chrono::milliseconds of_call) const {
  const bool unset = of_call == c10d::kUnsetTimeout || of_call == kNoTimeout;
  return std::min(unset ? timeout_.load() : of_call, kLongest);
}

ExecutorBackend::WorkPtr ExecutorBackend::submit(BackendCall call, const ExecutorCallPtr& executed,
                                                 Schedule schedule) {
  const auto range = CollectiveRange::call(call.facts.kind);
  executed->kind = call.facts.kind;
  executed->timeout = timeout_of(call.timeout);
  const auto work = c10::make_intrusive<ExecutorWork>(
      BackendWork::Info{rank_, call.type, call.facts.kind, std::move(call.results), ++sequence_},
      executor_, executed);
  executed->on_end = [work](const std::exception_ptr& error) { work->settle(error); };
  try {
    executor_->submit(executed, call.facts.facts(), schedule);
  } catch (...) {
    executed->on_end = nullptr;  // it holds the work, which holds the call
    throw;
  }
  return work;
}

}  // namespace accelerate::detail::comm
