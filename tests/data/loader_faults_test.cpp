// Faults at random in data loaders: whatever happens to a dataset, a worker or a rank in the middle
// of a pass, no sample is lost and no process hangs.
//
// ACCELERATE_TEST_RUNS says how many runs there are, ACCELERATE_TEST_SECONDS when the last one may
// begin, and ACCELERATE_TEST_SEED which they are: a run is made from the seed and its number.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "accelerate/accelerate.h"
#include "core/text.h"
#include "data/loading.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using detail::str;
using test::Numbers;

constexpr int kRanksDisagree = 70;
constexpr const char* kSeed = "ACCELERATE_TEST_SEED";

enum class Fault { kNone, kSlow, kLeft, kPaused, kThrows, kStuck, kKilled, kCount };
constexpr std::array<const char*, 7> kFaults = {"nothing",
                                                "a slow sample",
                                                "the loop is left",
                                                "the rank is stopped for a while",
                                                "the dataset throws",
                                                "a worker is stuck",
                                                "the rank is killed"};

struct Plan {
  Fault fault = Fault::kNone;
  int ranks = 1;
  int culprit = 0;
  std::int64_t samples = 0;
  std::int64_t batch_size = 1;
  std::int64_t workers = 0;
  bool dispatch = false;
  bool shuffle = false;
  std::int64_t at = 0;  ///< the sample or batch of the first pass, as counted by the culprit

  [[nodiscard]] bool ends_well() const { return fault <= Fault::kPaused; }
  [[nodiscard]] std::string text() const {
    return str(kFaults[static_cast<std::size_t>(fault)], " at ", at, ", rank ", culprit, " of ",
               ranks, ", ", samples, " samples in batches of ", batch_size, ", ", workers,
               " workers", dispatch ? ", dispatched" : "", shuffle ? ", shuffled" : "");
  }
};

Plan plan_of(std::uint64_t seed, std::uint64_t run) {
  std::seed_seq both{seed, run};
  std::mt19937_64 random(both);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  Plan plan;
  plan.fault = static_cast<Fault>(pick(0, static_cast<int>(Fault::kCount) - 1));
  plan.ranks = pick(plan.fault == Fault::kPaused ? 2 : 1, 3);
  plan.dispatch = pick(0, 2) == 0;
  const bool in_dataset =
      plan.fault == Fault::kSlow || plan.fault == Fault::kThrows || plan.fault == Fault::kStuck;
  // Only process 0 reads what is dispatched.
  plan.culprit = plan.dispatch && in_dataset ? 0 : pick(0, plan.ranks - 1);
  plan.samples = pick(30, 120);
  plan.batch_size = pick(1, 4);
  plan.workers = pick(plan.fault == Fault::kStuck ? 1 : 0, 3);
  plan.shuffle = pick(0, 1) == 0;
  // Every rank has so many batches in a pass.
  plan.at = pick(0, static_cast<int>(plan.samples / (plan.batch_size * plan.ranks)) - 1);
  return plan;
}

/// One rank of a run: a pass with the fault, then one without.
class Rank {
 public:
  Rank(Accelerator& accelerator, const Plan& plan)
      : accelerator_(accelerator),
        plan_(plan),
        is_culprit_(accelerator.process_index() == plan.culprit) {
    const auto pids = all_gather_object(static_cast<std::int64_t>(::getpid()));
    culprit_pid_ = static_cast<pid_t>(pids.at(static_cast<std::size_t>(plan.culprit)));
  }

  void run() {
    auto loader = accelerator_.prepare(test::number_loader(
        plan_.samples,
        {.batch_size = plan_.batch_size,
         .shuffle = plan_.shuffle,
         .num_workers = plan_.workers,
         .timeout = plan_.fault == Fault::kStuck && plan_.workers > 0 ? 3000ms : 0ms},
        [this, count = std::make_shared<std::atomic<std::int64_t>>()](std::int64_t) {
          if (is_culprit_ && (*count)++ == plan_.at) in_dataset();
        }));
    const auto all = test::iota(plan_.samples);
    const auto first = pass(loader, /*with_fault=*/true);
    if (plan_.fault != Fault::kLeft) {
      EXPECT_EQ(first, all);
    }
    EXPECT_EQ(pass(loader, /*with_fault=*/false), all);
  }

 private:
  /// The samples of all ranks, sorted.
  Numbers pass(const test::NumberLoader& loader, bool with_fault) {
    Numbers seen;
    std::int64_t number = 0;
    for (auto& batch : loader) {
      const bool now = with_fault && number++ == plan_.at;
      if (now && plan_.fault == Fault::kLeft) break;
      if (now) in_loop();
      const auto more = test::numbers(accelerator_.gather_for_metrics(batch));
      seen.insert(seen.end(), more.begin(), more.end());
    }
    std::ranges::sort(seen);
    return seen;
  }

  void in_dataset() const {
    if (plan_.fault == Fault::kSlow) std::this_thread::sleep_for(700ms);
    if (plan_.fault == Fault::kStuck) std::this_thread::sleep_for(1000s);
    if (plan_.fault == Fault::kThrows) throw std::runtime_error("the sample is torn");
  }

  void in_loop() const {
    if (plan_.fault == Fault::kKilled && is_culprit_) ::kill(::getpid(), SIGKILL);
    const bool is_next = accelerator_.process_index() == (plan_.culprit + 1) % plan_.ranks;
    if (plan_.fault != Fault::kPaused || !is_next) return;
    ::kill(culprit_pid_, SIGSTOP);
    std::this_thread::sleep_for(500ms);
    ::kill(culprit_pid_, SIGCONT);
  }

  Accelerator& accelerator_;
  const Plan& plan_;
  bool is_culprit_;
  pid_t culprit_pid_ = 0;
};

// As in a program whose main catches nothing; the harness would.
void uncaught(const std::function<void()>& main) noexcept { main(); }

/// Empty if all is as it should be.
std::string complaint(const Plan& plan, const std::vector<RankOutcome>& outcomes) {
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const auto& outcome = outcomes[static_cast<std::size_t>(rank)];
    const auto ended =
        str("rank ", rank, " ended with code ", outcome.exit_code, " and signal ", outcome.signal);
    if (outcome.timed_out) return str("rank ", rank, " hangs");
    if (plan.ends_well()) {
      if (!outcome.ok()) return ended;
      continue;
    }
    // A dispatcher throws what the dataset threw on all ranks.
    const bool shares_it = plan.dispatch && plan.fault != Fault::kKilled;
    if (rank != plan.culprit && !shares_it) {
      if (outcome.exit_code != kRanksDisagree) return ended;
      if (!outcome.output_contains(str("rank ", plan.culprit))) {
        return str("rank ", rank, " does not name rank ", plan.culprit);
      }
      continue;
    }
    if (plan.fault == Fault::kKilled) {
      if (outcome.signal != SIGKILL) return ended;
      continue;
    }
    if (outcome.exit_code == 0) return ended;
    const auto* const reason =
        plan.fault == Fault::kThrows ? "the sample is torn" : "did not come within 3000 ms";
    if (!outcome.output_contains(reason)) return str("rank ", rank, " does not say '", reason, "'");
  }
  return "";
}

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

TEST(LoaderFaults, LoseNoSampleAndHangNoProcess) {
  const auto seed = number_from(kSeed, std::random_device{}());
  const auto runs = number_from("ACCELERATE_TEST_RUNS", 3);
  const auto end =
      Clock::now() + std::chrono::seconds(number_from("ACCELERATE_TEST_SECONDS", 3600));
  std::map<std::string, int> counts;
  for (std::uint64_t run = 0; in_child_process() || (run < runs && Clock::now() < end); ++run) {
    const auto plan = plan_of(seed, run);
    const auto outcomes =
        run_processes(plan.ranks, {.timeout = 60s, .environment = {{kSeed, str(seed)}}}, [&plan] {
          uncaught([&] {
            Accelerator accelerator(
                {.cpu = true, .dataloader_config = {.dispatch_batches = plan.dispatch}});
            Rank(accelerator, plan).run();
          });
        });
    if (in_child_process()) continue;
    ++counts[kFaults[static_cast<std::size_t>(plan.fault)]];
    const auto wrong = complaint(plan, outcomes);
    if (wrong.empty()) continue;
    std::string written;
    for (const auto& outcome : outcomes) written += str("-- a rank wrote:\n", outcome.output);
    ADD_FAILURE() << kSeed << "=" << seed << ", run " << run << ", " << plan.text() << ": " << wrong
                  << "\n"
                  << written;
  }
  std::cout << kSeed << "=" << seed << ":";
  for (const auto& [fault, count] : counts) std::cout << " " << count << " x " << fault << ";";
  std::cout << "\n";
}

}  // namespace
}  // namespace accelerate
