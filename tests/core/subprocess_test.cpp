#include "core/subprocess.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "accelerate/errors.h"

namespace accelerate::detail::inline core {
namespace {

using namespace std::chrono_literals;
using Clock = ProcessSet::Clock;

Clock::time_point soon() { return Clock::now() + 30s; }

// Lines by child and stream, in the order in which they came.
struct Collected {
  std::map<std::pair<std::size_t, bool>, std::vector<std::string>> lines;

  ProcessSet::Sink sink() {
    return [this](std::size_t index, ProcessSet::Stream stream, std::string_view line) {
      lines[{index, stream == ProcessSet::Stream::kError}].emplace_back(line);
    };
  }
  std::vector<std::string>& out(std::size_t index = 0) { return lines[{index, false}]; }
  std::vector<std::string>& err(std::size_t index = 0) { return lines[{index, true}]; }
};

SpawnOptions shell(const std::string& script, StreamTarget error = StreamTarget::kPipe) {
  return {.argv = {"sh", "-c", script}, .output = StreamTarget::kPipe, .error = error};
}

bool is_gone(pid_t pid) {
  if (::kill(pid, 0) != 0) return true;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);  // an iterator would throw when the process goes meanwhile
  return stat.empty() || stat.find(") Z ") != std::string::npos;
}

bool wait_until_gone(pid_t pid) {
  const auto deadline = Clock::now() + 20s;
  while (!is_gone(pid) && Clock::now() < deadline) std::this_thread::yield();
  return is_gone(pid);
}

TEST(ExitStatus, ReadsAsACodeOrASignal) {
  EXPECT_EQ((ExitStatus{.code = 3}).text(), "exit code 3");
  EXPECT_EQ((ExitStatus{.code = -1, .signal = SIGKILL}).text(), "signal 9 (SIGKILL)");
  EXPECT_EQ((ExitStatus{.code = -1, .signal = SIGSEGV}).text(), "signal 11 (SIGSEGV)");
  EXPECT_EQ((ExitStatus{.code = -1, .signal = 40}).text(), "signal 40");
  EXPECT_EQ((ExitStatus{.code = -1, .signal = SIGTERM}).shell_code(), 143);
  EXPECT_EQ((ExitStatus{.code = 2}).shell_code(), 2);
  EXPECT_TRUE(ExitStatus{}.ok());
  EXPECT_FALSE((ExitStatus{.code = -1, .signal = SIGTERM}).ok());
}

TEST(LineBuffer, HandsOutWholeLinesHoweverTheBytesArrive) {
  LineBuffer buffer;
  std::vector<std::string> lines;
  const auto keep = [&](std::string_view line) { lines.emplace_back(line); };
  for (const std::string_view piece : {"on", "e\ntw", "o\n\nthr", "ee"}) buffer.append(piece, keep);
  EXPECT_EQ(lines, (std::vector<std::string>{"one", "two", ""}));
  buffer.finish(keep);
  EXPECT_EQ(lines.back(), "three");
  buffer.finish(keep);
  EXPECT_EQ(lines.size(), 4u);
}

TEST(EnvironmentWith, SetsReplacesAndRemovesVariables) {
  ::setenv("SUBPROCESS_TEST_OLD", "old", 1);
  ::setenv("SUBPROCESS_TEST_GONE", "x", 1);
  const std::vector<std::pair<std::string, std::optional<std::string>>> changes = {
      {"SUBPROCESS_TEST_OLD", "first"},
      {"SUBPROCESS_TEST_OLD", "new"},
      {"SUBPROCESS_TEST_GONE", std::nullopt},
      {"SUBPROCESS_TEST_EMPTY", ""}};
  const auto variables = environment_with(changes);
  const auto count = [&](const std::string& text) {
    return std::count_if(variables.begin(), variables.end(),
                         [&](const std::string& entry) { return entry.starts_with(text); });
  };
  EXPECT_EQ(count("SUBPROCESS_TEST_OLD="), 1);
  EXPECT_EQ(count("SUBPROCESS_TEST_OLD=new"), 1);
  EXPECT_EQ(count("SUBPROCESS_TEST_GONE"), 0);
  EXPECT_EQ(count("SUBPROCESS_TEST_EMPTY="), 1);
  EXPECT_EQ(count("PATH="), 1);
}

TEST(ProcessSet, CapturesBothStreamsLineByLine) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("echo one; echo two >&2; printf three"));
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"one", "three"}));
  EXPECT_EQ(collected.err(), (std::vector<std::string>{"two"}));
  EXPECT_TRUE(processes.status(0).ok());
}

TEST(ProcessSet, MergesTheStreamsInTheOrderOfWriting) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("echo one; echo two >&2; echo three", StreamTarget::kWithOutput));
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"one", "two", "three"}));
}

TEST(ProcessSet, CanThrowAStreamAway) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("echo kept; echo lost >&2", StreamTarget::kNull));
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"kept"}));
  EXPECT_TRUE(collected.err().empty());
}

TEST(ProcessSet, LosesNothingOfALargeOutput) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("seq 1 200000"));
  ASSERT_TRUE(processes.wait_all(soon()));
  ASSERT_EQ(collected.out().size(), 200000u);
  EXPECT_EQ(collected.out().back(), "200000");
}

TEST(ProcessSet, GivesAChildExactlyTheEnvironmentItIsTold) {
  Collected collected;
  ProcessSet processes(collected.sink());
  auto options = shell("env | grep -v '^PWD=\\|^_=\\|^SHLVL='");
  options.program = "/bin/sh";
  options.environment = {"ONLY=this", "PATH=/usr/bin:/bin"};
  processes.spawn(options);
  ASSERT_TRUE(processes.wait_all(soon()));
  std::sort(collected.out().begin(), collected.out().end());
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"ONLY=this", "PATH=/usr/bin:/bin"}));
}

TEST(ProcessSet, StartsInTheFolderItIsTold) {
  Collected collected;
  ProcessSet processes(collected.sink());
  auto options = shell("pwd");
  options.working_directory = "/";
  processes.spawn(options);
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"/"}));
}

TEST(ProcessSet, SaysWhatCannotBeExecuted) {
  ProcessSet processes;
  try {
    processes.spawn({.argv = {"/no/such/program"}});
    FAIL() << "started something that is not there";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "'/no/such/program' cannot be executed: No such file or directory.");
  }
  EXPECT_EQ(processes.size(), 0u);
}

TEST(ProcessSet, SaysWhichFolderCannotBeEntered) {
  ProcessSet processes;
  try {
    processes.spawn({.argv = {"true"}, .working_directory = "/no/such/folder"});
    FAIL() << "started in a folder that is not there";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "The folder '/no/such/folder' cannot be entered: No such file or directory.");
  }
}

TEST(ProcessSet, TellsCodesAndSignalsApart) {
  ProcessSet processes;
  processes.spawn(shell("exit 7"));
  processes.spawn(shell("kill -SEGV $$"));
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(processes.status(0), (ExitStatus{.code = 7}));
  EXPECT_EQ(processes.status(1), (ExitStatus{.code = -1, .signal = SIGSEGV}));
}

TEST(ProcessSet, ReportsTheChildThatEndsFirstWhileOthersRun) {
  ProcessSet processes;
  processes.spawn(shell("sleep 600"));
  processes.spawn(shell("exit 4"));
  EXPECT_EQ(processes.wait(soon()), (std::vector<std::size_t>{1}));
  EXPECT_TRUE(processes.running(0));
  EXPECT_EQ(processes.running(), 1u);
  EXPECT_THROW(static_cast<void>(processes.status(0)), StateError);
}

TEST(ProcessSet, ReturnsAtTheDeadline) {
  ProcessSet processes;
  processes.spawn(shell("sleep 600"));
  const auto before = Clock::now();
  EXPECT_TRUE(processes.wait(before + 50ms).empty());
  EXPECT_GE(Clock::now() - before, 50ms);
  EXPECT_FALSE(processes.wait_all(Clock::now()));
}

TEST(ProcessSet, TerminatesPolitelyFirst) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.01; done"));
  while (collected.out().empty()) static_cast<void>(processes.wait(Clock::now() + 10ms));
  processes.terminate(20s);
  EXPECT_EQ(processes.status(0).code, 5);
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"ready", "bye"}));
}

TEST(ProcessSet, KillsWhatDoesNotListen) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("trap '' TERM; echo ready; while :; do sleep 600; done"));
  while (collected.out().empty()) static_cast<void>(processes.wait(Clock::now() + 10ms));
  processes.terminate(50ms);
  EXPECT_EQ(processes.status(0).signal, SIGKILL);
}

TEST(ProcessSet, EndsWhatAChildHasStarted) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.spawn(shell("sleep 600 & echo $!"));
  // The grandchild holds the pipe open; only its end lets the output end.
  ASSERT_TRUE(processes.wait_all(soon()));
  ASSERT_EQ(collected.out().size(), 1u);
  EXPECT_TRUE(wait_until_gone(std::stoi(collected.out()[0])));
}

TEST(ProcessSet, KillsWhatStillRunsAtTheEndOfItsScope) {
  pid_t pid = 0;
  {
    ProcessSet processes;
    processes.spawn(shell("trap '' TERM; sleep 600"));
    pid = processes.pid(0);
    EXPECT_FALSE(is_gone(pid));
  }
  EXPECT_TRUE(is_gone(pid));
}

TEST(ProcessSet, ItsChildrenDieWithTheirParent) {
  // A process between us and the child is killed and can clean up nothing.
  PipePair pipe;
  const pid_t between = ::fork();
  if (between == 0) {
    ProcessSet processes;
    processes.spawn(shell("exec sleep 600"));  // the shell's own child would live on
    const std::string text = std::to_string(processes.pid(0)) + "\n";
    write_fully(pipe.write_end(), text);
    for (;;) ::pause();
  }
  pipe.close_write();
  std::array<char, 32> text{};
  ASSERT_GT(::read(pipe.read_end(), text.data(), text.size() - 1), 0);
  const pid_t grandchild = std::stoi(text.data());
  EXPECT_FALSE(is_gone(grandchild));
  ::kill(between, SIGKILL);
  ::waitpid(between, nullptr, 0);
  EXPECT_TRUE(wait_until_gone(grandchild));
}

TEST(ProcessSet, ForksACopyThatRunsAFunction) {
  Collected collected;
  ProcessSet processes(collected.sink());
  const int answer = 42;
  processes.fork({.output = StreamTarget::kPipe}, [&] {
    std::printf("the answer is %d\n", answer);
    return 9;
  });
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(processes.status(0).code, 9);
  EXPECT_EQ(collected.out(), (std::vector<std::string>{"the answer is 42"}));
}

TEST(ProcessSet, LeavesTheDescriptorsOpenThatAChildShallInherit) {
  PipePair report;
  ProcessSet processes;
  auto options = shell("echo hello >&" + std::to_string(report.write_end()));
  options.inherit = {report.write_end()};
  // dash takes one digit only.
  ASSERT_LT(report.write_end(), 10);
  processes.spawn(options);
  report.close_write();
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(report.read_available(), "hello\n");
}

TEST(ProcessSet, MeasuresHowLongAChildRan) {
  ProcessSet processes;
  processes.spawn(shell("sleep 0.05"));
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_GE(processes.elapsed(0).count(), 0.05);
  EXPECT_EQ(processes.elapsed(0), processes.elapsed(0));
}

TEST(CountThreads, CountsThisThreadAndTheOthers) {
  const auto wait = [](const std::stop_token& stop) {
    while (!stop.stop_requested()) std::this_thread::yield();
  };
  // Sanitizers start a thread of their own with the first one.
  std::jthread first(wait);
  const auto before = count_threads();
  EXPECT_GE(before, 2u);
  std::jthread second(wait);
  EXPECT_EQ(count_threads(), before + 1);
}

TEST(OwnCommandLine, BeginsWithThisProgram) {
  EXPECT_NE(own_command_line().at(0).find("core_process_test"), std::string::npos);
}

TEST(ProcessSet, TakesAStatusThatTheSystemThrewAwayForAFailure) {
  // In a process of its own: the signal belongs to the whole process.
  ProcessSet outer;
  outer.fork({}, [] {
    ::signal(SIGCHLD, SIG_IGN);
    ProcessSet set;
    set.spawn(shell("exit 0"));
    return set.wait_all(soon()) ? set.status(0).code : 1;
  });
  ASSERT_TRUE(outer.wait_all(soon()));
  EXPECT_EQ(outer.status(0).code, 255);
}

TEST(ProcessSet, GivesAProgramTheSignalsThatEveryProgramExpects) {
  ProcessSet outer;
  outer.fork({}, [] {
    constexpr std::array kSignals = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};
    for (const int signal : kSignals) {
      if (signal != SIGCHLD) ::signal(signal, SIG_IGN);  // ignored, our own wait would fail
    }
    Collected collected;
    ProcessSet set(collected.sink());
    set.spawn({.argv = {"grep", "SigIgn", "/proc/self/status"}, .output = StreamTarget::kPipe});
    if (!set.wait_all(soon())) return 1;
    const std::string line = collected.out().at(0);  // a bit per ignored signal, in hexadecimal
    const auto ignored = std::stoull(line.substr(line.find('\t') + 1), nullptr, 16);
    return std::ranges::none_of(kSignals, [&](int each) { return (ignored >> (each - 1)) & 1; })
               ? 0
               : 2;
  });
  ASSERT_TRUE(outer.wait_all(soon()));
  EXPECT_EQ(outer.status(0).code, 0);
}

TEST(ProcessSet, ReadsStderrToTheEndAlsoWhenStdoutIsKeptOpen) {
  Collected collected;
  ProcessSet set(collected.sink());
  // `setsid` leaves the group, so that it outlives the child, with stdout but without stderr.
  set.spawn(shell("setsid sleep 5 2>/dev/null & echo last words >&2"));
  ASSERT_TRUE(set.wait_all(soon()));
  EXPECT_EQ(collected.err(), (std::vector<std::string>{"last words"}));
}

TEST(ProcessSet, GivesAChildATerminalWhoseBytesArriveAsTheyWereWritten) {
  std::string text;
  ProcessSet processes(
      [&](std::size_t, ProcessSet::Stream, std::string_view bytes) { text += bytes; },
      ProcessSet::Pieces::kBytes);
  auto options = shell("test -t 1 && test -t 2 && printf 'a\\nb'; echo c >&2");
  options.output = StreamTarget::kTerminal;
  options.error = StreamTarget::kWithOutput;
  processes.spawn(options);
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(text, "a\nbc\n");
}

TEST(ProcessSet, TellsAChildTheSizeOfItsTerminal) {
  std::string text;
  ProcessSet processes(
      [&](std::size_t, ProcessSet::Stream, std::string_view bytes) { text += bytes; },
      ProcessSet::Pieces::kBytes);
  PipePair input;
  auto options = shell("cat <&" + std::to_string(input.read_end()) + " >/dev/null; stty size <&1");
  options.output = StreamTarget::kTerminal;
  options.inherit = {input.read_end()};
  processes.spawn(options);
  processes.set_terminal_size(31, 97);
  input.close_write();
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(text, "31 97\n");
}

TEST(ProcessSet, AppendsAStreamToAFile) {
  std::string name = (std::filesystem::temp_directory_path() / "stream_XXXXXX").string();
  ::close(::mkstemp(name.data()));
  for (const char* word : {"one", "two"}) {
    ProcessSet processes;
    auto options = shell(std::string("echo ") + word);
    options.output = StreamTarget::kFile;
    options.output_file = name;
    processes.spawn(options);
    ASSERT_TRUE(processes.wait_all(soon()));
  }
  std::ifstream file(name);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "one\ntwo\n");
  std::filesystem::remove(name);
}

TEST(ProcessSet, NamesTheFileThatCannotBeWritten) {
  ProcessSet processes;
  auto options = shell("true");
  options.output = StreamTarget::kFile;
  options.output_file = "/nowhere/at/all.log";
  EXPECT_THROW(processes.spawn(options), Error);
}

TEST(ProcessSet, StartsAChildWithoutInputInASessionOfItsOwn) {
  Collected collected;
  ProcessSet processes(collected.sink());
  auto options = shell("cat; ps -o sid= -p $$ | tr -d ' '; echo $$");
  options.no_input = true;
  options.new_session = true;
  processes.spawn(options);
  ASSERT_TRUE(processes.wait_all(soon()));
  ASSERT_EQ(collected.out().size(), 2U);
  EXPECT_EQ(collected.out()[0], collected.out()[1]) << "it leads its session";
}

TEST(ProcessSet, ReturnsWhenSomethingElseIsReady) {
  ProcessSet processes;
  processes.spawn(shell("sleep 30"));
  PipePair other;
  write_fully(other.write_end(), "x");
  std::array<pollfd, 1> also{{{.fd = other.read_end(), .events = POLLIN, .revents = 0}}};
  const auto start = Clock::now();
  EXPECT_TRUE(processes.wait(soon(), also).empty());
  EXPECT_EQ(also[0].revents, POLLIN);
  EXPECT_LT(Clock::now() - start, 5s);
}

TEST(ProcessSet, LetsAChildWaitWhileItsOutputIsNotRead) {
  Collected collected;
  ProcessSet processes(collected.sink());
  processes.listen(false);
  processes.spawn(shell("head -c 1000000 /dev/zero | tr '\\0' '\\n'; echo end"));
  EXPECT_TRUE(processes.wait(Clock::now() + 200ms).empty());
  EXPECT_TRUE(collected.out().empty());
  processes.listen(true);
  ASSERT_TRUE(processes.wait_all(soon()));
  EXPECT_EQ(collected.out().size(), 1000001U);
}

}  // namespace
}  // namespace accelerate::detail::inline core
