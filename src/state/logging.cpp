#include "accelerate/logging.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/log.h"
#include "core/text.h"
#include "state/partial_facts.h"

namespace accelerate {
namespace {

using detail::str;

constexpr const char* kLevelVariable = "ACCELERATE_LOG_LEVEL";

// Gives core the rank, so that the library's own messages come from the main process.
const bool kKnowsTheProcess = [] {
  detail::set_log_process_lookup([]() -> std::optional<detail::LogProcess> {
    const auto* facts = detail::state::current_facts();
    if (facts == nullptr) return std::nullopt;
    return detail::LogProcess{facts->process_index, facts->is_main_process(),
                              facts->local_process_index};
  });
  return true;
}();

// Runs the ranks one by one. Rank i starts when rank i-1 has written its token; only the end is a
// barrier. The rank that waited for a token removes it before that: afterwards rank 0, which serves
// the store, may have ended.
class Turn {
 public:
  explicit Turn(const PartialState& state) : state_(state) {
    static std::atomic<std::uint64_t> count = 0;
    // Every process makes the same ordered calls, so the counts agree.
    prefix_ = str("accelerate/log/", count.fetch_add(1), "/");
  }

  template <class F>
  void run(F&& speak, std::source_location where) {
    const int rank = state_.process_index();
    const auto store = state_.store();
    if (!store) return run_with_barriers(std::forward<F>(speak), where);
    if (rank > 0) wait_for(rank - 1, where);
    const std::exception_ptr failure = failure_of(speak);
    if (rank + 1 < state_.num_processes()) store->set(key(rank), std::vector<std::uint8_t>{1});
    state_.wait_for_everyone(where);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  // A sink that throws must not keep the others waiting.
  template <class F>
  [[nodiscard]] static std::exception_ptr failure_of(F& speak) {
    try {
      speak();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  [[nodiscard]] std::string key(int rank) const { return str(prefix_, rank); }

  void wait_for(int rank, std::source_location where) const {
    try {
      const auto store = state_.store();
      store->wait({key(rank)}, state_.timeout());
      store->deleteKey(key(rank));
    } catch (const c10::Error& error) {
      throw CommError(str("An ordered log message at ", where.file_name(), ":", where.line(),
                          " waits for rank ", rank,
                          ", which has not made the call: ", error.what_without_backtrace()),
                      rank);
    }
  }

  // A group that the host program lent us may come without a store.
  template <class F>
  void run_with_barriers(F&& speak, std::source_location where) {
    std::exception_ptr failure;
    for (int rank = 0; rank < state_.num_processes(); ++rank) {
      if (rank == state_.process_index()) failure = failure_of(speak);
      state_.wait_for_everyone(where);
    }
    if (failure) std::rethrow_exception(failure);
  }

  const PartialState& state_;
  std::string prefix_;
};

}  // namespace

struct MultiProcessAdapter::State {
  std::string name;
  std::mutex mutex;
  std::set<std::tuple<std::string, bool, bool>, std::less<>> warned;
};

MultiProcessAdapter::MultiProcessAdapter(std::shared_ptr<State> state) : state_(std::move(state)) {}

const std::string& MultiProcessAdapter::name() const { return state_->name; }

bool MultiProcessAdapter::is_enabled_for(LogLevel level) const {
  return level >= detail::effective_log_level(state_->name);
}

void MultiProcessAdapter::set_level(LogLevel level) const {
  detail::set_log_level(state_->name, level);
}

void MultiProcessAdapter::log(LogLevel level, std::string_view message,
                              const LogOptions& options) const {
  const auto* facts = detail::state::current_facts();
  if (facts == nullptr) {
    throw StateError(
        str("The logger '", state_->name,
            "' was used before there is a state, so it does not know which process this is. Make a "
            "PartialState or an Accelerator first."));
  }
  const bool enabled = is_enabled_for(level);
  if (!enabled && !options.in_order) return;
  const auto speak = [&] {
    if (!enabled) return;
    detail::write_log(state_->name, level, str("[RANK ", facts->process_index, "] ", message),
                      options.where);
  };
  if (options.in_order && facts->use_distributed()) {
    // Even if this process logs nothing: levels may differ, and the other ranks wait.
    const PartialState state;
    Turn(state).run(speak, options.where);
  } else if (options.in_order || !options.main_process_only || facts->is_main_process()) {
    speak();
  }
}

void MultiProcessAdapter::warning_once(std::string_view message, const LogOptions& options) const {
  {
    const std::scoped_lock lock(state_->mutex);
    const auto [_, fresh] =
        state_->warned.emplace(std::string(message), options.main_process_only, options.in_order);
    if (!fresh) return;
  }
  warning(message, options);
}

MultiProcessAdapter get_logger(std::string name, std::optional<std::string> log_level) {
  std::string_view source = "log_level";
  if (!log_level) {
    log_level = Environment::process().get(kLevelVariable);
    source = kLevelVariable;
  }
  if (log_level) {
    const auto level = from_string<LogLevel>(*log_level, source);
    detail::set_log_level(name, level);
    detail::set_log_level("", level);
  }
  auto state = std::make_shared<MultiProcessAdapter::State>();
  state->name = std::move(name);
  return MultiProcessAdapter(std::move(state));
}

}  // namespace accelerate
