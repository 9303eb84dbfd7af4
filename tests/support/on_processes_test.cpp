// The harness of the multi-process tests, tried on functions that fail in every way.
#include "support/on_processes.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <thread>

#include "accelerate/state.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "(unset)";
}

int rank() { return std::stoi(variable("RANK")); }

// Blocks until something ends this process.
[[noreturn]] void hang() {
  for (;;) ::pause();
}

bool exists(pid_t pid) { return ::kill(pid, 0) == 0; }

TEST(OnProcesses, GivesEachRankTheVariablesOfALauncher) {
  const auto outcomes = run_processes(3, {}, [] {
    std::cout << variable("RANK") << '/' << variable("WORLD_SIZE") << ' ' << variable("LOCAL_RANK")
              << '/' << variable("LOCAL_WORLD_SIZE") << ' ' << variable("MASTER_ADDR") << ' '
              << variable("ACCELERATE_USE_CPU") << ' ' << variable("OMP_NUM_THREADS") << '\n';
  });
  ASSERT_EQ(outcomes.size(), 3u);
  EXPECT_EQ(outcomes[0].output, "0/3 0/3 127.0.0.1 1 1\n");
  EXPECT_EQ(outcomes[1].output, "1/3 1/3 127.0.0.1 1 1\n");
  EXPECT_EQ(outcomes[2].output, "2/3 2/3 127.0.0.1 1 1\n");
}

TEST(OnProcesses, CanPretendSeveralHosts) {
  const auto outcomes = run_processes(3, {.processes_per_host = 2}, [] {
    std::cout << variable("LOCAL_RANK") << '/' << variable("LOCAL_WORLD_SIZE") << '\n';
  });
  EXPECT_EQ(outcomes[0].output, "0/2\n");
  EXPECT_EQ(outcomes[1].output, "1/2\n");
  EXPECT_EQ(outcomes[2].output, "0/1\n");
}

TEST(OnProcesses, SetsAndUnsetsTheVariablesItIsTold) {
  on_processes(1, {.environment = {{"HARNESS_EXTRA", "yes"}, {"MASTER_ADDR", std::nullopt}}}, [] {
    EXPECT_EQ(variable("HARNESS_EXTRA"), "yes");
    EXPECT_EQ(variable("MASTER_ADDR"), "(unset)");
  });
}

TEST(OnProcesses, FormsAGroupOfTheRanks) {
  on_processes(2, [](PartialState& state) {
    EXPECT_EQ(state.num_processes(), 2);
    EXPECT_EQ(state.process_index(), rank());
    state.wait_for_everyone();
  });
}

TEST(OnProcesses, ReportsAFailedExpectationWithItsRankAndText) {
  const auto outcomes = run_processes(2, {}, [] { EXPECT_NE(rank(), 1) << "not on this one"; });
  EXPECT_TRUE(outcomes[0].ok());
  EXPECT_EQ(outcomes[1].exit_code, 1);
  EXPECT_TRUE(outcomes[1].output_contains("not on this one")) << outcomes[1].output;
}

TEST(OnProcesses, FailsTheTestWhenARankFails) {
  // An exception and not an EXPECT: the macro around would catch that in the rank as well.
  EXPECT_NONFATAL_FAILURE(on_processes(2,
                                       [] {
                                         if (rank() == 1) throw std::logic_error("on purpose");
                                       }),
                          "[rank 1] left by an exception: std::logic_error: on purpose");
}

TEST(OnProcesses, TurnsAnExceptionIntoAFailureWithItsTypeAndText) {
  const auto outcomes =
      run_processes(1, {}, [] { throw std::out_of_range("seven is not a rank"); });
  EXPECT_EQ(outcomes[0].exit_code, 1);
  EXPECT_TRUE(outcomes[0].output_contains("std::out_of_range: seven is not a rank"))
      << outcomes[0].output;
}

TEST(OnProcesses, KillsARankThatHangsAtTheTimeLimit) {
  const auto outcomes = run_processes(2, {.timeout = 2s}, [] {
    if (rank() == 0) return;
    std::cout << "about to wait" << std::endl;
    hang();
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[1].timed_out);
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_EQ(outcomes[1].output, "about to wait\n");
}

TEST(OnProcesses, KillsAStoppedRankWhenTheOthersHaveEnded) {
  const auto outcomes = run_processes(2, {.timeout = 60s}, [] {
    if (rank() == 1) ::raise(SIGSTOP);
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[1].timed_out);
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_LT(outcomes[1].seconds, test::patient(20s).count());
}

TEST(OnProcesses, SaysThatARankWasKilledAtTheTimeLimit) {
  EXPECT_NONFATAL_FAILURE(on_processes(1, {.timeout = 1s}, [] { hang(); }),
                          "rank 0 was killed at the time limit");
}

TEST(OnProcesses, ReportsTheSignalOfARankThatCrashes) {
  const auto outcomes = run_processes(2, {}, [] {
    if (rank() == 1) ::raise(SIGKILL);
  });
  EXPECT_TRUE(outcomes[0].ok());
  EXPECT_EQ(outcomes[1].exit_code, -1);
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_FALSE(outcomes[1].timed_out);
}

TEST(OnProcesses, ReportsTheCodeOfARankThatExitsByItself) {
  const auto outcomes = run_processes(1, {}, [] { ::_exit(7); });
  EXPECT_EQ(outcomes[0].exit_code, 7);
}

TEST(OnProcesses, FailsARankThatNeverReachesTheCall) {
  // The parent goes on; a rank leaves the test before the call it was started for.
  if (in_child_process()) return;
  const auto outcomes = run_processes(1, {}, [] {});
  EXPECT_EQ(outcomes[0].exit_code, 86);
  EXPECT_TRUE(outcomes[0].output_contains("ended before it reached its call of on_processes"));
}

TEST(OnProcesses, RunsOnlyTheCallARankWasStartedFor) {
  const auto first = run_processes(1, {}, [] { std::cout << "first\n"; });
  const auto second = run_processes(1, {}, [] { std::cout << "second\n"; });
  if (in_child_process()) return;
  EXPECT_EQ(first[0].output, "first\n");
  EXPECT_EQ(second[0].output, "second\n");
}

TEST(OnProcesses, KeepsTheOutputOfBothStreamsInTheOrderOfWriting) {
  const auto outcomes = run_processes(1, {}, [] {
    std::cout << "one" << std::endl;
    std::cerr << "two" << std::endl;
    std::printf("three without a line end");
  });
  EXPECT_EQ(outcomes[0].output, "one\ntwo\nthree without a line end\n");
}

TEST(OnProcesses, LeavesNoProcessBehind) {
  // The rank starts a process of its own that would outlive it.
  const auto outcomes = run_processes(1, {}, [] {
    const pid_t grandchild = ::fork();
    if (grandchild == 0) hang();
    std::cout << grandchild << std::endl;
  });
  const auto grandchild = static_cast<pid_t>(std::stoi(outcomes[0].output));
  // Killed already; init collects it a moment later.
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (exists(grandchild) && std::chrono::steady_clock::now() < deadline) {
    std::ifstream file("/proc/" + std::to_string(grandchild) + "/stat");
    std::string stat;
    std::getline(file, stat);  // an iterator would throw when the process goes meanwhile
    if (stat.find(") Z ") != std::string::npos) return;
    std::this_thread::yield();
  }
  EXPECT_FALSE(exists(grandchild));
}

}  // namespace
}  // namespace accelerate
