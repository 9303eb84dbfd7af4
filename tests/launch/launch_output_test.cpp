// What the workers write: on the console, with prefixes and whole lines, and in files.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "launch/launching.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// <log_dir>/<run id>_<random>: the only entry.
fs::path run_folder(const Folder& logs) {
  for (const auto& entry : fs::directory_iterator(logs.path())) return entry.path();
  return {};
}

// The files below, relative, sorted.
Words tree(const fs::path& folder) {
  Words files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), folder).string());
  }
  return sorted(files);
}

// Every line of `chatter` from every rank, once, whole.
Words expected_chatter(int ranks, int count, const std::string& stream) {
  Words lines;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < count; ++i) {
      lines.push_back((rank == 0 ? "" : "[default" + std::to_string(rank) + "]:") + "<line " +
                      std::to_string(i) + " of rank " + std::to_string(rank) + " on " + stream +
                      ">");
    }
  }
  return sorted(lines);
}

// Without our own lines: warnings about defaults and the like.
std::string without_own_lines(const std::string& text) {
  std::string rest;
  for (const auto& line : lines_of(text)) {
    if (line.starts_with("<") || line.starts_with("[")) rest += line + "\n";
  }
  return rest;
}

TEST(LaunchOutput, HasAPrefixForAllRanksButTheFirst) {
  const auto outcome = run(launch(3, {}, probe({"say=out", "err=err"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output), (Words{"[default1]:out", "[default2]:out", "out"}));
  for (const std::string line : {"err", "[default1]:err", "[default2]:err"}) {
    EXPECT_TRUE(contains(lines_of(outcome.error), line)) << outcome.text();
  }
}

TEST(LaunchOutput, TearsNoLines) {
  const int count = 1500;
  const auto outcome = run(launch(4, {}, probe({"chatter=" + std::to_string(count)})), Seconds(60));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output), expected_chatter(4, count, "stdout"));
  EXPECT_EQ(sorted_lines(without_own_lines(outcome.error)), expected_chatter(4, count, "stderr"));
}

TEST(LaunchOutput, TearsNoLinesWhenBothStreamsGoToOnePlace) {
  const int count = 500;
  auto options = launch(4, {}, probe({"chatter=" + std::to_string(count)}));
  options.argv = Words{"sh", "-c", "exec \"$@\" 2>&1", "sh"} + options.argv;
  const auto outcome = run(options, Seconds(60));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(without_own_lines(outcome.output)),
            sorted(expected_chatter(4, count, "stdout") + expected_chatter(4, count, "stderr")));
}

TEST(LaunchOutput, TearsNoLinesInATerminal) {
  const int count = 200;
  // Only the others: the first rank draws in the terminal as it likes.
  auto options = launch(4, {}, probe({"0:exit=0", "chatter=" + std::to_string(count)}));
  options.terminal = true;
  options.columns = 200;
  const auto outcome = run(options, Seconds(60));
  expect_clean_end(outcome, 0);
  std::string text = outcome.output;
  std::erase(text, '\r');
  auto expected =
      sorted(expected_chatter(4, count, "stdout") + expected_chatter(4, count, "stderr"));
  std::erase_if(expected, [](const std::string& line) { return line.starts_with("<"); });
  EXPECT_EQ(sorted_lines(without_own_lines(text)), expected);
}

TEST(LaunchOutput, EndsALineThatAWorkerLeftOpen) {
  const auto outcome = run(launch(2, {}, probe({"part=half a line"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output), (Words{"[default1]:half a line", "half a line"}));
}

TEST(LaunchOutput, ShowsTheFirstRankAtOnceInATerminal) {
  Folder folder;
  auto options = launch(2, {}, probe({"terminal", "part=password: ", "until=" + folder / "go"}));
  options.terminal = true;
  options.columns = 120;
  Command command(options);
  // A prompt without a line end appears.
  EXPECT_TRUE(command.saw("password: "));
  std::ofstream(folder / "go") << "";
  const auto outcome = command.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_TRUE(contains(outcome.output, "stdout: terminal, stderr: terminal")) << outcome.text();
  EXPECT_TRUE(contains(outcome.output, "[default1]:stdout: no terminal, stderr: no terminal"))
      << outcome.text();
}

TEST(LaunchOutput, IsNoTerminalForAnybodyInAPipe) {
  const auto outcome = run(launch(2, {}, probe({"terminal"})));
  EXPECT_EQ(count_of(outcome.output, "stdout: no terminal, stderr: no terminal"), 2)
      << outcome.text();
}

TEST(LaunchOutput, GoesOnWhenNobodyReadsIt) {
  Folder folder;
  auto options = launch(2, {}, probe({"chatter=3000", "ready=" + folder / "ready"}));
  options.argv = Words{"sh", "-c", "\"$@\" 2>/dev/null | head -n 1", "sh"} + options.argv;
  const auto outcome = run(options);
  expect_clean_end(outcome, 0);
  EXPECT_TRUE(fs::exists(folder / "ready.0"));
  EXPECT_TRUE(fs::exists(folder / "ready.1"));
}

TEST(LaunchOutput, IsMissedWhenTheDiskIsFull) {
  auto options = launch(2, {}, probe({"say=hello"}));
  options.argv = Words{"sh", "-c", "exec \"$@\" >/dev/full", "sh"} + options.argv;
  const auto outcome = run(options);
  expect_clean_end(outcome, 1);
  EXPECT_EQ(count_of(outcome.error, "stdout can no longer be written: No space left"), 1)
      << outcome.text();
}

TEST(LaunchOutput, HoldsUpNobodyWhoPressesCtrlCTwice) {
  Folder folder;
  auto options = launch(2, {}, probe({"ready=" + folder / "ready", "chatter=100000"}));
  // The reader never reads.
  options.argv = Words{"sh", "-c",
                       "{ \"$@\" 2>/dev/null & echo $! >" + folder / "pid" +
                           "; wait $!; echo $? >" + folder / "code" + "; } | sleep 300",
                       "sh"} +
                 options.argv;
  Command command(options);
  ASSERT_TRUE(eventually([&] { return fs::exists(folder / "ready.1"); }));
  ::usleep(500'000);
  const pid_t launcher = std::stoi(contents(folder / "pid"));
  const pid_t last = std::stoi(contents(folder / "ready.1"));
  ::kill(launcher, SIGINT);
  ASSERT_TRUE(eventually([&] { return !is_alive(last); })) << "the first one ends the workers";
  ::kill(launcher, SIGINT);
  EXPECT_TRUE(eventually([&] { return fs::exists(folder / "code"); }, Seconds(3)));
  command.kill_all();
  (void)command.wait();
}

TEST(LaunchOutput, IsWholeForASlowReader) {
  const int count = 4000;  // more than all pipes on the way hold
  auto options = launch(3, {}, probe({"chatter=" + std::to_string(count)}));
  options.argv = Words{"sh", "-c", "\"$@\" 2>/dev/null | (sleep 1; cat)", "sh"} + options.argv;
  const auto outcome = run(options, Seconds(60));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output), expected_chatter(3, count, "stdout"));
}

TEST(LaunchOutput, KeepsLongLinesWhole) {
  const std::string words = "head -c 300000 /dev/zero | tr '\\0' \"$RANK\"; echo";
  const auto outcome = run(launch(3, {}, {"/bin/sh", "-c", words}));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output),
            sorted({std::string(300000, '0'), "[default1]:" + std::string(300000, '1'),
                    "[default2]:" + std::string(300000, '2')}));
}

TEST(LaunchInput, GoesToTheFirstRankFromAPipe) {
  auto options = launch(2, {}, {"/bin/sh", "-c", "read line; echo \"rank $RANK read '$line'\""});
  options.argv = Words{"sh", "-c", "echo hello | \"$@\"", "sh"} + options.argv;
  const auto outcome = run(options);
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"[default1]:rank 1 read ''", "rank 0 read 'hello'"}));
}

TEST(LaunchOutput, TakesTheNameOfTheRoleAndATemplateForThePrefixOfAllRanks) {
  const auto outcome = run(launch(
      2,
      {"--role", "trainer", "--log_line_prefix_template", "<${role_name} ${rank}/${local_rank}> "},
      probe({"say=hello"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output), (Words{"<trainer 0/0> hello", "<trainer 1/1> hello"}));
  auto options = launch(2, {}, probe({"say=hello"}));
  options.environment = {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}>"}};
  EXPECT_EQ(sorted_lines(run(options).output), (Words{"<0>hello", "<1>hello"}));
}

TEST(LaunchOutput, IsLimitedToTheRanksOfTheFilter) {
  const auto outcome = run(launch(3, {"--local_ranks_filter", "0,2"}, probe({"say=hello"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output), (Words{"[default2]:hello", "hello"}));
}

// ---- files --------------------------------------------------------------------------------------

TEST(LaunchLogs, AreWrittenAsWellWithTee) {
  Folder logs;
  const auto outcome = run(launch(2, {"--tee", "3", "--log_dir", logs.path().string()},
                                  probe({"say=out", "err=err", "part=rest"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"[default0]:out", "[default0]:rest", "[default1]:out", "[default1]:rest"}));
  const auto folder = run_folder(logs);
  EXPECT_EQ(tree(folder), (Words{"attempt_0/0/stderr.log", "attempt_0/0/stdout.log",
                                 "attempt_0/1/stderr.log", "attempt_0/1/stdout.log"}));
  EXPECT_EQ(contents(folder / "attempt_0/1/stdout.log"), "out\nrest");
  EXPECT_EQ(contents(folder / "attempt_0/1/stderr.log"), "err\n");
}

TEST(LaunchLogs, AreWrittenInsteadWithRedirects) {
  Folder logs;
  const auto outcome = run(launch(2, {"--redirects", "1", "--log_dir", logs.path().string()},
                                  probe({"say=out", "err=err"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(outcome.output, "");
  EXPECT_TRUE(contains(lines_of(outcome.error), "[default1]:err")) << outcome.text();
  const auto folder = run_folder(logs);
  EXPECT_EQ(contents(folder / "attempt_0/0/stdout.log"), "out\n");
  EXPECT_EQ(contents(folder / "attempt_0/1/stdout.log"), "out\n");
  EXPECT_FALSE(fs::exists(folder / "attempt_0/1/stderr.log"));
}

TEST(LaunchLogs, AreChosenByLocalRank) {
  Folder logs;
  const auto outcome = run(launch(3, {"--tee", "0:1,2:2", "--log_dir", logs.path().string()},
                                  probe({"say=out", "err=err"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(tree(run_folder(logs)), (Words{"attempt_0/0/stdout.log", "attempt_0/2/stderr.log"}));
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"[default0]:out", "[default1]:out", "[default2]:out"}));
}

TEST(LaunchLogs, HaveAFolderForEachAttempt) {
  Folder logs;
  const auto outcome =
      run(launch(2, {"--tee", "1", "--max_restarts", "1", "--log_dir", logs.path().string()},
                 probe({"say=out", "flaky=1"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(tree(run_folder(logs)), (Words{"attempt_0/0/stdout.log", "attempt_0/1/stdout.log",
                                           "attempt_1/0/stdout.log", "attempt_1/1/stdout.log"}));
}

TEST(LaunchLogs, StayInATemporaryFolderThatIsNamedWhenTheyWereAskedForWithoutAFolder) {
  Command command(launch(2, {"--tee", "1"}, probe({"say=out"})));
  const auto outcome = command.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const fs::path folder = rest_of_line(outcome.error, "logs go to ");
  EXPECT_EQ(fs::relative(folder, command.temporary_folder()).string().substr(0, 13),
            "torchelastic_")
      << outcome.text();
  EXPECT_EQ(contents(folder / "attempt_0/1/stdout.log"), "out\n") << outcome.text();
}

TEST(LaunchLogs, LeaveNoTemporaryFolderWhenNobodyAskedForThem) {
  expect_clean_end(run(launch(2, {}, probe({"say=out"}))), 0);
  expect_clean_end(run(launch(2, {}, worker({"1:throw=an error", "wait"}))), 1);
}

TEST(LaunchLogs, RefuseABaseThatIsAFile) {
  Folder folder;
  std::ofstream(folder / "file") << "";
  const auto outcome =
      run(launch(2, {"--tee", "3", "--log_dir", folder / "file"}, probe({"say=started"})));
  expect_clean_end(outcome, 2);
  EXPECT_TRUE(contains(outcome.error, folder / "file")) << outcome.text();
  EXPECT_EQ(outcome.output, "");
}

TEST(LaunchLogs, ShowTheLastLinesOfARedirectedWorkerThatFailed) {
  Folder logs;
  const auto outcome = run(launch(2, {"--redirects", "3", "--log_dir", logs.path().string()},
                                  probe({"1:err=it was the disk", "1:exit=3", "wait"})));
  expect_clean_end(outcome, 3);
  EXPECT_TRUE(contains(outcome.error, "it was the disk")) << outcome.text();
}

}  // namespace
}  // namespace accelerate::test
