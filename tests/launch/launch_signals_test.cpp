// How a launch ends before its time: keys, signals, closed terminals, a killed launcher.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "launch/launching.h"

namespace accelerate::test {
namespace {

const std::string kControlC = "\x03";
const std::string kControlZ = "\x1a";
const std::string kControlBackslash = "\x1c";

// 'T' for a stopped process, 'S' or 'R' for one that goes on.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);  // an iterator would throw when the process goes meanwhile
  const auto name_ends = stat.rfind(") ");
  return name_ends == std::string::npos ? '-' : stat[name_ends + 2];
}

// The workers say "up" and wait; `before` comes first.
CommandOptions waiting(int processes, const Words& flags, const Words& before) {
  return launch(processes, flags, probe(before + Words{"say=up", "wait"}));
}

CommandOptions in_terminal(CommandOptions options) {
  options.terminal = true;
  return options;
}

struct Case {
  int signal;
  const char* name;
};

class LaunchPassesOn : public ::testing::TestWithParam<Case> {};

TEST_P(LaunchPassesOn, TheSignalThatItGets) {
  const auto [signal, name] = GetParam();
  Command command(waiting(2, {}, {"trap=0"}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(signal);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 128 + signal);
  EXPECT_EQ(count_of(outcome.output, std::string("caught ") + name), 2) << outcome.text();
  EXPECT_LT(outcome.seconds, patient(Seconds(3)).count());
}

INSTANTIATE_TEST_SUITE_P(Each, LaunchPassesOn,
                         ::testing::Values(Case{SIGINT, "SIGINT"}, Case{SIGTERM, "SIGTERM"},
                                           Case{SIGHUP, "SIGHUP"}, Case{SIGQUIT, "SIGQUIT"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LaunchSignal, MayBeAnotherOneThatWasChosen) {
  Command command(launch(2, {"--signals_to_handle", "SIGUSR1,SIGTERM"},
                         {"/bin/sh", "-c",
                          "trap 'echo saved; exit 75' USR1; echo up; "
                          "while :; do sleep 0.02; done"}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGUSR1);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 75);  // preempted after a good save
  EXPECT_EQ(count_of(outcome.output, "saved"), 2) << outcome.text();
}

TEST(LaunchSignal, MayMeanSomethingElseToWorkersIfItIsSigusr1) {
  const Folder folder;
  Command command(launch(2, {"--shutdown_timeout", "1"},
                         {"/bin/sh", "-c",
                          "trap 'echo noted' USR1; echo up; "
                          "while [ ! -e '" +
                              folder / "go" + "' ]; do sleep 0.02; done"}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGUSR1);
  ASSERT_TRUE(command.saw("noted", 2)) << command.error();
  ::usleep(1'200'000);
  EXPECT_TRUE(command.running()) << "they need not end";
  std::ofstream(folder / "go") << "";
  expect_clean_end(command.wait(), 0);
}

TEST(LaunchSignal, Sigusr1EndsWorkersThatDoNotExpectItForGood) {
  Command command(waiting(2, {"--max_restarts", "5"}, {}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGUSR1);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 128 + SIGUSR1);
  EXPECT_TRUE(contains(outcome.error, "(SIGUSR1) received by PID")) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "up"), 2) << outcome.text();
}

TEST(LaunchSignal, IsHeardByTheFirstProcessOfAContainer) {
  // There nothing happens to a process that does not ask for a signal.
  auto options = waiting(2, {}, {"trap=0"});
  options.argv = Words{"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"} + options.argv;
  if (::geteuid() != 0) GTEST_SKIP() << "process namespaces need root";
  Command command(options);
  ASSERT_TRUE(command.saw("up", 2)) << command.error();
  pid_t launcher = 0;
  for (const pid_t pid : command.processes()) {
    if (pid != command.pid() && (launcher == 0 || pid < launcher)) launcher = pid;
  }
  ::kill(launcher, SIGTERM);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 143);
  EXPECT_EQ(count_of(outcome.output, "caught SIGTERM"), 2) << outcome.text();
}

TEST(LaunchSignal, ReachesTheWorkersOnceWhenControlCIsTyped) {
  // The terminal signals its foreground group; the workers are in groups of their own and hear it
  // from the launcher alone.
  Command command(in_terminal(waiting(2, {}, {"trap=0"})));
  ASSERT_TRUE(command.saw("up", 2));
  command.type(kControlC);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 130);
  EXPECT_EQ(count_of(outcome.output, "caught SIGINT"), 2) << outcome.text();
}

TEST(LaunchSignal, LetsWorkersFinishWhatTheyDoOnControlC) {
  // A worker that saves first, and ends well: the code still says that it was interrupted.
  Command command(launch(2, {},
                         {"/bin/sh", "-c",
                          "trap 'sleep 0.3; echo saved; exit 0' INT; echo up; "
                          "while :; do sleep 0.02; done"}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal_group(SIGINT);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 130);
  EXPECT_EQ(count_of(outcome.output, "saved"), 2) << outcome.text();
}

TEST(LaunchSignal, KillsAtTheSecondControlC) {
  Command command(in_terminal(waiting(2, {}, {"hear=SIGINT", "grandchild"})));
  ASSERT_TRUE(command.saw("up", 2));
  command.type(kControlC);
  ASSERT_TRUE(command.saw("heard it", 2));
  ::usleep(300'000);
  EXPECT_TRUE(command.running()) << "the workers go on after the first one and have 30 s";
  command.type(kControlC);
  const auto outcome = command.wait(Seconds(5));
  expect_clean_end(outcome, 130);
}

TEST(LaunchSignal, KillsWhoDoesNotEndInTime) {
  Command command(waiting(2, {"--shutdown_timeout", "1"}, {"ignore=SIGTERM", "grandchild"}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGTERM);
  const auto outcome = command.wait(Seconds(8));
  expect_clean_end(outcome, 143);
  EXPECT_GT(outcome.seconds, 0.9);
}

TEST(LaunchSignal, StopsARestartingJobForGood) {
  Command command(waiting(2, {"--max_restarts", "5"}, {}));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGTERM);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 143);
  EXPECT_EQ(count_of(outcome.output, "up"), 2) << outcome.text();
}

TEST(LaunchSignal, EndsTheWorldWhileItMeets) {
  // Rank 1 never comes: rank 0 waits for it inside of the library.
  Command command(launch(2, {}, worker({"1:say=up", "1:wait", "say=up", "join"})));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGTERM);
  expect_clean_end(command.wait(), 143);
}

TEST(LaunchEnd, TakesWorkersAndGrandchildrenAlongWhenTheLauncherIsKilled) {
  Command command(waiting(3, {}, {"grandchild", "ignore=SIGTERM", "ignore=SIGHUP"}));
  ASSERT_TRUE(command.saw("up", 3));
  EXPECT_GE(command.processes().size(), 7U);
  command.signal(SIGKILL);
  const auto outcome = command.wait();
  EXPECT_EQ(outcome.signal, SIGKILL);
  EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
}

TEST(LaunchEnd, RemovesTheTemporaryFolderOfAKilledLauncher) {
  // Rank 1 has written its error there; rank 0 does not end, so the launcher still waits for it.
  Command command(
      launch(2, {}, worker({"0:ignore=SIGTERM", "say=up", "1:throw=an error", "wait"})));
  ASSERT_TRUE(command.saw("up", 2));
  ASSERT_TRUE(command.saw("an error")) << command.error();
  EXPECT_TRUE(eventually([&] { return !std::filesystem::is_empty(command.temporary_folder()); }));
  command.signal(SIGKILL);
  const auto outcome = command.wait();
  EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
}

TEST(LaunchEnd, TakesAWorldAlongWhenTheLauncherIsKilled) {
  Folder folder;
  Command command(launch(2, {}, worker({"env=MASTER_PORT", "join", "loop=" + folder / "stop"})));
  ASSERT_TRUE(command.saw("step 1", 2)) << command.error();
  const int port = std::stoi(rest_of_line(command.output(), "MASTER_PORT="));
  EXPECT_TRUE(is_listening(port));
  command.signal(SIGKILL);
  EXPECT_EQ(command.wait().left_behind, kNothing);
  // The last thread of a killed process closes its sockets, a moment after the process looks dead.
  EXPECT_TRUE(eventually([&] { return !is_listening(port); }));
}

TEST(LaunchEnd, TakesEverythingAlongWhenTheTerminalIsClosed) {
  Command command(in_terminal(waiting(3, {}, {"grandchild"})));
  ASSERT_TRUE(command.saw("up", 3));
  command.close_terminal();
  const auto outcome = command.wait();
  EXPECT_FALSE(outcome.timed_out);
  EXPECT_EQ(outcome.shell_code(), 128 + SIGHUP) << outcome.text();
  EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
}

TEST(LaunchEnd, DoesNotComeWithTheTerminalUnderNohup) {
  Folder folder;
  auto options = in_terminal(
      launch(2, {}, probe({"say=up", "until=" + folder / "go", "0:write=" + folder / "done:yes"})));
  options.argv = Words{"nohup"} + options.argv;
  options.working_directory = folder.path();
  Command command(options);
  // nohup sends what a terminal would get to a file.
  ASSERT_TRUE(eventually([&] {
    std::ifstream file(folder / "nohup.out");
    return count_of({std::istreambuf_iterator<char>(file), {}}, "up") == 2;
  })) << command.output();
  command.close_terminal();
  ::usleep(200'000);
  std::ofstream(folder / "go") << "";
  const auto outcome = command.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_TRUE(std::ifstream(folder / "done").good());
}

TEST(LaunchPause, StopsAndContinuesTheWorkersWithTheLauncher) {
  Folder folder;
  Command command(launch(
      2, {}, probe({"ready=" + folder / "ready", "say=up", "until=" + folder / "go", "say=done"})));
  ASSERT_TRUE(command.saw("up", 2));
  pid_t first = 0;
  pid_t second = 0;
  std::ifstream(folder / "ready.0") >> first;
  std::ifstream(folder / "ready.1") >> second;
  command.signal(SIGTSTP);
  EXPECT_TRUE(eventually([&] {
    return state_of(command.pid()) == 'T' && state_of(first) == 'T' && state_of(second) == 'T';
  })) << state_of(command.pid())
      << state_of(first) << state_of(second);
  std::ofstream(folder / "go") << "";
  ::usleep(100'000);
  EXPECT_FALSE(contains(command.output(), "done")) << "they are stopped";
  command.signal(SIGCONT);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 0);
  EXPECT_EQ(count_of(outcome.output, "done"), 2) << outcome.text();
}

TEST(LaunchPause, EndsWorkersThatAreStopped) {
  Folder folder;
  Command command(waiting(2, {}, {"ready=" + folder / "ready"}));
  ASSERT_TRUE(command.saw("up", 2));
  pid_t first = 0;
  std::ifstream(folder / "ready.0") >> first;
  ::kill(first, SIGSTOP);
  command.signal(SIGTERM);
  const auto outcome = command.wait(Seconds(8));
  expect_clean_end(outcome, 143);
}

TEST(LaunchPause, SurvivesBeingStoppedByForce) {
  Folder folder;
  Command command(launch(2, {}, probe({"say=up", "until=" + folder / "go", "say=done"})));
  ASSERT_TRUE(command.saw("up", 2));
  command.signal(SIGSTOP);
  std::ofstream(folder / "go") << "";
  ::usleep(300'000);
  command.signal(SIGCONT);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 0);
  EXPECT_EQ(count_of(outcome.output, "done"), 2) << outcome.text();
}

TEST(LaunchPause, OfAWorkerThatHasNotJoinedIsNamedByTheOthers) {
  for (const auto* stopped : {"0", "1"}) {
    Command command(launch(2, {}, worker({std::string(stopped) + ":signal=SIGSTOP", "join"})));
    const auto outcome = command.wait(Seconds(30));
    EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
    EXPECT_EQ(outcome.code, 70) << outcome.text();
    EXPECT_TRUE(contains(outcome.text(), std::string("rank ") + stopped + " (")) << outcome.text();
    EXPECT_TRUE(contains(outcome.text(), ") has been stopped for 10 s, before all processes had"))
        << outcome.text();
  }
}

}  // namespace
}  // namespace accelerate::test
