// A rank that strays is named by all others, whatever it did.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/launchers.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;

constexpr int kRanksDisagree = 70;

// As in a program whose main catches nothing; the harness would.
void uncaught(const std::function<void()>& f) noexcept { f(); }

struct Setting {
  int ranks;
  const char* backend;
};

std::vector<RankOutcome> programs(const Setting& setting,
                                  const std::function<void(PartialState&)>& main) {
  return run_processes(
      setting.ranks,
      {.timeout = 30s, .environment = {{"ACCELERATE_HOST_BACKEND", setting.backend}}},
      [=](PartialState& state) { uncaught([&] { main(state); }); });
}

// All ranks do two rounds; in the second one rank `bad` does something else.
std::vector<RankOutcome> ranks(const Setting& setting,
                               const std::function<void(PartialState&)>& good,
                               const std::function<void(PartialState&)>& bad, int which = 1) {
  return programs(setting, [=](PartialState& state) {
    (void)gather(torch::ones({4}));
    state.wait_for_everyone();
    if (state.process_index() == which) {
      bad(state);
    } else {
      good(state);
    }
  });
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kPatience = 5;  // processes start that much slower
#else
constexpr double kPatience = 1;
#endif

// Survivors end with the code for it, quickly, and all say `text`.
void expect_all_say(const std::vector<RankOutcome>& outcomes, const std::string& text,
                    double seconds = 3, int except = -1) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (static_cast<int>(rank) == except) continue;
    const auto& outcome = outcomes[rank];
    EXPECT_TRUE(outcome.output_contains(text)) << "rank " << rank << " wrote:\n" << outcome.output;
    EXPECT_EQ(outcome.exit_code, kRanksDisagree) << "rank " << rank << "\n" << outcome.output;
    EXPECT_LT(outcome.seconds, seconds * kPatience) << "rank " << rank;
  }
}

void gather_four(PartialState&) { (void)gather(torch::ones({4})); }

class Faults : public testing::TestWithParam<Setting> {};

TEST_P(Faults, AnotherShapeIsNamed) {
  const auto outcomes = programs(GetParam(), [](PartialState& state) {
    (void)gather(torch::ones({4}));
    // As many bytes, so that nothing but the shape tells.
    (void)gather(state.process_index() == 1 ? torch::ones({2, 3}) : torch::ones({3, 2}));
  });
  expect_all_say(outcomes, "gather float32[2,3] at faults_multi_test.cpp:");
  expect_all_say(outcomes, "gather float32[3,2] at faults_multi_test.cpp:");
  expect_all_say(outcomes, GetParam().ranks == 2
                               ? "the ranks are in different collectives"
                               : "rank 1 is in another collective than the others");
}

TEST_P(Faults, AnotherDtypeIsNamed) {
  const auto outcomes = programs(GetParam(), [](PartialState& state) {
    (void)gather(torch::ones({4}, state.process_index() == 1 ? torch::kInt : torch::kFloat));
  });
  expect_all_say(outcomes, "gather int32[4] at faults_multi_test.cpp:");
}

TEST_P(Faults, ACollectiveOnOneRankOnlyIsNamed) {
  const auto outcomes = ranks(
      GetParam(), [](PartialState& state) { state.wait_for_everyone(); },
      [](PartialState& state) {
        (void)gather(torch::ones({4}));
        state.wait_for_everyone();
      },
      0);
  expect_all_say(outcomes, "gather float32[4] at faults_multi_test.cpp:");
  expect_all_say(outcomes, "barrier at faults_multi_test.cpp:");
}

TEST_P(Faults, TwoCollectivesInAnotherOrderAreNamed) {
  const auto loss = [](PartialState&) { (void)reduce(torch::ones({1})); };
  const auto outcomes = ranks(
      GetParam(),
      [&](PartialState& state) {
        gather_four(state);
        loss(state);
      },
      [&](PartialState& state) {
        loss(state);
        gather_four(state);
      });
  expect_all_say(outcomes, "reduce ");
  expect_all_say(outcomes, "gather ");
}

TEST_P(Faults, ARankThatLeavesTheLoopEarlyIsNamed) {
  const auto outcomes = ranks(GetParam(), gather_four, [](PartialState&) { std::exit(0); });
  expect_all_say(outcomes, "has ended after barrier", 3, 1);
}

TEST_P(Faults, TheExceptionOfOneRankIsShownOnAll) {
  const auto outcomes = ranks(GetParam(), gather_four,
                              [](PartialState&) { throw std::runtime_error("the disk is full"); });
  expect_all_say(outcomes, "the disk is full", 3, 1);
}

TEST_P(Faults, TheExceptionThatRecordCatchesIsShownOnAllToo) {
  const auto outcomes = ranks(GetParam(), gather_four, [](PartialState&) {
    std::exit(record([] { throw std::runtime_error("the disk is full"); }));
  });
  expect_all_say(outcomes, "the disk is full", 3, 1);
}

TEST_P(Faults, AKilledRankIsNamedWithItsLastCall) {
  const auto outcomes =
      ranks(GetParam(), gather_four, [](PartialState&) { ::kill(::getpid(), SIGKILL); });
  expect_all_say(outcomes, "died after barrier at faults_multi_test.cpp:", 3, 1);
}

TEST_P(Faults, AKilledRankZeroIsNamedToo) {
  const auto outcomes = ranks(
      GetParam(), gather_four, [](PartialState&) { ::kill(::getpid(), SIGKILL); }, 0);
  expect_all_say(outcomes, "rank 0 died after barrier at faults_multi_test.cpp:", 3, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, Faults,
                         testing::Values(Setting{2, "gloo"}, Setting{4, "gloo"}, Setting{2, "shm"},
                                         Setting{4, "shm"}),
                         [](const auto& info) {
                           return std::string(info.param.backend) +
                                  std::to_string(info.param.ranks);
                         });

TEST(StoppedRank, IsNamedAfterTenSecondsOnEitherBackend) {
  for (const char* backend : {"gloo", "shm"}) {
    const auto outcomes = programs({3, backend}, [](PartialState& state) {
      const auto pids = all_gather_object(static_cast<std::int64_t>(::getpid()));
      if (state.process_index() == 1) ::kill(::getpid(), SIGSTOP);
      try {
        (void)gather(torch::ones({4}));
      } catch (const CommError&) {
        if (state.process_index() == 0) ::kill(static_cast<pid_t>(pids[1]), SIGKILL);
        throw;
      }
    });
    expect_all_say(outcomes, "no sign of life", 15, 1);
    expect_all_say(outcomes, "(the process is stopped)", 15, 1);
  }
}

TEST(Guard, CanBeCaughtAndTheProcessEnds) {
  const auto outcomes = run_processes(2, {.timeout = 30s}, [](PartialState& state) {
    try {
      (void)gather(torch::ones({state.process_index() + 1}));
      ADD_FAILURE();
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), -1);
    }
    // Every later call says the same, at once.
    EXPECT_THROW(state.wait_for_everyone(), CommError);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(Guard, LetsARankBeBusy) {
  on_processes(2, [](PartialState& state) {
    if (state.process_index() == 1) std::this_thread::sleep_for(1s);
    EXPECT_EQ(gather(torch::ones({1})).numel(), 2);
  });
}

TEST(Guard, KnowsCollectivesByTheirNameWhereTheyAreCalledFromSeveralLines) {
  on_processes(2, [](PartialState& state) {
    const auto named = name_collectives("loss");
    if (state.process_index() == 0) {
      EXPECT_EQ(gather(torch::ones({1})).numel(), 2);
    } else {
      EXPECT_EQ(gather(torch::ones({1})).numel(), 2);
    }
  });
}

TEST(Guard, KeepsManyAsynchronousCollectivesApart) {
  on_processes(3, [](PartialState& state) {
    const auto group = state.process_group();
    for (int round = 0; round < 20; ++round) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      std::vector<torch::Tensor> results;
      for (int i = 0; i < 8; ++i) {
        results.push_back(torch::full({1 + i}, state.process_index() + i));
        std::vector<torch::Tensor> one{results.back()};
        works.push_back(group->allreduce(one));
      }
      for (auto& work : works) work->wait();
      for (int i = 0; i < 8; ++i) EXPECT_EQ(results[i][0].item<int>(), 3 + 3 * i);
    }
  });
}

}  // namespace
}  // namespace accelerate
