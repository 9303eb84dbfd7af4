#include "launch/failure.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "launch/terminal_text.h"

namespace accelerate::detail::launch {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kNoon = 1'772'625'600'000'000;  // 2026-03-04 12:00:00 UTC

WorkerFailure exited(int rank, int code, std::int64_t time_us) {
  return {.rank = rank,
          .local_rank = rank,
          .host = "node0",
          .pid = 4000 + rank,
          .status = {.code = code},
          .time_us = time_us};
}

WorkerFailure killed(int rank, int signal, std::int64_t time_us) {
  auto failure = exited(rank, 0, time_us);
  failure.status = {.code = -1, .signal = signal};
  return failure;
}

WorkerFailure ended_by_us(int rank, std::int64_t time_us) {
  auto failure = killed(rank, SIGTERM, time_us);
  failure.terminated_by_launcher = true;
  return failure;
}

int blamed(const std::vector<WorkerFailure>& failures) { return root_cause(failures)->rank; }

TEST(RootCause, IsTheEarliestFailure) {
  EXPECT_EQ(blamed({exited(0, 1, 30), exited(1, 1, 10), killed(2, SIGSEGV, 20)}), 1);
  EXPECT_EQ(blamed({exited(3, 1, 10), exited(2, 1, 10)}), 2);
}

TEST(RootCause, IsNoneThatWeEndedOurselves) {
  EXPECT_EQ(blamed({ended_by_us(0, 10), exited(1, 1, 20)}), 1);
  EXPECT_EQ(blamed({ended_by_us(0, 10)}), 0);
}

TEST(RootCause, IsNoneThatLostItsPeersUnlessAllDid) {
  EXPECT_EQ(blamed({exited(0, 70, 10), exited(1, 3, 20), ended_by_us(2, 5)}), 1);
  EXPECT_EQ(blamed({exited(0, 70, 20), exited(1, 70, 10), ended_by_us(2, 5)}), 1);
}

TEST(RootCause, IsNoneThatSavedItsStateUnlessAllDid) {
  EXPECT_EQ(blamed({exited(0, 75, 10), exited(1, 3, 20)}), 1);
  EXPECT_EQ(blamed({exited(0, 75, 10), exited(1, 70, 20)}), 1);
  EXPECT_EQ(blamed({exited(0, 75, 20), exited(1, 75, 10), ended_by_us(2, 5)}), 1);
}

// Rank 2 is in another collective than the others, and all know it.
WorkerFailure tells_of_rank_2(int rank, std::int64_t time_us) {
  auto failure = exited(rank, 70, time_us);
  failure.message =
      "accelerate::CommError: rank 2 is in another collective than the others:\n"
      "  rank 0: all_reduce at a.cpp:1\n  rank 1: all_reduce at a.cpp:1\n"
      "  rank 2: gather at b.cpp:2\n  this is rank " +
      std::to_string(rank) + ", in a call";
  return failure;
}

TEST(RootCause, IsTheRankThatAllBlame) {
  EXPECT_EQ(blamed({tells_of_rank_2(0, 10), tells_of_rank_2(1, 20), tells_of_rank_2(2, 30)}), 2);
  // Even if it did not end by itself.
  EXPECT_EQ(blamed({tells_of_rank_2(0, 10), tells_of_rank_2(1, 20), ended_by_us(2, 30)}), 2);
  // A failure of its own comes first.
  EXPECT_EQ(blamed({tells_of_rank_2(0, 10), exited(1, 3, 40), tells_of_rank_2(2, 30)}), 1);
}

TEST(RootCause, IsFoundInTheOutputIfNothingRecordedTheException) {
  auto first = exited(0, 70, 10);
  first.last_lines = {"step 3", "accelerate: rank 1 has ended after gather", "  this is rank 0"};
  EXPECT_EQ(blamed({first, exited(1, 70, 20)}), 1);
  // The rank that waits is not at fault.
  first.last_lines = {
      "accelerate: rank 1 has waited for 5 s, which is the timeout, in gather for "
      "rank 0, before its first collective"};
  EXPECT_EQ(blamed({first, exited(1, 70, 20)}), 0);
}

TEST(RootCause, IsNothingWithoutFailures) { EXPECT_FALSE(root_cause({}).has_value()); }

// ---- error files --------------------------------------------------------------------------------

class ReadErrorFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "accelerate-failure-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path write(const std::string& content, std::int64_t written_us = kNoon + 250'000) const {
    const fs::path path = folder_ / "error.json";
    std::ofstream(path, std::ios::binary) << content;
    const timespec moment = {.tv_sec = written_us / 1'000'000,
                             .tv_nsec = written_us % 1'000'000 * 1000};
    const timespec times[2] = {moment, moment};
    ::utimensat(AT_FDCWD, path.c_str(), times, 0);
    return path;
  }

  fs::path folder_;
};

TEST_F(ReadErrorFile, ReadsWhatRecordWrites) {
  const auto path = write(
      R"({"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "c++ stack",)"
      R"( "timestamp": "1772625600"}}})");
  WorkerFailure failure = exited(1, 1, kNoon + 900'000);
  ASSERT_TRUE(read_error_file(path, failure));
  EXPECT_EQ(failure.message, "ValueError: no");
  EXPECT_EQ(failure.error_file, path.string());
  EXPECT_EQ(failure.time_us, kNoon + 250'000);  // the second it names, when it was written
  EXPECT_TRUE(failure.last_lines.empty());
}

TEST_F(ReadErrorFile, TakesTheWordOfTheFileWhenItWasTouchedLater) {
  const auto path =
      write(R"({"message": {"message": "x", "extraInfo": {"timestamp": "1772625600"}}})",
            kNoon + 10'000'000);
  WorkerFailure failure = exited(1, 1, kNoon + 5'000'000);
  ASSERT_TRUE(read_error_file(path, failure));
  EXPECT_EQ(failure.time_us, kNoon);
}

TEST_F(ReadErrorFile, NeverDatesAFailureAfterTheEndOfItsProcess) {
  const auto path =
      write(R"({"message": {"message": "x", "extraInfo": {"timestamp": "1772699999"}}})");
  WorkerFailure failure = exited(1, 1, kNoon + 1);
  ASSERT_TRUE(read_error_file(path, failure));
  EXPECT_EQ(failure.time_us, kNoon + 1);
}

TEST_F(ReadErrorFile, ReadsTheOlderFormWithAPlainText) {
  WorkerFailure failure = exited(1, 1, kNoon + 900'000);
  ASSERT_TRUE(read_error_file(write(R"({"message": "plain", "timestamp": 1772625600})"), failure));
  EXPECT_EQ(failure.message, "plain");
  EXPECT_EQ(failure.time_us, kNoon + 250'000);
}

TEST_F(ReadErrorFile, KeepsTheEndOfAPythonStackWhereNoOutputIsKnown) {
  const auto path = write(
      R"({"message": {"message": "ValueError: no", "extraInfo": {"py_callstack":)"
      R"( "Traceback (most recent call last):\n  File \"train.py\", line 3\nValueError: no\n",)"
      R"( "timestamp": "1772625600"}}})");
  WorkerFailure failure = exited(1, 1, kNoon);
  ASSERT_TRUE(read_error_file(path, failure));
  EXPECT_EQ(failure.last_lines,
            (std::vector<std::string>{"Traceback (most recent call last):",
                                      "  File \"train.py\", line 3", "ValueError: no"}));
  WorkerFailure heard = exited(1, 1, kNoon);
  heard.last_lines = {"its own words"};
  ASSERT_TRUE(read_error_file(path, heard));
  EXPECT_EQ(heard.last_lines, (std::vector<std::string>{"its own words"}));
}

TEST_F(ReadErrorFile, FindsNothingInWhatIsNoFile) {
  WorkerFailure failure;
  EXPECT_FALSE(read_error_file(folder_ / "missing", failure));
  EXPECT_FALSE(read_error_file(folder_, failure));
  EXPECT_FALSE(read_error_file(write(""), failure));
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  EXPECT_FALSE(read_error_file(folder_ / "fifo", failure));  // and does not wait for a writer
  EXPECT_EQ(failure.error_file, "");
}

TEST_F(ReadErrorFile, KeepsTheTextOfAFileThatIsNoJson) {
  WorkerFailure failure;
  ASSERT_TRUE(read_error_file(write(R"({"message": {"mess)"), failure));
  EXPECT_EQ(failure.message, R"({"message": {"mess)");
}

TEST_F(ReadErrorFile, LeavesOutWhatIsTooLarge) {
  WorkerFailure failure;
  EXPECT_FALSE(read_error_file(write(std::string((std::size_t{4} << 20) + 1, '[')), failure));
}

TEST_F(ReadErrorFile, StandsContentOfAnyShape) {
  for (const auto* content :
       {"[]", "1", "null", "{}", R"({"message": 3})", R"({"message": {"message": []}})",
        R"({"message": {"message": "m", "extraInfo": "e"}})",
        R"({"message": {"message": "m", "extraInfo": {"timestamp": "soon"}}})",
        R"({"message": {"message": "m", "extraInfo": {"timestamp": "-99999999999999999"}}})",
        R"({"message": {"message": "m", "extraInfo": {"timestamp": 9223372036854775807}}})"}) {
    WorkerFailure failure = exited(0, 1, kNoon + 900'000);
    EXPECT_TRUE(read_error_file(write(content), failure)) << content;
    EXPECT_GE(failure.time_us, kNoon) << content;
    EXPECT_LE(failure.time_us, kNoon + 900'000) << content;
  }
  WorkerFailure deep;
  EXPECT_TRUE(read_error_file(write(std::string(1'000'000, '[')), deep));
}

// ---- the report ---------------------------------------------------------------------------------

class FailureReport : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("TZ", "UTC", 1);
    ::tzset();
  }
};

constexpr const char* kDouble =
    "================================================================================\n";
constexpr const char* kSingle =
    "--------------------------------------------------------------------------------\n";

TEST_F(FailureReport, ShowsTheFirstFailureFirst) {
  auto culprit = exited(1, 3, kNoon + 123'456);
  culprit.error_file = "/tmp/run/attempt_0/1/error.json";
  culprit.message = "std::runtime_error: the dataset has 7 columns, the model takes 8";
  culprit.last_lines = {"step 12 loss 0.4", "accelerate: the dataset has 7 columns"};
  auto victim = exited(2, 70, kNoon);
  victim.local_rank = 0;
  victim.host = "node1";
  victim.message = "accelerate::CommError: rank 1 is gone\nsecond line";
  EXPECT_EQ(failure_report("./train", {ended_by_us(0, kNoon + 300'000), victim, culprit}),
            std::string(kDouble) + "./train FAILED\n" + kSingle +
                "Root cause (first failure):\n"
                "  time      : 2026-03-04_12:00:00.123\n"
                "  host      : node0\n"
                "  rank      : 1 (local_rank: 1)\n"
                "  exitcode  : 3 (pid: 4001)\n"
                "  error_file: /tmp/run/attempt_0/1/error.json\n"
                "  message   : std::runtime_error: the dataset has 7 columns, the model takes 8\n"
                "  last lines:\n"
                "    step 12 loss 0.4\n"
                "    accelerate: the dataset has 7 columns\n" +
                kSingle +
                "Other failures:\n"
                "  rank 2 (local_rank: 0) on node1: exitcode 70 (pid: 4002), 0.1 s earlier, "
                "because of rank 1\n"
                "  rank 0 (local_rank: 0) on node0: terminated by launcher\n" +
                kDouble);
}

TEST_F(FailureReport, TellsOnceWhichRankStrayedAndWhere) {
  auto strayed = tells_of_rank_2(2, kNoon + 2000);
  strayed.last_lines = {"step 7",
                        "accelerate: rank 2 is in another collective than the others:",
                        "  rank 0: all_reduce at a.cpp:1",
                        "  rank 1: all_reduce at a.cpp:1",
                        "  rank 2: gather at b.cpp:2",
                        "  this is rank 2, in a call"};
  EXPECT_EQ(
      failure_report("./train",
                     {tells_of_rank_2(0, kNoon), tells_of_rank_2(1, kNoon + 1000), strayed}),
      std::string(kDouble) + "./train FAILED\n" + kSingle +
          "Root cause (first failure):\n"
          "  time      : 2026-03-04_12:00:00.002\n"
          "  host      : node0\n"
          "  rank      : 2 (local_rank: 2)\n"
          "  exitcode  : 70 (pid: 4002)\n"
          "  message   : rank 2 is in another collective than the others:\n"
          "                rank 0: all_reduce at a.cpp:1\n"
          "                rank 1: all_reduce at a.cpp:1\n"
          "                rank 2: gather at b.cpp:2\n"
          "                this is rank 2, in a call\n"
          "  last lines:\n"
          "    step 7\n" +
          kSingle +
          "Other failures:\n"
          "  rank 0 (local_rank: 0) on node0: exitcode 70 (pid: 4000), 0.0 s earlier, because of "
          "rank 2\n"
          "  rank 1 (local_rank: 1) on node0: exitcode 70 (pid: 4001), 0.0 s earlier, because of "
          "rank 2\n" +
          kDouble);
}

TEST_F(FailureReport, ShowsWhereAKilledRankWasAsTheSurvivorsTell) {
  auto survivor = exited(0, 70, kNoon + 1000);
  survivor.message =
      "accelerate::CommError: rank 1 died in gather at b.cpp:2, and rank 0 waits in gather at "
      "b.cpp:2\n  this is rank 0, in gather at b.cpp:2";
  const auto text = failure_report("./train", {survivor, killed(1, SIGKILL, kNoon)});
  EXPECT_NE(text.find("  rank      : 1 (local_rank: 1)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("Signal 9 (SIGKILL) received by PID 4001\n"), std::string::npos) << text;
  EXPECT_NE(
      text.find("              Rank 0 reports: rank 1 died in gather at b.cpp:2, and rank 0 waits\n"
                "              in gather at b.cpp:2\n"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("this is rank"), std::string::npos) << text;
}

TEST_F(FailureReport, ExplainsASignal) {
  EXPECT_EQ(failure_report("./train", {killed(0, SIGKILL, kNoon)}),
            std::string(kDouble) + "./train FAILED\n" + kSingle +
                "Root cause (first failure):\n"
                "  time      : 2026-03-04_12:00:00.000\n"
                "  host      : node0\n"
                "  rank      : 0 (local_rank: 0)\n"
                "  exitcode  : -9 (pid: 4000)\n"
                "  message   : Signal 9 (SIGKILL) received by PID 4000\n"
                "              If it was not killed by hand, the machine ran out of memory: look\n"
                "              at dmesg.\n" +
                kDouble);
}

TEST_F(FailureReport, SaysWhatAnIllegalInstructionOftenIs) {
  const auto text = failure_report("./train", {killed(0, SIGILL, kNoon)});
  EXPECT_NE(text.find("Signal 4 (SIGILL) received by PID 4000"), std::string::npos) << text;
  EXPECT_NE(text.find("ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"), std::string::npos) << text;
}

TEST_F(FailureReport, TellsHowToGetAMessageWhereThereIsNone) {
  const auto text = failure_report("./train", {exited(0, 1, kNoon)});
  EXPECT_NE(text.find("  message   : none. accelerate::record around main (torch's @record in "
                      "Python)\n              brings exceptions here.\n"),
            std::string::npos)
      << text;
}

TEST_F(FailureReport, WrapsAndCutsLongMessages) {
  auto failure = exited(0, 1, kNoon);
  failure.message = "One two three four five six seven eight nine ten eleven twelve thirteen.\n";
  for (int i = 0; i < 30; ++i) failure.message += "line\n";
  const auto text = failure_report("./train", {failure});
  EXPECT_NE(
      text.find("  message   : One two three four five six seven eight nine ten eleven twelve\n"
                "              thirteen.\n"
                "              line\n"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("              ... and 12 more lines\n"), std::string::npos) << text;
}

TEST_F(FailureReport, ListsManyThatWeEndedByTheirNumbers) {
  std::vector<WorkerFailure> failures = {exited(3, 1, kNoon)};
  for (int rank = 0; rank < 64; ++rank) {
    if (rank != 3 && rank != 7) failures.push_back(ended_by_us(rank, kNoon + rank));
  }
  const auto text = failure_report("./train", failures);
  EXPECT_NE(text.find("Other failures:\n  ranks 0-2, 4-6, 8-63: terminated by launcher\n"),
            std::string::npos)
      << text;
}

TEST_F(FailureReport, PassesNoControlSequencesToTheTerminal) {
  auto failure = exited(0, 1, kNoon);
  failure.host = "node\x1b]0;title\x07";
  failure.message = "\x1b[2J\x1b[31mred\x1b[0m \xff\x80 \x9b";
  failure.last_lines = {"10%\r20%\r30%", "tab\there\x08", std::string(3000, 'x')};
  const auto text = failure_report("./tra\x1bin", {failure});
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("  host      : node\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  message   : red ?? ?\n"), std::string::npos) << text;
  EXPECT_NE(text.find("    30%\n    tab\there?\n"), std::string::npos) << text;
  EXPECT_NE(text.find("xxx ...\n"), std::string::npos) << text;
}

TEST_F(FailureReport, IsEmptyWithoutFailures) { EXPECT_EQ(failure_report("./train", {}), ""); }

// ---- text for terminals -------------------------------------------------------------------------

TEST(PrintableLine, KeepsTextInAnyLanguage) {
  EXPECT_EQ(printable_line("größe 大小 🙂\n"), "größe 大小 🙂");
  EXPECT_EQ(printable_line(""), "");
}

TEST(PrintableLine, DropsSequencesThatAreCutOff) {
  EXPECT_EQ(printable_line("a\x1b"), "a");
  EXPECT_EQ(printable_line("a\x1b[12"), "a");
  EXPECT_EQ(printable_line("a\x1b]0;title"), "a");
  EXPECT_EQ(printable_line("a\x1b]8;;link\x1b\\b"), "ab");
  EXPECT_EQ(printable_line("a\x1b(Bb"), "aBb");
  EXPECT_EQ(printable_line("a\xc2\x9b"
                           "b\xe5\xa4"),
            "a?b??");
}

TEST(WrapLine, BreaksAtBlanksAndKeepsTheIndent) {
  EXPECT_EQ(wrap_line("one two three", 8), (std::vector<std::string>{"one two", "three"}));
  EXPECT_EQ(wrap_line("  one  two", 20), (std::vector<std::string>{"  one  two"}));
  EXPECT_EQ(wrap_line("a-very-long-word b", 5),
            (std::vector<std::string>{"a-very-long-word", "b"}));
  EXPECT_EQ(wrap_line("", 5), (std::vector<std::string>{""}));
  EXPECT_EQ(wrap_line("äöü äöü", 7), (std::vector<std::string>{"äöü äöü"}));
}

}  // namespace
}  // namespace accelerate::detail::launch
