// Faults at random: whatever becomes of a rank, whenever that is, all others name it and end.
//
// ACCELERATE_TEST_RUNS says how many runs there are and ACCELERATE_TEST_SEED which: a run is made
// from the seed and its number, but for what the system's scheduler adds.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "support/on_processes.h"
#include "support/patience.h"
#include "support/random_faults.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using detail::str;
using test::kRanksDisagree;
using test::kRuns;
using test::kSeed;
using test::number_from;
using test::pick;
using test::Random;
using test::random_of;
using test::uncaught;

// -- What happens in a run ----------------------------------------------------------------------

enum class Fault {
  kEnds,
  kStraysToAnother,
  kOnOneRankOnly,
  kShape,
  kDtype,
  kOrder,
  kThrows,
  kKilled,
  kStopped,
};
constexpr std::array<const char*, 9> kFaults = {"ends",
                                                "strays to another collective",
                                                "collective on one rank only",
                                                "shape",
                                                "dtype",
                                                "order",
                                                "throws",
                                                "killed",
                                                "stopped"};

/// When it happens to a rank, as seen from the collective of that round.
enum class Moment { kBefore, kWithin, kAfter };
constexpr std::array<const char*, 3> kMoments = {"before", "within", "after"};

struct Plan {
  Fault fault = Fault::kEnds;
  Moment moment = Moment::kBefore;
  int ranks = 2;
  int stray = 0;
  int rounds = 0;  ///< that go well before
  const char* backend = "gloo";
  std::uint64_t seed = 0;

  [[nodiscard]] std::string text() const {
    return str("rank ", stray, " of ", ranks, " on ", backend, ": ",
               kFaults[static_cast<std::size_t>(fault)], " ",
               kMoments[static_cast<std::size_t>(moment)], " the collective of round ", rounds);
  }
};

Plan plan_of(std::uint64_t seed, std::uint64_t run, bool stops) {
  auto random = random_of(seed, run);
  Plan plan;
  plan.fault = stops ? Fault::kStopped
                     : static_cast<Fault>(pick(random, 0, static_cast<int>(Fault::kKilled)));
  plan.ranks = pick(random, 2, 5);
  plan.stray = pick(random, 0, plan.ranks - 1);
  plan.rounds = pick(random, 0, 6);
  plan.backend = pick(random, 0, 1) == 0 ? "gloo" : "shm";
  const bool at_any_moment = plan.fault == Fault::kEnds || plan.fault == Fault::kThrows ||
                             plan.fault == Fault::kKilled || plan.fault == Fault::kStopped;
  if (at_any_moment) plan.moment = static_cast<Moment>(pick(random, 0, 2));
  plan.seed = random();
  return plan;
}

// -- What the ranks do --------------------------------------------------------------------------

/// One rank of a run.
class Rank {
 public:
  Rank(PartialState& state, const Plan& plan)
      : state_(state),
        plan_(plan),
        strays_(state.process_index() == plan.stray),
        common_(plan.seed),
        own_(random_of(plan.seed, static_cast<std::uint64_t>(state.process_index()))) {}

  void run() {
    if (plan_.fault == Fault::kStopped) {
      stray_pid_ = all_gather_object(static_cast<std::int64_t>(::getpid())).at(plan_.stray);
    }
    try {
      for (int round = 0; round < plan_.rounds; ++round) {
        pause();
        collective(pick(common_, 0, 6), any_size());
      }
      pause();
      if (strays_) say_when("fault");
      round_of_the_fault();
      // Whoever comes so far without the stray rank finds out here.
      (void)gather(torch::ones({3}));
    } catch (const CommError&) {
      say_when("found");
      end_stopped_rank();
      throw;
    }
  }

 private:
  /// Mostly none, seldom longer than the time after which a rank says that it waits.
  void pause() {
    const int how_long = pick(own_, 0, 99);
    const int most = how_long < 50 ? 0 : how_long < 80 ? 2'000 : how_long < 95 ? 20'000 : 150'000;
    std::this_thread::sleep_for(std::chrono::microseconds(pick(own_, 0, most)));
  }

  std::int64_t any_size() {
    constexpr std::array<std::int64_t, 5> kSizes = {1, 7, 1'000, 40'000, 300'000};
    return kSizes.at(static_cast<std::size_t>(pick(common_, 0, 4)));
  }

  void collective(int which, std::int64_t size) {
    const auto tensor = torch::full({size}, 1.0F);
    switch (which) {
      case 0:
        (void)gather(tensor);
        return;
      case 1:
        (void)reduce(tensor);
        return;
      case 2:
        (void)broadcast(tensor, static_cast<int>(size) % plan_.ranks);
        return;
      case 3:
        (void)all_gather_object(std::string(static_cast<std::size_t>(size % 1'000), 'x'));
        return;
      case 4:
        return state_.wait_for_everyone();
      default:
        for (const auto& work : start(size, which - 3)) work->wait();
    }
  }

  /// Several collectives that are under way together.
  std::vector<c10::intrusive_ptr<c10d::Work>> start(std::int64_t size, int how_many) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < how_many; ++i) {
      std::vector<torch::Tensor> one{torch::full({size + i}, 1.0F)};
      works.push_back(state_.process_group()->allreduce(one));
    }
    return works;
  }

  void round_of_the_fault() {
    switch (plan_.fault) {
      case Fault::kStraysToAnother:
        if (strays_) {
          (void)gather(torch::ones({9}));
        } else {
          (void)reduce(torch::ones({4}));
        }
        return;
      case Fault::kOnOneRankOnly:
        if (strays_) (void)gather(torch::ones({9}));
        return state_.wait_for_everyone();
      case Fault::kShape:
        // As many bytes, so that nothing but the shape tells.
        (void)gather(strays_ ? torch::ones({2, 3}) : torch::ones({3, 2}));
        return;
      case Fault::kDtype:
        (void)gather(torch::ones({4}, strays_ ? torch::kInt : torch::kFloat));
        return;
      case Fault::kOrder:
        if (strays_) (void)reduce(torch::ones({4}));
        (void)gather(torch::ones({9}));
        if (!strays_) (void)reduce(torch::ones({4}));
        return;
      default:
        return end_at_the_moment();
    }
  }

  void end_at_the_moment() {
    const int which = pick(common_, 0, 6);
    const auto size = any_size();
    const bool by_signal = plan_.fault == Fault::kKilled || plan_.fault == Fault::kStopped;
    if (!strays_) return collective(which, size);
    if (plan_.moment == Moment::kWithin && by_signal) return within(which, size);
    if (plan_.moment == Moment::kAfter) collective(which, size);
    if (plan_.moment == Moment::kWithin) (void)collective_under_way(which, size);
    end();
  }

  /// The signal comes from beside, while this thread is in the collective or just before or after.
  void within(int which, std::int64_t size) {
    std::thread([this, delay = std::chrono::microseconds(pick(own_, 0, 3'000))] {
      std::this_thread::sleep_for(delay);
      say_when("fault");
      end();
    }).detach();
    collective(which, size);
    std::this_thread::sleep_for(5s);  // until the signal comes; stopped, until we are killed
  }

  /// Where it can be: begun, and not waited for.
  std::vector<c10::intrusive_ptr<c10d::Work>> collective_under_way(int which, std::int64_t size) {
    if (which > 4) return start(size, which - 3);
    collective(which, size);
    return {};
  }

  void end() const {
    switch (plan_.fault) {
      case Fault::kEnds:
        std::exit(0);
      case Fault::kThrows:
        throw std::runtime_error("the disk is full");
      case Fault::kKilled:
        ::kill(::getpid(), SIGKILL);
        return;
      default:
        ::kill(::getpid(), SIGSTOP);
    }
  }

  /// When all have found out: for each of them it must be the silence that told.
  void end_stopped_rank() const {
    const bool first = state_.process_index() == (plan_.stray == 0 ? 1 : 0);
    if (plan_.fault != Fault::kStopped || !first) return;
    std::this_thread::sleep_for(2s);
    ::kill(static_cast<pid_t>(stray_pid_), SIGKILL);
  }

  /// The clock is the same for all processes.
  static void say_when(const char* what) {
    const auto now = std::chrono::duration<double>(Clock::now().time_since_epoch());
    detail::write_fully(STDERR_FILENO, str("@", what, " ", std::to_string(now.count()), "\n"));
  }

  PartialState& state_;
  const Plan& plan_;
  bool strays_;
  std::int64_t stray_pid_ = 0;
  Random common_;
  Random own_;
};

// -- What must come of it -----------------------------------------------------------------------

/// What the first line of the report must say.
std::string finding_of(const Plan& plan) {
  const auto stray = str("accelerate: rank ", plan.stray, "( \\([^)]*\\))? ");
  switch (plan.fault) {
    case Fault::kEnds:
      return stray + "has ended ";
    case Fault::kThrows:
      return stray + "failed .*the disk is full";
    case Fault::kKilled:
      return stray + "died ";
    case Fault::kStopped:
      return stray + "has given no sign of life for 1[0-9] s \\(the process is stopped\\)";
    default:
      if (plan.ranks == 2) return "accelerate: the ranks are in different collectives:";
      return stray + "is in another collective than the others:";
  }
}

/// What the stray rank and the others are in, where that is known.
std::pair<std::string, std::string> calls_of(const Plan& plan) {
  switch (plan.fault) {
    case Fault::kStraysToAnother:
      return {"gather float32[9]", "reduce "};
    case Fault::kOnOneRankOnly:
      return {"gather float32[9]", "barrier"};
    case Fault::kShape:
      return {"gather float32[2,3]", "gather float32[3,2]"};
    case Fault::kDtype:
      return {"gather int32[4]", "gather float32[4]"};
    case Fault::kOrder:
      return {"reduce ", "gather float32[9]"};
    default:
      return {};
  }
}

double when(const RankOutcome& outcome, const char* what) {
  const auto at = outcome.output.rfind(str("@", what, " "));
  return at == std::string::npos ? 0 : std::stod(outcome.output.substr(at + 2 + std::strlen(what)));
}

/// Empty when all is as it should be.
std::string complaint(const Plan& plan, const std::vector<RankOutcome>& outcomes, double& delay) {
  const std::regex finding(finding_of(plan));
  const auto [of_stray, of_others] = calls_of(plan);
  const bool stray_reports_too = !of_stray.empty();
  const double fault_at = when(outcomes.at(plan.stray), "fault");
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const auto& outcome = outcomes[rank];
    if (outcome.timed_out) return str("rank ", rank, " hangs");
    if (rank == plan.stray && !stray_reports_too) continue;
    if (outcome.exit_code != kRanksDisagree) {
      return str("rank ", rank, " ended with code ", outcome.exit_code, " and signal ",
                 outcome.signal);
    }
    if (!std::regex_search(outcome.output, finding)) {
      return str("rank ", rank, " does not say '", finding_of(plan), "'");
    }
    for (const auto& call : {of_stray, of_others}) {
      if (!outcome.output_contains(call)) return str("rank ", rank, " does not show ", call);
    }
    const double found_at = when(outcome, "found");
    if (found_at < fault_at) return str("rank ", rank, " found it before it happened");
    delay = std::max(delay, found_at - fault_at);
  }
  return "";
}

std::set<std::string> shared_memory() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.is_regular_file()) names.insert(entry.path().filename());
  }
  return names;
}

struct Limits {
  test::Seconds of_finding;  ///< from the fault until all know it
  std::chrono::milliseconds of_run;
};

void run_at_random(std::uint64_t runs, bool stops, const Limits& limits) {
  const auto seed = number_from(kSeed, std::random_device{}());
  const auto before = shared_memory();
  double slowest = 0;
  for (std::uint64_t run = 0; run < runs; ++run) {
    const auto plan = plan_of(seed, run, stops);
    const auto outcomes = run_processes(
        plan.ranks,
        {.timeout = limits.of_run,
         .environment = {{"ACCELERATE_HOST_BACKEND", plan.backend}, {kSeed, str(seed)}}},
        [&plan](PartialState& state) { uncaught([&] { Rank(state, plan).run(); }); });
    if (in_child_process()) continue;
    double delay = 0;
    auto wrong = complaint(plan, outcomes, delay);
    const auto limit = test::patient(limits.of_finding).count();
    if (wrong.empty() && delay > limit) wrong = str("it took ", delay, " s");
    slowest = std::max(slowest, delay);
    if (wrong.empty()) continue;
    std::string written;
    for (int rank = 0; rank < plan.ranks; ++rank) {
      written += str("-- rank ", rank, " wrote:\n", outcomes[rank].output);
    }
    ADD_FAILURE() << kSeed << "=" << seed << ", run " << run << ", " << plan.text() << ": " << wrong
                  << "\n"
                  << written;
  }
  if (in_child_process()) return;
  std::cout << runs << " runs with " << kSeed << "=" << seed << "; the slowest finding took "
            << slowest << " s\n";
  for (const auto& name : shared_memory()) {
    EXPECT_TRUE(before.contains(name)) << name << " was left in /dev/shm";
  }
}

// The slowest of some hundred took a quarter of a second, with three times as many busy threads as
// cores.
TEST(RandomFaults, AreNamedByAllOtherRanks) {
  run_at_random(number_from(kRuns, 20), false, {.of_finding = 1s, .of_run = 30s});
}

// Each takes the ten seconds after which silence is a fault.
TEST(RandomStops, AreNamedByAllOtherRanks) {
  run_at_random(number_from(kRuns, 1'000) / 25, true, {.of_finding = 13s, .of_run = 40s});
}

}  // namespace
}  // namespace accelerate
