#include "accelerator/preemption.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <vector>

#include "accelerate/errors.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::accelerator {
namespace {

constexpr std::array kSignals = {SIGTERM, SIGUSR1};
// How often the store is asked whether another process got a signal.
constexpr auto kAskEvery = std::chrono::milliseconds(200);

std::atomic<int> received = 0;

// Accelerators may end in another order than they began in.
int living = 0;
std::array<struct sigaction, kSignals.size()> before = {};

void note_signal(int signal) { received.store(signal, std::memory_order_relaxed); }

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

Preemption::Preemption(const AcceleratorState& state)
    : device_(state.device()), rank_(state.process_index()), size_(state.num_processes()) {
  if (size_ > 1) {
    const auto group = state.process_group();
    if (!group) {
      throw StateError(
          "save_on_preemption: processes cannot agree on a step, because the process group has "
          "been "
          "destroyed. Call end_training after the last Accelerator only.");
    }
    store_ = group->getStore();
    if (!store_) {
      throw UnsupportedError(
          "save_on_preemption: the process group that was lent has no store, through which "
          "processes could agree on a step. Let the library make the group, or turn it off.");
    }
  }
  static int objects = 0;
  number_ = objects++;
  if (living++ > 0) return;
  struct sigaction action{};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &action, &before[i]);
  }
}

Preemption::~Preemption() {
  if (--living > 0) return;
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
}

// What an earlier run of this program has left in the store must not count.
std::string Preemption::key(const std::string& name) const {
  return str("accelerate/preemption/", number_, "/", name);
}

bool Preemption::is_requested() {
  if (received.load(std::memory_order_relaxed) != 0) {
    store_->set(key("request"), bytes_of("1"));
    return true;
  }
  const auto now = Clock::now();
  if (now - asked_ < kAskEvery) return false;
  asked_ = now;
  return store_->check({key("request")});
}

bool Preemption::stops_here(std::int64_t synchronized) {
  if (size_ == 1) return received.load(std::memory_order_relaxed) != 0;
  try {
    return is_agreed(synchronized);
  } catch (const c10::Error&) {
    return false;  // the store is gone with its process; the next collective tells which one
  }
}

bool Preemption::is_agreed(std::int64_t synchronized) {
  if (!requested_) requested_ = is_requested();
  if (!requested_) return false;
  // From here on this process is never ahead of the gradients that it has averaged with others.
  if (!device_.is_cpu()) state::accelerator_backend()->synchronize(device_.index());
  if (!answered_) store_->set(key(str("answer/", rank_)), bytes_of("1"));
  answered_ = true;
  if (rank_ == 0 && !decided_) {
    std::vector<std::string> answers;
    for (int rank = 0; rank < size_; ++rank) answers.push_back(key(str("answer/", rank)));
    decided_ = store_->check(answers);
    if (decided_) store_->set(key("stop"), bytes_of(std::to_string(synchronized + 1)));
  }
  if (!stop_at_ && store_->check({key("stop")})) {
    const auto bytes = store_->get(key("stop"));
    stop_at_ = std::stoll(std::string(bytes.begin(), bytes.end()));
  }
  return stop_at_ && synchronized >= *stop_at_;
}

std::string Preemption::reason() const {
  const int signal = received.load(std::memory_order_relaxed);
  return signal != 0 ? signal_name(signal) : std::string("a signal to another process");
}

}  // namespace accelerate::detail::accelerator
