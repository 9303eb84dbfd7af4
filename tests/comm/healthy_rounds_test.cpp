// Nothing is wrong: random collectives, random sizes, random delays, ranks that are busy or stopped
// together. Every value is right and nobody reports anything.
//
// ACCELERATE_TEST_ROUNDS says how many rounds there are and ACCELERATE_TEST_SEED which.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "core/text.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;
using Work = c10::intrusive_ptr<c10d::Work>;
using detail::str;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kRanksDisagree = 70;
constexpr std::array<const char*, 2> kBackends = {"gloo", "shm"};

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

/// From `low` to `high`, the same with every library.
int pick(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}

bool all_are(const Tensor& tensor, double value) { return tensor.eq(value).all().item<bool>(); }

/// A rank that does one random collective after the other and looks at the results.
class HealthyRank {
 public:
  HealthyRank(PartialState& state, std::uint64_t seed)
      : state_(state),
        group_(state.process_group()),
        rank_(state.process_index()),
        size_(state.num_processes()),
        common_(seed),
        own_(seed + 1 + static_cast<std::uint64_t>(rank_)) {}

  void rounds(int how_many) {
    for (int i = 0; i < how_many && !testing::Test::HasFailure(); ++i) {
      pause();
      round();
    }
  }

 private:
  /// Mostly none, seldom longer than the time after which a rank says that it waits.
  void pause() {
    const int how_long = pick(own_, 0, 999);
    const int most = how_long < 850   ? 0
                     : how_long < 970 ? 1'000
                     : how_long < 997 ? 10'000
                                      : 250'000;
    if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(pick(own_, 0, most)));
  }

  void round() {
    constexpr std::array<int, 6> kSizes = {1, 3, 100, 5'000, 20'000, 100'000};
    count_ = kSizes.at(static_cast<std::size_t>(pick(common_, 0, 5))) + pick(common_, 0, 3);
    root_ = pick(common_, 0, size_ - 1);
    base_ = pick(common_, 1, 50);
    const int which = pick(common_, 0, 15);
    EXPECT_TRUE(is_right(which)) << "collective " << which << " of " << count_;
  }

  bool is_right(int which) {
    switch (which) {
      case 0:
        return holds_all(gather(of(rank_)));
      case 1:
        return all_are(reduce(of(rank_), Reduction::kSum), sum());
      case 2:
        return all_are(broadcast(of(rank_), root_), value(root_));
      case 3:
        return all_gather_object(std::to_string(value(rank_))).at(root_) ==
               std::to_string(value(root_));
      case 4:
        state_.wait_for_everyone();
        return true;
      case 5:
        return many_at_once();
      case 6:
        return holds_all(all_gathered());
      case 7:
        return reduce_scattered();
      case 8:
        return exchanged();
      case 9:
        return gathered_to_root();
      case 10:
        return scattered();
      case 11:
        return reduced_to_root();
      case 12:
        return passed_on();
      case 13:
        return gathered_to_lists();
      case 14:
        return reduce_scattered_from_lists();
      default:
        return several_reduce_scattered();
    }
  }

  [[nodiscard]] double value(int rank) const { return base_ + rank; }
  [[nodiscard]] Tensor of(int rank) const {
    return torch::full({count_}, value(rank), torch::kFloat);
  }
  [[nodiscard]] Tensor blank(int parts = 1) const { return torch::zeros({count_ * parts}); }
  [[nodiscard]] double sum() const {
    double all = 0;
    for (int rank = 0; rank < size_; ++rank) all += value(rank);
    return all;
  }
  [[nodiscard]] bool holds_all(const Tensor& tensor) const {
    for (int rank = 0; rank < size_; ++rank) {
      if (!all_are(tensor.narrow(0, rank * count_, count_), value(rank))) return false;
    }
    return true;
  }
  [[nodiscard]] bool are_all(const Tensors& tensors) const {
    return holds_all(torch::cat(tensors));
  }

  /// Begun in one order and waited for in another.
  bool many_at_once() {
    std::vector<Work> works;
    Tensors results;
    const int how_many = pick(common_, 2, 6);
    for (int i = 0; i < how_many; ++i) {
      results.push_back(of(rank_) + i);
      Tensors one{results.back()};
      works.push_back(group_->allreduce(one));
    }
    if (pick(own_, 0, 1) == 0) std::reverse(works.begin(), works.end());
    for (const auto& work : works) work->wait();
    for (int i = 0; i < how_many; ++i) {
      if (!all_are(results[static_cast<std::size_t>(i)], sum() + i * size_)) return false;
    }
    return true;
  }

  Tensor all_gathered() {
    auto in = of(rank_);
    auto out = blank(size_);
    const auto work = group_->_allgather_base(out, in);
    pause();
    work->wait();
    return out;
  }

  bool reduce_scattered() {
    auto in = of(rank_).repeat({size_});
    auto out = blank();
    group_->_reduce_scatter_base(out, in)->wait();
    return all_are(out, sum());
  }

  bool reduce_scattered_from_lists() {
    std::vector<Tensors> in{Tensors(static_cast<std::size_t>(size_), of(rank_))};
    Tensors out{blank()};
    const auto work = group_->reduce_scatter(out, in);
    pause();
    work->wait();
    return all_are(out[0], sum());
  }

  bool several_reduce_scattered() {
    Tensors in{of(rank_).repeat({size_}), torch::full({size_}, rank_, torch::kInt)};
    Tensors out{blank(), torch::zeros({1}, torch::kInt)};
    group_->reduce_scatter_tensor_coalesced(out, in)->wait();
    return all_are(out[0], sum()) && all_are(out[1], size_ * (size_ - 1) / 2);
  }

  bool exchanged() {
    auto in = of(rank_).repeat({size_});
    auto out = blank(size_);
    std::vector<std::int64_t> evenly;
    group_->alltoall_base(out, in, evenly, evenly)->wait();
    return holds_all(out);
  }

  bool gathered_to_root() {
    Tensors in{of(rank_)};
    std::vector<Tensors> out;
    if (rank_ == root_) out.push_back(blanks());
    c10d::GatherOptions options;
    options.rootRank = root_;
    group_->gather(out, in, options)->wait();
    return rank_ != root_ || are_all(out[0]);
  }

  bool gathered_to_lists() {
    Tensors in{of(rank_)};
    std::vector<Tensors> out{blanks()};
    group_->allgather(out, in)->wait();
    return are_all(out[0]);
  }

  bool scattered() {
    std::vector<Tensors> in;
    if (rank_ == root_) {
      in.emplace_back();
      for (int rank = 0; rank < size_; ++rank) in[0].push_back(of(rank));
    }
    Tensors out{blank()};
    c10d::ScatterOptions options;
    options.rootRank = root_;
    group_->scatter(out, in, options)->wait();
    return all_are(out[0], value(rank_));
  }

  bool reduced_to_root() {
    Tensors one{of(rank_)};
    c10d::ReduceOptions options;
    options.rootRank = root_;
    group_->reduce(one, options)->wait();
    return rank_ != root_ || all_are(one[0], sum());
  }

  /// To the next rank.
  bool passed_on() {
    Tensors leaves{of(rank_)};
    Tensors arrives{blank()};
    const int before = (rank_ + size_ - 1) % size_;
    const auto sent = group_->send(leaves, (rank_ + 1) % size_, root_);
    group_->recv(arrives, before, root_)->wait();
    sent->wait();
    return all_are(arrives[0], value(before));
  }

  [[nodiscard]] Tensors blanks() const {
    Tensors all;
    for (int rank = 0; rank < size_; ++rank) all.push_back(blank());
    return all;
  }

  PartialState& state_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int rank_;
  int size_;
  Random common_;
  Random own_;

  // Of the round: how many numbers, from whom, and which.
  std::int64_t count_ = 0;
  int root_ = 0;
  double base_ = 0;
};

/// Nobody fails, and nobody has anything to say.
void all_is_well(int ranks, const char* backend, std::chrono::milliseconds timeout,
                 const std::function<void(PartialState&)>& main) {
  const OnProcessesOptions options{.timeout = timeout,
                                   .environment = {{"ACCELERATE_HOST_BACKEND", backend}}};
  const auto outcomes = run_processes(ranks, options, [=](PartialState& state) { main(state); });
  harness::expect_success(outcomes);
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.output, "") << backend;
}

// 10,000 under slow.
TEST(HealthyRounds, GiveTheRightValuesAndNoReport) {
  const auto rounds = static_cast<int>(number_from("ACCELERATE_TEST_ROUNDS", 300));
  const auto seed = number_from("ACCELERATE_TEST_SEED", 1);
  constexpr int kSettings = 6;
  for (const char* backend : kBackends) {
    for (const int ranks : {2, 3, 4}) {
      SCOPED_TRACE(str("ACCELERATE_TEST_SEED=", seed, ", ", ranks, " ranks on ", backend));
      all_is_well(ranks, backend, 10min, [=](PartialState& state) {
        HealthyRank(state, seed * 1'000 + static_cast<std::uint64_t>(ranks))
            .rounds((rounds + kSettings - 1) / kSettings);
      });
    }
  }
}

void keep_busy(std::chrono::seconds time) {
  volatile double sum = 0;
  for (const auto end = Clock::now() + time; Clock::now() < end;) sum = sum + 1;
}

void one_is_busy(std::chrono::seconds time) {
  for (const char* backend : kBackends) {
    all_is_well(3, backend, 60s + time, [=](PartialState& state) {
      HealthyRank rank(state, 1);
      rank.rounds(5);
      if (state.process_index() == 1) keep_busy(time);
      rank.rounds(5);
    });
  }
}

TEST(BusyRank, IsWaitedForInSilence) { one_is_busy(2s); }

// For `make test LABELS=slow`: longer than the silence that is a fault.
TEST(HealthySlow, ARankMayBeBusyForLong) { one_is_busy(15s); }

TEST(HealthySlow, AllRanksMayBeStoppedAndContinuedTogether) {
  for (const char* backend : kBackends) {
    all_is_well(3, backend, 60s, [](PartialState& state) {
      const auto start = Clock::now();
      const auto pids = all_gather_object(static_cast<std::int64_t>(::getpid()));
      if (state.is_main_process()) {
        const auto ranks = detail::join(pids, " ");
        const auto both = str("sleep 0.3; kill -STOP ", ranks, "; sleep 12; kill -CONT ", ranks);
        // Beside us, as the shell of somebody who types Ctrl-Z and later fg.
        ASSERT_EQ(
            std::system(str("setsid sh -c '", both, "' </dev/null >/dev/null 2>&1 &").c_str()), 0);
      }
      HealthyRank rank(state, 2);
      // The stop comes in the middle of these, whichever collective that is.
      while (all_gather_object(Clock::now() - start < 13s).at(0)) rank.rounds(3);
      rank.rounds(50);
      EXPECT_GT(Clock::now() - start, 12s);
    });
  }
}

TEST(HealthySlow, ARankThatIsBusyForAMinuteIsMentionedOnce) {
  for (const char* backend : kBackends) {
    const auto outcomes =
        run_processes(3, {.timeout = 120s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                      [](PartialState& state) {
                        (void)reduce(torch::ones({2}));
                        if (state.process_index() == 1) std::this_thread::sleep_for(64s);
                        (void)gather(torch::ones({4}));
                      });
    if (in_child_process()) continue;
    for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
    const std::regex notice(
        "rank [02] \\([^)]*\\) has waited for 6[0-2] s in gather float32\\[4\\] at "
        "healthy_rounds_test.cpp:[0-9]+ for rank 1 \\([^)]*\\), after reduce [^\n]*It is alive");
    EXPECT_TRUE(std::regex_search(outcomes[0].output, notice)) << outcomes[0].output;
    EXPECT_EQ(outcomes[0].output.find("has waited"), outcomes[0].output.rfind("has waited"));
    EXPECT_EQ(outcomes[1].output + outcomes[2].output, "");
  }
}

TEST(HealthySlow, SixtyFourRanksOnFewCoresGoOnAndNameTheOneThatIsKilled) {
  constexpr int kKilled = 37;
  for (const char* backend : kBackends) {
    const auto outcomes =
        run_processes(64, {.timeout = 240s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                      [](PartialState& state) {
                        HealthyRank(state, 3).rounds(20);
                        if (state.process_index() == kKilled) ::kill(::getpid(), SIGKILL);
                        const std::function<void()> main = [] { (void)gather(torch::ones({4})); };
                        // Uncaught, as in a program; the harness would catch it.
                        [](const auto& f) noexcept { f(); }(main);
                      });
    if (in_child_process()) continue;
    for (int rank = 0; rank < 64; ++rank) {
      const auto& outcome = outcomes[rank];
      if (rank == kKilled) continue;
      EXPECT_EQ(outcome.exit_code, kRanksDisagree) << backend << ", rank " << rank << ":\n"
                                                   << outcome.output;
      EXPECT_TRUE(std::regex_search(outcome.output, std::regex("accelerate: rank 37 [^\n]*died ")))
          << backend << ", rank " << rank << ":\n"
          << outcome.output;
    }
  }
}

}  // namespace
}  // namespace accelerate
