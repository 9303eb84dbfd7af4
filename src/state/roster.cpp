#include "state/roster.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "accelerate/errors.h"
#include "core/exception_text.h"
#include "core/log.h"
#include "core/processes.h"
#include "core/system.h"
#include "core/text.h"
#include "core/world.h"

namespace accelerate::detail::state {
namespace {

using std::chrono::milliseconds;

// How often a waiting rank looks for the reason.
constexpr auto kSlice = milliseconds(1000);
// How long rank 0, which may serve the store, stays so that the others can read why it ends.
constexpr auto kTimeToRead = 3 * kSlice;

constexpr auto kShortestPause = std::chrono::microseconds(500);
constexpr auto kLongestPause = std::chrono::microseconds(250'000);

const std::string kGivenUp = "given_up";

std::string key_of(const std::string& key, int rank) { return str(key, "/", rank); }

void set(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
}

std::string get(c10d::Store& store, const std::string& key) {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

// "rank 2", "ranks 1,3-5".
std::string named(const std::vector<int>& ranks) {
  return str(ranks.size() == 1 ? "rank " : "ranks ", format_cpulist(ranks));
}

// Turns the errors of a store whose server is gone into `CommError`.
template <class F>
decltype(auto) with_store(F&& f) {
  try {
    return f();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw CommError(
        str("the store at which the processes meet went away. Does process 0 still run? (",
            current_exception_text().message, ")"),
        0);
  }
}

}  // namespace

Roster::Roster(c10::intrusive_ptr<c10d::Store> store, int rank, int size, milliseconds timeout)
    : store_(store), presence_(std::move(store)), rank_(rank), size_(size), timeout_(timeout) {
  with_store([&] {
    set(*presence_, key_of("here", rank_),
        str(host_identity(), " ", ::getpid(), " ", this_host_name()));
  });
}

Roster Roster::under(const std::string& prefix) const {
  Roster part = *this;
  part.store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
  return part;
}

void Roster::await_all(Countdown countdown) const {
  await(from(0, "here"), countdown, Step::kArrival);
}

std::string Roster::read(const std::string& key, int rank) const {
  await({{key, rank}}, Countdown(timeout_), Step::kLater);
  return with_store([&] { return get(*store_, key); });
}

std::vector<std::string> Roster::read_all(const std::string& key) const {
  const auto awaited = from(0, key);
  await(awaited, Countdown(timeout_), Step::kLater);
  std::vector<std::string> texts;
  with_store([&] {
    for (const auto& each : awaited) texts.push_back(get(*store_, each.key));
  });
  return texts;
}

void Roster::await_each(const std::string& key, int first) const {
  await(from(first, key), Countdown(timeout_), Step::kLater);
}

void Roster::publish(const std::string& key, const std::string& text) const {
  with_store([&] { set(*store_, key, text); });
}

std::vector<Roster::Awaited> Roster::from(int first, const std::string& key) const {
  std::vector<Awaited> result;
  for (int rank = first; rank < size_; ++rank) result.push_back({key_of(key, rank), rank});
  return result;
}

// Asks again and again: c10d's own wait writes lines to stderr each time it ends without success.
void Roster::await(const std::vector<Awaited>& awaited, Countdown countdown, Step step) const {
  with_store([&] {
    std::span rest = awaited;
    StoppedProcesses stopped;
    auto next_look = Countdown::Clock::now() + kSlice;
    for (auto pause = kShortestPause; !come(rest); pause = std::min(pause * 5 / 4, kLongestPause)) {
      if (countdown.over() || Countdown::Clock::now() >= next_look) {
        look_around(awaited, countdown, step, stopped);
        next_look += kSlice;
      }
      std::this_thread::sleep_for(std::min<std::chrono::microseconds>(pause, countdown.left()));
    }
    // A rank that arrives after the others have given up must fail too.
    if (step == Step::kArrival) refuse_what_is_given_up();
  });
}

// Whether all have come; removes from `rest` those that have.
bool Roster::come(std::span<const Awaited>& rest) const {
  while (!rest.empty() && store_->check({rest.front().key})) rest = rest.subspan(1);
  return rest.empty();
}

// Called when no rank has come for a while.
void Roster::look_around(const std::vector<Awaited>& awaited, Countdown& countdown, Step step,
                         StoppedProcesses& stopped) const {
  refuse_what_is_given_up();
  const bool speaks = is_first_of_those_here(awaited);
  const bool arrival = step == Step::kArrival;
  // With many ranks it is enough that one of them checks all others.
  if (arrival && !speaks && !countdown.over()) return;
  const auto missing = missing_of(awaited);
  if (missing.empty()) return;

  for (int rank = 0; rank < size_; ++rank) {
    // On arrival all registered ranks must stay; later only the awaited ones.
    if (arrival == std::ranges::binary_search(missing, rank)) continue;
    const auto process = process_that_ended(rank);
    // It may have published its text and ended between the two checks.
    if (!process.empty() && missing_of(awaited) == missing) give_up_for(rank, process);
  }
  refuse_stopped(missing, stopped);
  if (countdown.over()) {
    const auto time = in_words(countdown.timeout());
    give_up(arrival ? str(missing.size(), " of ", size_, " processes did not arrive within ", time,
                          ": missing ", named(missing), ". Look at the output of those processes.")
                    : str(named(missing), " arrived, but did not go on to make the group within ",
                          time, ". Look at the output of those processes."),
            missing.front());
  }
  if (!speaks || !countdown.notice_is_due()) return;
  warn(arrival ? str(size_ - missing.size(), " of ", size_, " processes are here, missing ",
                     named(missing), "; ", countdown.text())
               : str("waiting for ", named(missing), " to make the group; ", countdown.text()));
}

std::vector<int> Roster::missing_of(const std::vector<Awaited>& awaited) const {
  std::vector<int> missing;
  for (const auto& each : awaited) {
    if (!store_->check({each.key})) missing.push_back(each.rank);
  }
  return missing;
}

bool Roster::is_first_of_those_here(const std::vector<Awaited>& awaited) const {
  for (int rank = 0; rank < rank_; ++rank) {
    const auto it = std::ranges::find(awaited, rank, &Awaited::rank);
    if (it == awaited.end() || store_->check({it->key})) return false;
  }
  return true;
}

// The process of a rank that has registered.
std::optional<Roster::HostProcess> Roster::process_on_this_host(int rank) const {
  const auto key = key_of("here", rank);
  if (!presence_->check({key})) return std::nullopt;
  const auto words = detail::split(get(*presence_, key), ' ');
  if (words.size() != 3 || words[0] != host_identity()) return std::nullopt;
  return HostProcess{std::stoi(words[1]), str(words[2], ", process ", words[1])};
}

// The process of `rank` as text if it is known to have ended, else "".
std::string Roster::process_that_ended(int rank) const {
  const auto process = process_on_this_host(rank);
  if (!process) return "";
  const auto state = process_state(process->pid);
  return state == "gone" || state == "a zombie" ? process->text : "";
}

void Roster::refuse_stopped(const std::vector<int>& missing, StoppedProcesses& stopped) const {
  std::optional<std::map<int, int>> siblings;
  for (const int rank : missing) {
    auto process = process_on_this_host(rank);
    if (!process) {
      if (!siblings) siblings = sibling_ranks(rank_, size_);
      const auto sibling = siblings->find(rank);
      if (sibling == siblings->end()) continue;
      process = {sibling->second, str(this_host_name(), ", process ", sibling->second)};
    }
    if (stopped.stopped_for(kLongestStop, rank, process->pid)) {
      give_up(stopped_text(rank, process->text, process->pid), rank);
    }
  }
}

void Roster::refuse_what_is_given_up() const {
  if (!presence_->check({kGivenUp})) return;
  const auto text = get(*presence_, kGivenUp);
  const auto blank = text.find(' ');
  const int blamed = std::stoi(text.substr(0, blank));
  set(*presence_, key_of("has_read", rank_), "1");
  if (rank_ == 0) stay_until_all_have_read(blamed);
  throw CommError(text.substr(blank + 1), blamed);
}

void Roster::stay_until_all_have_read(int except) const {
  Roster readers = *this;
  readers.store_ = presence_;
  std::vector<Awaited> awaited;
  for (const auto& each : from(0, "has_read")) {
    const bool is_here = presence_->check({key_of("here", each.rank)});
    if (is_here && each.rank != except) awaited.push_back(each);
  }
  std::span rest = std::as_const(awaited);
  // A stuck rank never reads it.
  for (const Countdown patience(kTimeToRead); !readers.come(rest) && !patience.over();) {
    std::this_thread::sleep_for(kSlice / 100);
  }
}

void Roster::give_up(const std::string& why, int blamed) const {
  // Another rank may be faster, with another text.
  presence_->compareSet(kGivenUp, "", str(blamed, " ", why));
  refuse_what_is_given_up();
  throw CommError(why, blamed);
}

void Roster::give_up_for(int ended, const std::string& process) const {
  give_up(str("rank ", ended, " (", process,
              ") has ended before all processes had started. Look at its output."),
          ended);
}

void Roster::fail(const std::string& message) const {
  with_store([&] {
    // A connection breaks a moment before its process is gone.
    for (const Countdown patience(kSlice); !patience.over();) {
      refuse_what_is_given_up();
      for (int rank = 0; rank < size_; ++rank) {
        const auto process = process_that_ended(rank);
        if (!process.empty()) give_up_for(rank, process);
      }
      std::this_thread::sleep_for(kSlice / 20);
    }
  });
  throw CommError(message);
}

}  // namespace accelerate::detail::state
