// A rank that strays is named by all others, whatever it did.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/launchers.h"
#include "accelerate/operations.h"
#include "accelerate/operations/objects.h"
#include "accelerate/state.h"
#include "comm/rank_groups.h"
#include "core/subprocess.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;

constexpr int kRanksDisagree = 70;

// As in a program whose main catches nothing; the harness would.
void uncaught(const std::function<void()>& f) noexcept { f(); }

/// The clock is the same for all processes.
void say_when(const std::string& what) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration<double>(now).count();
  detail::write_fully(STDERR_FILENO, "@" + what + " " + std::to_string(seconds) + "\n");
}

double when(const RankOutcome& outcome, const std::string& what) {
  const auto at = outcome.output.rfind("@" + what + " ");
  return at == std::string::npos ? 0 : std::stod(outcome.output.substr(at + what.size() + 2));
}

/// A rank is where something goes wrong.
void it_happens() { say_when("fault"); }

void program(const std::function<void(PartialState&)>& main, PartialState& state) {
  uncaught([&] {
    try {
      main(state);
    } catch (const CommError&) {
      say_when("found");
      throw;
    }
  });
}

struct Setting {
  int ranks;
  const char* backend;
};

std::vector<RankOutcome> programs(const Setting& setting,
                                  const std::function<void(PartialState&)>& main) {
  return run_processes(
      setting.ranks,
      {.timeout = 30s, .environment = {{"ACCELERATE_HOST_BACKEND", setting.backend}}},
      [=](PartialState& state) { program(main, state); });
}

// All ranks do two rounds; in the second one rank `bad` does something else.
std::vector<RankOutcome> ranks(const Setting& setting,
                               const std::function<void(PartialState&)>& good,
                               const std::function<void(PartialState&)>& bad, int which = 1) {
  return programs(setting, [=](PartialState& state) {
    (void)gather(torch::ones({4}));
    state.wait_for_everyone();
    it_happens();
    if (state.process_index() == which) {
      bad(state);
    } else {
      good(state);
    }
  });
}

// Survivors end with the code for it, and all say `text`, a second after the fault at most.
void expect_all_say(const std::vector<RankOutcome>& outcomes, const std::string& text,
                    int except = -1, double seconds = 1) {
  double fault = 0;
  for (const auto& outcome : outcomes) fault = std::max(fault, when(outcome, "fault"));
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (static_cast<int>(rank) == except) continue;
    const auto& outcome = outcomes[rank];
    EXPECT_TRUE(outcome.output_contains(text)) << "rank " << rank << " wrote:\n" << outcome.output;
    EXPECT_EQ(outcome.exit_code, kRanksDisagree) << "rank " << rank << "\n" << outcome.output;
    EXPECT_LT(when(outcome, "found") - fault, test::patient(test::Seconds(seconds)).count())
        << "rank " << rank << "\n"
        << outcome.output;
    EXPECT_GT(when(outcome, "found"), 0) << "rank " << rank << "\n" << outcome.output;
  }
}

void gather_four(PartialState&) { (void)gather(torch::ones({4})); }

class Faults : public testing::TestWithParam<Setting> {};

TEST_P(Faults, AnotherShapeIsNamed) {
  const auto outcomes = programs(GetParam(), [](PartialState& state) {
    (void)gather(torch::ones({4}));
    it_happens();
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
    it_happens();
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
  expect_all_say(outcomes, "has ended after barrier", 1);
}

TEST_P(Faults, TheExceptionOfOneRankIsShownOnAll) {
  const auto outcomes = ranks(GetParam(), gather_four,
                              [](PartialState&) { throw std::runtime_error("the disk is full"); });
  expect_all_say(outcomes, "the disk is full", 1);
}

TEST_P(Faults, TheExceptionThatRecordCatchesIsShownOnAllToo) {
  const auto outcomes = ranks(GetParam(), gather_four, [](PartialState&) {
    std::exit(record([] { throw std::runtime_error("the disk is full"); }));
  });
  expect_all_say(outcomes, "the disk is full", 1);
}

TEST_P(Faults, AKilledRankIsNamedWithItsLastCall) {
  const auto outcomes =
      ranks(GetParam(), gather_four, [](PartialState&) { ::kill(::getpid(), SIGKILL); });
  expect_all_say(outcomes, "died after barrier at faults_multi_test.cpp:", 1);
}

TEST_P(Faults, AKilledRankZeroIsNamedToo) {
  const auto outcomes =
      ranks(GetParam(), gather_four, [](PartialState&) { ::kill(::getpid(), SIGKILL); }, 0);
  expect_all_say(outcomes, ") died after barrier at faults_multi_test.cpp:", 0);
  expect_all_say(outcomes, "accelerate: rank 0 (", 0);
}

TEST_P(Faults, AMessageOfARankThatHasEndedIsNamed) {
  const auto outcomes = ranks(
      GetParam(),
      [](PartialState& state) {
        if (state.process_index() > 0) return gather_four(state);
        std::vector<torch::Tensor> tensors{torch::ones({2, 3})};
        state.process_group()->recv(tensors, 1, 0)->wait();
      },
      [](PartialState&) { std::exit(0); });
  // Two seconds are given to find another cause, where nobody waits in a collective.
  expect_all_say(outcomes, "has ended after barrier at faults_multi_test.cpp:", 1, 3);
  EXPECT_TRUE(outcomes[0].output_contains("this is rank 0, in recv float32[2,3] from rank 1"))
      << outcomes[0].output;
}

INSTANTIATE_TEST_SUITE_P(Backends, Faults,
                         testing::Values(Setting{2, "gloo"}, Setting{4, "gloo"}, Setting{2, "shm"},
                                         Setting{4, "shm"}),
                         [](const auto& info) {
                           return std::string(info.param.backend) +
                                  std::to_string(info.param.ranks);
                         });

// Groups of ranks side by side, one for each setting.
std::vector<std::vector<RankOutcome>> groups_of_programs(
    const std::vector<Setting>& settings, const std::function<void(PartialState&)>& main) {
  std::vector<int> sizes;
  std::vector<std::string> variables;
  for (const auto& [ranks, backend] : settings) {
    sizes.push_back(ranks);
    variables.push_back(std::string("ACCELERATE_HOST_BACKEND=") + backend);
  }
  const RankGroups groups(sizes);
  const auto outcomes =
      run_processes(groups.processes(), groups.options({.timeout = 40s}, variables),
                    [=](PartialState& state) { program(main, state); });
  std::vector<std::vector<RankOutcome>> by_group;
  for (int group = 0; group < groups.count(); ++group) {
    by_group.push_back(groups.of(group, outcomes));
  }
  return by_group;
}

TEST(StoppedRank, IsNamedAfterTenSeconds) {
  const std::vector<Setting> settings = {{2, "gloo"}, {4, "gloo"}, {2, "shm"}, {4, "shm"}};
  const auto groups = groups_of_programs(settings, [](PartialState& state) {
    const auto pids = all_gather_object(static_cast<std::int64_t>(::getpid()));
    it_happens();
    if (state.process_index() == 1) ::kill(::getpid(), SIGSTOP);
    try {
      (void)gather(torch::ones({4}));
    } catch (const CommError&) {
      if (state.process_index() == 0) ::kill(static_cast<pid_t>(pids[1]), SIGKILL);
      throw;
    }
  });
  for (const auto& outcomes : groups) {
    expect_all_say(outcomes, "no sign of life", 1, 12);
    expect_all_say(outcomes, "(the process is stopped)", 1, 12);
  }
}

// Rank 1 has another size, dtype or number of tensors, and not in the first one.
void stray_in_a_coalesced_call(PartialState& state, int which) {
  const auto group = state.process_group();
  const bool strays = state.process_index() == 1;
  std::vector<torch::Tensor> tensors{torch::ones({4}), torch::ones({2, 3})};
  it_happens();
  if (which == 0) {
    if (strays) tensors[1] = torch::ones({2, 4});
    group->allreduce_coalesced(tensors)->wait();
  } else if (which == 1) {
    // As many bytes.
    if (strays) tensors[1] = torch::ones({2, 3}, torch::kInt);
    std::vector<torch::Tensor> wholes{torch::zeros({8}),
                                      torch::zeros({4, 3}, tensors[1].options())};
    group->allgather_into_tensor_coalesced(wholes, tensors)->wait();
  } else {
    if (strays) tensors.push_back(torch::ones({5}));
    std::vector<std::vector<torch::Tensor>> lists(2);
    for (auto& list : lists) {
      for (const auto& tensor : tensors) list.push_back(torch::zeros_like(tensor));
    }
    group->getBackend(c10::DeviceType::CPU)->allgather_coalesced(lists, tensors)->wait();
  }
}

TEST(Guard, ComparesAllTensorsOfACoalescedCall) {
  const std::vector<Setting> settings = {{2, "gloo"}, {2, "gloo"}, {2, "gloo"},
                                         {2, "shm"},  {2, "shm"},  {2, "shm"}};
  const auto groups = groups_of_programs(settings, [](PartialState& state) {
    stray_in_a_coalesced_call(state, RankGroups::own() % 3);
  });
  const std::vector<std::string> of_stray = {"float32[4], float32[2,4]", "float32[4], int32[2,3]",
                                             "float32[4], float32[2,3], float32[5]"};
  for (std::size_t group = 0; group < groups.size(); ++group) {
    expect_all_say(groups[group], "the ranks are in different collectives");
    expect_all_say(groups[group], "float32[4], float32[2,3]");
    expect_all_say(groups[group], of_stray[group % 3]);
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

// A program that ends its group, and has a fault later.
TEST(DestroyedGroup, LeavesAnExceptionAsItIs) {
  for (const char* backend : {"gloo", "shm"}) {
    const auto outcomes =
        run_processes(2, {.timeout = 30s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                      [](PartialState& state) {
                        uncaught([&] {
                          (void)gather(torch::ones({4}));
                          state.wait_for_everyone();
                          if (state.process_index() == 1) {
                            std::vector<torch::Tensor> one{torch::ones({4})};
                            (void)state.process_group()->allreduce(one);
                          }
                          state.destroy_process_group();
                          if (state.process_index() == 1) std::this_thread::sleep_for(2s);
                          throw std::runtime_error("the disk is full");
                        });
                      });
    for (const auto& outcome : outcomes) {
      EXPECT_TRUE(outcome.output_contains("the disk is full")) << outcome.output;
      EXPECT_FALSE(outcome.output_contains("deadlock")) << outcome.output;
      EXPECT_FALSE(outcome.timed_out);
    }
  }
}

/// How a forked copy of this process ends, which runs `f`.
int status_of_fork(const std::function<void()>& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(15);  // it must not hang
    f();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

/// Whether `f` throws `StateError` that names the fork.
bool is_refused(const std::function<void()>& f) {
  try {
    f();
  } catch (const StateError& error) {
    const auto said = "process " + std::to_string(::getpid()) + " was forked from process " +
                      std::to_string(::getppid());
    if (std::string(error.what()).find(said) != std::string::npos) return true;
    detail::write_fully(STDERR_FILENO, error.what());
  } catch (const std::exception& error) {
    detail::write_fully(STDERR_FILENO, error.what());
  }
  return false;
}

TEST(ForkedRank, DoesNotSpeakForItsParent) {
  for (const char* backend : {"gloo", "shm"}) {
    on_processes(2, {.timeout = 60s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                 [](PartialState& state) {
                   const auto rank = torch::full({4}, state.process_index());
                   (void)gather(rank);
                   const auto group = state.process_group();
                   const auto part = group->splitGroup({0, 1}, {}, {}, {}, {});
                   std::vector<torch::Tensor> one{torch::ones({1 << 16})};
                   const auto pending = part->allreduce(one);
                   pending->wait();
                   const std::vector<std::function<void()>> calls = {
                       [&] { (void)gather(torch::full({4}, 9)); },
                       [&] { (void)reduce(torch::ones({4})); },
                       [&] { (void)all_gather_object(7); },
                       [&] { state.wait_for_everyone(); },
                       [&] { (void)state.store(); },
                       [&] { state.destroy_process_group(); },
                       [&] { group->allreduce(one)->wait(); },
                       [&] { part->allreduce(one)->wait(); },
                       [&] { group->send(one, 1 - state.process_index(), 0)->wait(); },
                       [&] { group->barrier()->wait(); },
                       [&] {
                         PartialState::_reset_state();
                         const PartialState again;
                       },
                   };
                   for (std::size_t i = 0; i < calls.size(); ++i) {
                     const int status = status_of_fork([&] {
                       if (!is_refused(calls[i])) ::_exit(1);
                     });
                     EXPECT_EQ(status, 0) << "call " << i;
                   }
                   const auto all = gather(rank);
                   EXPECT_EQ(all[0].item<int>(), 0);
                   EXPECT_EQ(all[4].item<int>(), 1);
                 });
  }
}

TEST(ForkedRank, OfAGroupOfItsOwnTellsWhyItFails) {
  const auto outcomes = run_processes(2, {.timeout = 60s}, [](PartialState& state) {
    const int rank = state.process_index();
    state.wait_for_everyone();
    state.destroy_process_group();
    PartialState::_reset_state();
    const std::string file = std::getenv("ACCELERATE_DEBUG_RDV_FILE");
    ::setenv("ACCELERATE_DEBUG_RDV_FILE", (file + ".forked").c_str(), 1);
    const int status = status_of_fork([rank] {
      ::_exit(record([rank] {
        const PartialState own;
        if (rank == 1) throw std::runtime_error("the disk is full");
        own.wait_for_everyone();
      }));
    });
    EXPECT_TRUE(WIFEXITED(status)) << status;
    EXPECT_EQ(WEXITSTATUS(status), rank == 1 ? 1 : kRanksDisagree);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.output;
    EXPECT_TRUE(outcome.output_contains("the disk is full")) << outcome.output;
  }
}

TEST(ForkedRank, ComputesAndEndsWithoutAWordToTheOthers) {
  for (const char* backend : {"gloo", "shm"}) {
    on_processes(2, {.timeout = 60s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                 [](PartialState& state) {
                   (void)gather(torch::ones({4}));
                   auto part = state.process_group()->splitGroup({0, 1}, {}, {}, {}, {});
                   const int status = status_of_fork([&] {
                     if (torch::ones({4}).sum().item<float>() != 4) ::_exit(1);
                     if (state.num_processes() != 2) ::_exit(2);
                     part.reset();
                     std::exit(3);  // with all that is done at an exit
                   });
                   // The harness has the last word at an exit that the test did not expect.
                   EXPECT_TRUE(WIFEXITED(status)) << status;
                   EXPECT_NE(WEXITSTATUS(status), 1);
                   EXPECT_NE(WEXITSTATUS(status), 2);
                   EXPECT_EQ(status_of_fork([] { ::execlp("true", "true", nullptr); }), 0);
                   std::this_thread::sleep_for(500ms);
                   EXPECT_EQ(gather(torch::ones({4})).numel(), 8);
                   std::vector<torch::Tensor> one{torch::ones({1})};
                   part->allreduce(one)->wait();
                   EXPECT_EQ(one[0].item<float>(), 2);
                 });
  }
}

}  // namespace
}  // namespace accelerate
