// Launches of real processes. Each test runs in a fresh process of its own (`in_a_program`): only
// there no thread runs yet, and what it and its children write can be looked at.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/launchers.h"
#include "accelerate/state.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Changes = std::vector<std::pair<std::string, std::optional<std::string>>>;

// A program that was started by hand: none of the variables of a launcher.
template <class F>
RankOutcome in_a_program(F f, Changes environment = {}, std::chrono::milliseconds timeout = 60s) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}) {
    environment.emplace_back(name, std::nullopt);
  }
  return run_processes(
             1, {.timeout = timeout, .environment = std::move(environment), .rendezvous = false}, f)
      .at(0);
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

using Lines = std::vector<std::string>;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "(unset)";
}

// One write, so that lines of two processes do not mix.
void say(const std::string& text) {
  const std::string line = text + "\n";
  ASSERT_EQ(::write(STDOUT_FILENO, line.data(), line.size()), static_cast<ssize_t>(line.size()));
}

[[noreturn]] void hang() {
  for (;;) ::pause();
}

bool is_gone(pid_t pid) {
  if (::kill(pid, 0) != 0) return true;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);  // an iterator would throw when the process goes meanwhile
  return stat.empty() || stat.find(") Z ") != std::string::npos;
}

// The error of a launch, which must have one.
template <class F>
CommError failure_of(F launch) {
  try {
    launch();
  } catch (const CommError& error) {
    return error;
  }
  ADD_FAILURE() << "the launch succeeded";
  return CommError("no error");
}

TEST(DebugLauncher, RunsTheFunctionOnEveryRankOfAGroup) {
  const auto outcome = in_a_program([] {
    debug_launcher(
        [] {
          PartialState state;
          state.wait_for_everyone();
          say("rank " + std::to_string(state.process_index()) + " of " +
              std::to_string(state.num_processes()) + " on " + state.device().str());
        },
        {.num_processes = 3});
    say("~ and here again");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_EQ(sorted_lines(outcome.output), (Lines{"rank 0 of 3 on cpu:0", "rank 1 of 3 on cpu:0",
                                                 "rank 2 of 3 on cpu:0", "~ and here again"}));
}

TEST(DebugLauncher, RunsTwoProcessesUnlessToldOtherwiseAndPassesArguments) {
  const auto outcome = in_a_program([] {
    const std::string word = "hello";
    debug_launcher([](int number, const std::string& text) { say(text + std::to_string(number)); },
                   {}, 7, word);
  });
  EXPECT_EQ(sorted_lines(outcome.output), (Lines{"hello7", "hello7"})) << outcome.output;
}

TEST(DebugLauncher, GivesTheChildrenTheirVariablesAndTheParentNone) {
  const auto outcome = in_a_program(
      [] {
        debug_launcher([] {
          say(variable("RANK") + "/" + variable("WORLD_SIZE") + " " + variable("LOCAL_RANK") + "/" +
              variable("LOCAL_WORLD_SIZE") + " " + variable("MASTER_ADDR") + ":" +
              variable("MASTER_PORT") + " " + variable("ACCELERATE_MIXED_PRECISION") + " " +
              variable("ACCELERATE_USE_CPU") + " " + variable("GLOO_SOCKET_IFNAME") + " " +
              variable("FORK_LAUNCHED") + " " + variable("TORCHELASTIC_RESTART_COUNT") +
              (variable("ACCELERATE_DEBUG_RDV_FILE") == "(unset)" ? " nowhere" : " file"));
        });
        EXPECT_EQ(variable("WORLD_SIZE"), "(unset)");
        EXPECT_EQ(variable("ACCELERATE_DEBUG_RDV_FILE"), "(unset)");
      },
      {{"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_EQ(sorted_lines(outcome.output),
            (Lines{"0/2 0/2 127.0.0.1:29500 no yes lo 1 (unset) file",
                   "1/2 1/2 127.0.0.1:29500 no yes lo 1 (unset) file"}));
}

TEST(DebugLauncher, SharesTheCoresOut) {
  const auto outcome = in_a_program(
      [] {
        const int share = std::max(1, physical_core_count() / 2);
        debug_launcher([share] {
          EXPECT_EQ(at::get_num_threads(), share);
          EXPECT_EQ(variable("OMP_NUM_THREADS"), std::to_string(share));
          if (::testing::Test::HasFailure()) throw std::runtime_error("see above");
        });
      },
      {{"OMP_NUM_THREADS", std::nullopt}});
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, RethrowsTheFirstFailureWithRankTypeAndText) {
  const auto outcome = in_a_program([] {
    const auto error = failure_of([] {
      debug_launcher(
          [] {
            if (variable("RANK") == "1") throw std::out_of_range("batch 7 is not there");
          },
          {.num_processes = 3});
    });
    EXPECT_EQ(error.rank(), 1);
    EXPECT_STREQ(error.what(),
                 "debug_launcher: rank 1 failed: std::out_of_range: batch 7 is not there");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, EndsTheOthersPromptlyWhenOneFails) {
  const auto outcome = in_a_program([] {
    const auto before = std::chrono::steady_clock::now();
    const auto error = failure_of([] {
      debug_launcher([] {
        if (variable("RANK") == "0") throw StateError("not now");
        hang();
      });
    });
    EXPECT_EQ(error.rank(), 0);
    EXPECT_LT(std::chrono::steady_clock::now() - before, 20s);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, BlamesTheCulpritAndNotThoseWhoWaitedForIt) {
  const auto outcome = in_a_program([] {
    const auto error = failure_of([] {
      debug_launcher([] {
        PartialState state;
        if (state.process_index() == 1) throw std::runtime_error("it was me");
        state.wait_for_everyone();
      });
    });
    EXPECT_EQ(error.rank(), 1);
    EXPECT_STREQ(error.what(), "debug_launcher: rank 1 failed: std::runtime_error: it was me");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, BlamesTheCulpritEvenWhenItEndsLast) {
  const auto outcome = in_a_program([] {
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    const auto error = failure_of([&] {
      debug_launcher([&] {
        pid_t victim = ::getpid();
        if (variable("RANK") == "1") {
          ASSERT_EQ(::write(pipe[1], &victim, sizeof(victim)), ssize_t{sizeof(victim)});
          throw CommError("rank 0 is gone");
        }
        ASSERT_EQ(::read(pipe[0], &victim, sizeof(victim)), ssize_t{sizeof(victim)});
        while (!is_gone(victim)) std::this_thread::yield();
        throw std::runtime_error("it was me");
      });
    });
    EXPECT_EQ(error.rank(), 0);
    EXPECT_STREQ(error.what(), "debug_launcher: rank 0 failed: std::runtime_error: it was me");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, ReportsExitsAndSignals) {
  const auto outcome = in_a_program([] {
    const auto exited = failure_of([] {
      debug_launcher([] {
        if (variable("RANK") == "1") ::_exit(7);
      });
    });
    EXPECT_EQ(exited.rank(), 1);
    EXPECT_STREQ(exited.what(),
                 "debug_launcher: rank 1 ended with exit code 7 and left no message.");
    const auto killed = failure_of([] {
      debug_launcher([] {
        if (variable("RANK") == "0") ::raise(SIGKILL);
      });
    });
    EXPECT_EQ(killed.rank(), 0);
    EXPECT_STREQ(killed.what(),
                 "debug_launcher: rank 0 was ended by signal 9 (SIGKILL) and left no message.");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, CarriesLongAndOddMessagesWhole) {
  const auto outcome = in_a_program([] {
    const std::string text = std::string(10000, 'x') + "\n\"quoted\" \xff end";
    const auto error = failure_of([&] { debug_launcher([&] { throw std::runtime_error(text); }); });
    const std::string what = error.what();
    EXPECT_NE(what.find(std::string(10000, 'x') + "\n\"quoted\" "), std::string::npos);
    EXPECT_TRUE(what.ends_with(" end"));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, RefusesToCopyAProcessWithThreads) {
  const auto outcome = in_a_program([] {
    std::jthread other([](const std::stop_token& stop) {
      while (!stop.stop_requested()) std::this_thread::yield();
    });
    try {
      debug_launcher([] {});
      ADD_FAILURE() << "copied a process with threads";
    } catch (const StateError& error) {
      // Ours, and one that a sanitizer may have started.
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with("debug_launcher: 1 other thread runs in this process") ||
                  message.starts_with("debug_launcher: 2 other threads run in this process"))
          << message;
      EXPECT_TRUE(message.ends_with(
          " and would be missing in copies of it, with whatever locks they hold. Launch before "
          "anything else is computed, or use StartMethod::kSpawn."))
          << message;
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(DebugLauncher, LeavesNothingBehindWhenItIsKilled) {
  // The program never returns from the launch; the harness kills it at the time limit.
  const auto outcome = in_a_program(
      [] {
        debug_launcher([] {
          say(std::to_string(::getpid()));
          hang();
        });
      },
      {}, 3s);
  if (in_child_process()) return;
  EXPECT_TRUE(outcome.timed_out);
  const auto pids = sorted_lines(outcome.output);
  ASSERT_EQ(pids.size(), 2u) << outcome.output;
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  for (const auto& pid : pids) {
    while (!is_gone(std::stoi(pid)) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(is_gone(std::stoi(pid)));
  }
}

TEST(DebugLauncher, LeavesNoFilesBehindWhenItIsKilled) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("accelerate-killed-" + std::to_string(::getpid()));
  if (!in_child_process()) std::filesystem::create_directories(folder);
  const auto outcome = in_a_program(
      [] {
        debug_launcher([] {
          PartialState().wait_for_everyone();
          ::kill(::getppid(), SIGKILL);
          hang();
        });
      },
      {{"TMPDIR", folder.string()}});
  if (in_child_process()) return;
  EXPECT_EQ(outcome.signal, SIGKILL) << outcome.output;
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST(SpawnedProcesses, RunTheProgramAgainUpToTheCall) {
  const auto outcome = in_a_program([] {
    std::jthread other([](const std::stop_token& stop) {
      while (!stop.stop_requested()) std::this_thread::yield();
    });
    say("before " + variable("RANK"));
    debug_launcher(
        [] {
          PartialState state;
          state.wait_for_everyone();
          say("inside " + std::to_string(state.process_index()));
        },
        {.start_method = StartMethod::kSpawn});
    say("after " + variable("RANK"));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_EQ(sorted_lines(outcome.output), (Lines{"after (unset)", "before (unset)", "before 0",
                                                 "before 1", "inside 0", "inside 1"}));
}

TEST(SpawnedProcesses, LeaveNoFilesBehind) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("accelerate-launch-" + std::to_string(::getpid()));
  if (!in_child_process()) std::filesystem::create_directories(folder);
  const auto outcome = in_a_program(
      [] {
        for (const auto method : {StartMethod::kFork, StartMethod::kSpawn}) {
          debug_launcher([] { PartialState().wait_for_everyone(); }, {.start_method = method});
        }
        EXPECT_TRUE(std::filesystem::is_empty(variable("TMPDIR")));
      },
      {{"TMPDIR", folder.string()}});
  std::filesystem::remove_all(folder);
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(SpawnedProcesses, FindTheirCallAmongSeveral) {
  const auto outcome = in_a_program([] {
    for (const char* round : {"first", "second"}) {
      debug_launcher([round] { say(round + (" " + variable("RANK"))); },
                     {.num_processes = 1, .start_method = StartMethod::kSpawn});
    }
    debug_launcher([] { say("third " + variable("RANK")); },
                   {.num_processes = 1, .start_method = StartMethod::kSpawn});
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_EQ(sorted_lines(outcome.output), (Lines{"first 0", "second 0", "third 0"}));
}

TEST(SpawnedProcesses, PassOverALauncherThatRunsItsFunctionInPlace) {
  const auto outcome = in_a_program([] {
    notebook_launcher([] { say("in place"); }, {.num_processes = 1});
    debug_launcher([] { say("spawned " + variable("RANK")); },
                   {.num_processes = 2, .start_method = StartMethod::kSpawn});
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  auto lines = sorted_lines(outcome.output);
  std::erase_if(lines, [](const auto& line) { return line.starts_with("Launching"); });
  EXPECT_EQ(lines, (Lines{"in place", "spawned 0", "spawned 1"}));
}

TEST(SpawnedProcesses, ReportALongMessageThatJsonMakesLonger) {
  const auto outcome = in_a_program([] {
    const auto error = failure_of([] {
      // Each of these bytes takes six in JSON: more than a pipe holds, if it were not cut.
      debug_launcher([] { throw std::runtime_error("long" + std::string(100'000, '\x01')); },
                     {.num_processes = 1, .start_method = StartMethod::kSpawn});
    });
    EXPECT_TRUE(std::string(error.what()).find("long\x01\x01") != std::string::npos);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(SpawnedProcesses, ReportTheirFailures) {
  const auto outcome = in_a_program([] {
    const auto error = failure_of([] {
      debug_launcher(
          [] {
            if (variable("RANK") == "1") throw std::out_of_range("not there");
            hang();
          },
          {.start_method = StartMethod::kSpawn});
    });
    EXPECT_EQ(error.rank(), 1);
    EXPECT_STREQ(error.what(), "debug_launcher: rank 1 failed: std::out_of_range: not there");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(SpawnedProcesses, MustReachTheCall) {
  const auto outcome = in_a_program([] {
    if (variable("RANK") != "(unset)") std::_Exit(0);  // a program that takes another way
    const auto error =
        failure_of([] { debug_launcher([] {}, {.start_method = StartMethod::kSpawn}); });
    EXPECT_NE(std::string(error.what()).find(" ended before it reached the call at "),
              std::string::npos)
        << error.what();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(NotebookLauncher, RunsSeveralProcessesThatMeetAtAPort) {
  const auto outcome = in_a_program([] {
    for (const char* backend : {"static", "c10d"}) {
      notebook_launcher(
          [backend](int number) {
            PartialState state;
            state.wait_for_everyone();
            say(std::string(backend) + " " + std::to_string(state.process_index()) + " " +
                variable("NPROC") + " " + variable("NODE_RANK") + " " +
                variable("ACCELERATE_MIXED_PRECISION") + " " + std::to_string(number));
          },
          {.num_processes = 2,
           .mixed_precision = PrecisionType::kBf16,
           .use_port = "0",
           .rdzv_backend = backend},
          5);
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  const auto lines = sorted_lines(outcome.output);
  ASSERT_EQ(lines.size(), 6u) << outcome.output;
  EXPECT_TRUE(lines[0].starts_with("Launching training on 2 ")) << lines[0];
  EXPECT_EQ(Lines(lines.begin() + 2, lines.end()),
            (Lines{"c10d 0 2 0 bf16 5", "c10d 1 2 0 bf16 5", "static 0 2 0 bf16 5",
                   "static 1 2 0 bf16 5"}));
}

TEST(NotebookLauncher, PutsAPrefixBeforeTheLinesOfTheProcesses) {
  const auto outcome = in_a_program([] {
    notebook_launcher([] { say("hello"); },
                      {.num_processes = 2,
                       .use_port = "0",
                       .log_line_prefix_template = "[${role_name} ${rank}/${local_rank}] "});
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  auto lines = sorted_lines(outcome.output);
  ASSERT_EQ(lines.size(), 3u) << outcome.output;
  EXPECT_EQ(lines[1], "[default 0/0] hello");
  EXPECT_EQ(lines[2], "[default 1/1] hello");
}

TEST(NotebookLauncher, TriesTheMachineFirstInDebugMode) {
  const auto outcome = in_a_program(
      [] {
        notebook_launcher(
            [] { say("function"); },
            {.num_processes = 2, .use_port = "0", .start_method = StartMethod::kSpawn});
      },
      {{"ACCELERATE_DEBUG_MODE", "true"}});
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  const auto lines = sorted_lines(outcome.output);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "function"), 2) << outcome.output;
}

TEST(NotebookLauncher, RethrowsTheFirstFailure) {
  const auto outcome = in_a_program([] {
    const auto error = failure_of([] {
      notebook_launcher(
          [] {
            if (variable("RANK") == "1") throw std::runtime_error("no data");
            hang();
          },
          {.num_processes = 2, .use_port = "0"});
    });
    EXPECT_EQ(error.rank(), 1);
    EXPECT_STREQ(error.what(), "notebook_launcher: rank 1 failed: std::runtime_error: no data");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(NotebookLauncher, StartsAllProcessesAgainWhenOneHasFailed) {
  for (const auto method : {StartMethod::kFork, StartMethod::kSpawn}) {
    const auto outcome = in_a_program([method] {
      notebook_launcher(
          [] {
            PartialState state;
            state.wait_for_everyone();
            const auto attempt = variable("TORCHELASTIC_RESTART_COUNT");
            if (state.process_index() == 1 && attempt != "3") {
              throw std::runtime_error("not yet, attempt " + attempt);
            }
            state.wait_for_everyone();
            say("attempt " + attempt + " of " + variable("TORCHELASTIC_MAX_RESTARTS"));
          },
          {.num_processes = 2, .use_port = "0", .max_restarts = 3, .start_method = method});
      say("done");
    });
    EXPECT_TRUE(outcome.ok()) << outcome.output;
    const auto lines = sorted_lines(outcome.output);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), "attempt 3 of 3"), 2) << outcome.output;
    EXPECT_EQ(std::count(lines.begin(), lines.end(), "done"), 1) << outcome.output;
    EXPECT_TRUE(outcome.output_contains(
        "notebook_launcher: rank 1 failed: std::runtime_error: not yet, attempt 0\n"
        "All processes are started again (restart 1 of 3)."))
        << outcome.output;
  }
}

TEST(NotebookLauncher, GivesUpAfterTheLastRestart) {
  const auto outcome = in_a_program([] {
    const auto error = failure_of([] {
      notebook_launcher(
          [] {
            say("try " + variable("TORCHELASTIC_RESTART_COUNT"));
            throw std::runtime_error("never");
          },
          {.num_processes = 2, .use_port = "0", .max_restarts = 1});
    });
    EXPECT_TRUE(std::string(error.what()).ends_with("failed: std::runtime_error: never"))
        << error.what();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_TRUE(outcome.output_contains("try 1")) << outcome.output;
  EXPECT_FALSE(outcome.output_contains("try 2")) << outcome.output;
}

// Two programs that take themselves for two machines.
template <class F>
std::vector<RankOutcome> on_two_machines(F f) {
  return run_processes(
      2, {.environment = {{"TEST_PORT", std::to_string(get_free_port())}}, .rendezvous = false},
      [f] { f(std::stoi(variable("RANK")), variable("TEST_PORT")); });
}

TEST(NotebookLauncher, RunsOnSeveralMachines) {
  const auto outcomes = on_two_machines([](int machine, const std::string& port) {
    notebook_launcher(
        [] {
          PartialState state;
          state.wait_for_everyone();
          EXPECT_EQ(state.num_machines(), 2);
          say(variable("RANK") + "/" + variable("WORLD_SIZE") + " " + variable("LOCAL_RANK") + "/" +
              variable("LOCAL_WORLD_SIZE") + " " + variable("GROUP_RANK") + "/" +
              variable("GROUP_WORLD_SIZE") + " " + std::to_string(state.local_process_index()));
          state.wait_for_everyone();
        },
        {.num_processes = 2, .use_port = port, .node_rank = machine, .num_nodes = 2});
  });
  if (in_child_process()) return;
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[1].ok()) << outcomes[1].output;
  EXPECT_EQ(sorted_lines(outcomes[0].output),
            (Lines{"0/4 0/2 0/2 0", "1/4 1/2 0/2 1", "Launching training on 2 CPU processes."}));
  EXPECT_EQ(sorted_lines(outcomes[1].output),
            (Lines{"2/4 0/2 1/2 0", "3/4 1/2 1/2 1", "Launching training on 2 CPU processes."}));
}

TEST(NotebookLauncher, RunsOneProcessOnEachOfSeveralMachines) {
  const auto outcomes = on_two_machines([](int machine, const std::string& port) {
    notebook_launcher(
        [] {
          PartialState state;
          state.wait_for_everyone();
          say(std::to_string(state.process_index()) + " of " +
              std::to_string(state.num_processes()));
          state.wait_for_everyone();
        },
        {.num_processes = 1,
         .node_rank = machine,
         .num_nodes = 2,
         .rdzv_endpoint = "localhost:" + port,
         .start_method = StartMethod::kSpawn});
  });
  if (in_child_process()) return;
  EXPECT_TRUE(outcomes[0].output_contains("0 of 2\n")) << outcomes[0].output;
  EXPECT_TRUE(outcomes[1].output_contains("1 of 2\n")) << outcomes[1].output;
}

TEST(NotebookLauncher, WaitsForOtherMachinesAsLongAsItIsTold) {
  const auto outcome = in_a_program([] {
    const auto launch = [](int machine) {
      notebook_launcher([] { PartialState state; }, {.num_processes = 1,
                                                     .use_port = std::to_string(get_free_port()),
                                                     .node_rank = machine,
                                                     .num_nodes = 2,
                                                     .rdzv_conf = {{"timeout", "1.5"}}});
    };
    const auto of_first = failure_of([&] { launch(0); });
    EXPECT_NE(std::string(of_first.what())
                  .find("1 of 2 processes did not arrive within 1500 ms: missing rank 1."),
              std::string::npos)
        << of_first.what();
    const auto of_second = failure_of([&] { launch(1); });
    EXPECT_EQ(of_second.rank(), 1);
    EXPECT_NE(std::string(of_second.what())
                  .find("rank 1 failed: accelerate::CommError: no answer from "
                        "127.0.0.1:"),
              std::string::npos)
        << of_second.what();
    EXPECT_NE(std::string(of_second.what()).find("tried for 1500 ms"), std::string::npos)
        << of_second.what();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST(NotebookLauncher, SaysThatItsPortIsTaken) {
  const auto outcome = in_a_program([] {
    const ReservedPort taken;
    EXPECT_THROW(
        notebook_launcher([] {}, {.num_processes = 2, .use_port = std::to_string(taken.port())}),
        ConfigError);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.output;
}

}  // namespace
}  // namespace accelerate
