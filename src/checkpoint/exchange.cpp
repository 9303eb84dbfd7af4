#include "checkpoint/exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "core/exception_text.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPoll = std::chrono::milliseconds(5);
constexpr auto kBeat = std::chrono::milliseconds(500);
// As long as the guard of collectives waits for a sign of life.
constexpr auto kSilence = std::chrono::seconds(10);

// What a process has to say: its bytes, or what went wrong.
constexpr char kWorked = '+';
constexpr char kThrew = '-';

constexpr std::string_view kConsequence =
    " The checkpoint is not published; the one before it is as it was.";

/// Counts up until it is stopped, or the store is gone.
void beat_until_stopped(const std::stop_token& stop, c10d::Store& store, const std::string& key) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  try {
    while (!stop.stop_requested()) {
      store.add(key, 1);
      stopped.wait_for(lock, stop, kBeat, [] { return false; });
    }
  } catch (const c10::Error&) {  // the thread that waits for an answer meets the same error
  }
}

}  // namespace

/// The silence of another process.
class StoreRounds::Watch {
 public:
  Watch(c10d::Store& store, std::string key) : store_(store), key_(std::move(key)) {}

  /// How long nothing was heard. Time in which this process did not run does not count.
  [[nodiscard]] Clock::duration silence() {
    const auto now = Clock::now();
    silence_ += std::min<Clock::duration>(now - std::exchange(looked_, now), kBeat);
    if (now < next_) return silence_;
    next_ = now + kBeat;
    const auto beats = store_.add(key_, 0);
    if (beats != std::exchange(beats_, beats)) silence_ = {};
    return silence_;
  }

 private:
  c10d::Store& store_;
  std::string key_;
  std::int64_t beats_ = -1;
  Clock::duration silence_ = {};
  Clock::time_point looked_ = Clock::now();
  Clock::time_point next_ = {};
};

StoreRounds::StoreRounds(StoreExchange where, std::stop_token stop)
    : where_(std::move(where)), stop_(std::move(stop)) {
  if (where_.size == 1) return;
  beat_ =
      std::jthread([store = where_.store, key = beat_key(where_.rank)](
                       const std::stop_token& ended) { beat_until_stopped(ended, *store, key); });
}

std::string StoreRounds::key(int round, int rank) const {
  return str(where_.prefix, "/", round, "/", rank);
}

std::string StoreRounds::beat_key(int rank) const { return str(where_.prefix, "/alive/", rank); }

void StoreRounds::set(int round, const std::string& answer) {
  where_.store->set(key(round, where_.rank),
                    std::vector<std::uint8_t>(answer.begin(), answer.end()));
}

// Asks now and then: a request that waits would keep other threads from the store.
std::string StoreRounds::answer_of(int rank) const {
  const auto deadline = Clock::now() + where_.timeout;
  Watch watch(*where_.store, beat_key(rank));
  while (!where_.store->check({key(round_, rank)})) {
    if (stop_.stop_requested()) {
      throw CommError(str("Saving ended before rank ", rank, " had answered.", kConsequence), rank);
    }
    if (watch.silence() > kSilence) {
      throw CommError(str("Saving failed: rank ", rank, " has given no sign of life for ",
                          kSilence.count(), " s.", kConsequence),
                      rank);
    }
    if (Clock::now() > deadline) {
      throw CommError(str("Saving failed: rank ", rank, " has not answered within ",
                          std::chrono::duration_cast<std::chrono::seconds>(where_.timeout).count(),
                          " s, which is the timeout.", kConsequence),
                      rank);
    }
    std::this_thread::sleep_for(kPoll);
  }
  const auto bytes = where_.store->get(key(round_, rank));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::string> StoreRounds::all_answers() {
  try {
    std::vector<std::string> all;
    for (int rank = 0; rank < where_.size; ++rank) all.push_back(answer_of(rank));
    return all;
  } catch (const CommError& error) {
    // For those that still take part: they need not wait for this process.
    set(round_ + 1, kThrew + std::string(error.what()));
    throw;
  }
}

std::vector<std::string> StoreRounds::exchange(const std::function<std::string()>& encode) {
  if (where_.size == 1) return {encode()};
  std::string mine;
  std::exception_ptr thrown;
  try {
    mine = kWorked + encode();
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    mine = kThrew + std::string(error.what());
  }
  std::vector<std::string> all;
  try {
    ++round_;
    set(round_, mine);
    all = all_answers();
  } catch (const c10::Error&) {
    if (thrown) std::rethrow_exception(thrown);
    throw CommError(str("Saving failed: the store through which processes agree does not answer (",
                        current_exception_text().message, "). Rank 0, which serves it, may have ",
                        "ended.", kConsequence),
                    0);
  }
  const auto failed = std::ranges::find(all, kThrew, [](const auto& text) { return text.front(); });
  if (failed != all.end()) {
    finish();
    if (thrown) std::rethrow_exception(thrown);
    const auto rank = static_cast<int>(failed - all.begin());
    throw CommError(str("Saving failed on rank ", rank, ": ", failed->substr(1)), rank);
  }
  for (auto& answer : all) answer.erase(0, 1);
  return all;
}

void StoreRounds::finish() noexcept {
  if (where_.size == 1) return;
  beat_ = {};
  try {
    auto& store = *where_.store;
    const auto done = str(where_.prefix, "/done");
    store.add(done, 1);
    if (where_.rank != 0) return;
    const auto deadline = Clock::now() + kSilence;
    while (store.add(done, 0) < where_.size && Clock::now() < deadline && !stop_.stop_requested()) {
      std::this_thread::sleep_for(kPoll);
    }
    store.deleteKey(done);
    for (int rank = 0; rank < where_.size; ++rank) {
      store.deleteKey(beat_key(rank));
      for (int round = 1; round <= round_; ++round) store.deleteKey(key(round, rank));
    }
  } catch (const std::exception&) {  // the store is gone; all that matters has been said
  }
}

Exchange exchange_by_collective(const char* operation, std::source_location where) {
  return [=](const std::function<std::string()>& encode) -> std::vector<std::string> {
    if (comm::is_alone(/*group=*/nullptr)) return {encode()};
    return comm::ObjectMessages::exchange(encode, /*group=*/nullptr, operation, where);
  };
}

}  // namespace accelerate::detail::checkpoint
