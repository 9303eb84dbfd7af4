// NCCL between several ranks, and what happens when one of them strays.
//
// NCCL refuses two ranks on one GPU of one host. Ranks that give their hosts different names
// (NCCL_HOSTID) pass for ranks of different hosts and talk through sockets, which is all that is
// needed here.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "support/on_processes.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;

constexpr int kRanksDisagree = 70;

// As in a program whose main catches nothing; the harness would.
void uncaught(const std::function<void()>& f) noexcept { f(); }

class Nccl : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }

  using Main = std::function<void(PartialState&)>;

  static std::vector<RankOutcome> programs(const Main& main) {
    return run_processes(
        GetParam(),
        {.timeout = 60s,
         .environment = {{"ACCELERATE_USE_CPU", std::nullopt}, {"NCCL_SOCKET_IFNAME", "lo"}},
         .processes_per_host = 1},
        [=] {
          ::setenv("NCCL_HOSTID", std::getenv("RANK"), 1);
          uncaught([&] {
            PartialState state({.backend = "nccl"});
            main(state);
          });
        });
  }

  // All ranks do two rounds; in the second one `which` does something else. What is waited for is
  // waited for as programs do: a number is read from the device.
  static std::vector<RankOutcome> ranks(const Main& bad, int which = 1) {
    return programs([=](PartialState& state) {
      const auto ones = torch::ones({4}, state.device());
      EXPECT_EQ(gather(ones).sum().item<float>(), 4 * GetParam());
      state.wait_for_everyone();
      std::this_thread::sleep_for(500ms);  // until c10d has seen that they are complete
      if (state.process_index() == which) {
        bad(state);
      } else {
        (void)gather(ones).sum().item<float>();
      }
    });
  }

  static void expect_all_say(const std::vector<RankOutcome>& outcomes, const std::string& text,
                             int except = -1) {
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
      if (static_cast<int>(rank) == except) continue;
      const auto& outcome = outcomes[rank];
      EXPECT_TRUE(outcome.output_contains(text)) << "rank " << rank << " wrote:\n"
                                                 << outcome.output;
      EXPECT_EQ(outcome.exit_code, kRanksDisagree) << "rank " << rank << "\n" << outcome.output;
    }
  }
};

TEST_P(Nccl, CollectivesOfAllKindsInManyRounds) {
  const auto outcomes = programs([](PartialState& state) {
    const int rank = state.process_index();
    const auto on_device = torch::TensorOptions(state.device());
    const float all = GetParam() * (GetParam() + 1) / 2.0F;
    for (int round = 0; round < 50; ++round) {
      const auto mine = torch::full({1 + round}, rank + 1, on_device.dtype(torch::kFloat));
      EXPECT_EQ(gather(mine).sum().item<float>(), all * (1 + round));
      EXPECT_EQ(reduce(mine, Reduction::kSum)[0].item<float>(), all);
      EXPECT_EQ(broadcast(mine.clone(), 1)[0].item<float>(), 2);
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      std::vector<torch::Tensor> results;
      for (int i = 0; i < 4; ++i) {
        results.push_back(mine * i);
        std::vector<torch::Tensor> one{results.back()};
        works.push_back(state.process_group()->allreduce(one));
      }
      for (auto& work : works) work->wait();
      for (int i = 0; i < 4; ++i) EXPECT_EQ(results[i][0].item<float>(), all * i);
    }
    state.wait_for_everyone();
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST_P(Nccl, ARankThatIsBusyIsWaitedFor) {
  const auto outcomes = programs([](PartialState& state) {
    const auto ones = torch::ones({4}, state.device());
    for (int round = 0; round < 3; ++round) {
      if (state.process_index() == round % GetParam()) std::this_thread::sleep_for(1500ms);
      EXPECT_EQ(gather(ones).sum().item<float>(), 4 * GetParam());
    }
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
}

// NCCL moves what fits: ranks with less may get what they want. They learn it in their next call.
TEST_P(Nccl, AnotherShapeIsNamed) {
  const auto outcomes = programs([](PartialState& state) {
    (void)gather(torch::ones({4}, state.device())).sum().item<float>();
    const int size = state.process_index() == 1 ? 9 : 4;
    (void)gather(torch::ones({size}, state.device())).sum().item<float>();
    state.wait_for_everyone();
  });
  expect_all_say(outcomes, "gather float32[9] at nccl_test.cpp:");
  expect_all_say(outcomes, "gather float32[4] at nccl_test.cpp:");
}

TEST_P(Nccl, AnotherCollectiveIsNamed) {
  const auto outcomes = ranks([](PartialState& state) { state.wait_for_everyone(); });
  expect_all_say(outcomes, "gather float32[4] at nccl_test.cpp:");
  expect_all_say(outcomes, "barrier at nccl_test.cpp:");
}

TEST_P(Nccl, ARankThatLeavesEarlyIsNamed) {
  const auto outcomes = ranks([](PartialState&) { std::exit(0); });
  expect_all_say(outcomes, "has ended after barrier", 1);
}

TEST_P(Nccl, TheExceptionOfOneRankIsShownOnAll) {
  const auto outcomes = ranks([](PartialState&) { throw std::runtime_error("the disk is full"); });
  expect_all_say(outcomes, "the disk is full", 1);
}

TEST_P(Nccl, AKilledRankIsNamed) {
  for (const int which : {0, 1}) {
    const auto outcomes = ranks([](PartialState&) { ::kill(::getpid(), SIGKILL); }, which);
    expect_all_say(outcomes, "died after barrier at nccl_test.cpp:", which);
  }
}

TEST_P(Nccl, AStoppedRankIsNamed) {
  const auto outcomes = programs([](PartialState& state) {
    const auto pids = all_gather_object(static_cast<std::int64_t>(::getpid()));
    if (state.process_index() == 1) {
      // Whoever ends first ends the stopped one too.
      if (::fork() == 0) {
        std::this_thread::sleep_for(14s);
        ::kill(static_cast<pid_t>(pids[1]), SIGKILL);
        ::_exit(0);
      }
      ::kill(::getpid(), SIGSTOP);
    }
    (void)gather(torch::ones({4}, state.device())).sum().item<float>();
  });
  expect_all_say(outcomes, "no sign of life", 1);
}

TEST_P(Nccl, ARankThatNeverConnectsIsNamed) {
  const auto outcomes = programs([](PartialState& state) {
    if (state.process_index() == 1) std::exit(0);
    (void)gather(torch::ones({4}, state.device())).sum().item<float>();
  });
  expect_all_say(outcomes, "has ended before its first collective", 1);
}

// A program may meet the error in a call of its own, and end as it likes.
TEST_P(Nccl, CanBeCaughtInTheNextCall) {
  const auto outcomes = programs([](PartialState& state) {
    const auto ones = torch::ones({4}, state.device());
    (void)gather(ones).sum().item<float>();
    try {
      if (state.process_index() == 1) {
        state.wait_for_everyone();
      } else {
        for (;;) {
          (void)gather(ones);
          std::this_thread::sleep_for(20ms);
        }
      }
    } catch (const CommError& error) {
      std::cout << "saved" << std::endl;  // and no destructor waits
    }
  });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (rank == 1) continue;  // waits for its stream
    EXPECT_TRUE(outcomes[rank].ok()) << outcomes[rank].output;
    EXPECT_TRUE(outcomes[rank].output_contains("saved")) << outcomes[rank].output;
  }
  EXPECT_EQ(outcomes[1].exit_code, kRanksDisagree) << outcomes[1].output;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Nccl, testing::Values(2, 3));

}  // namespace
}  // namespace accelerate
