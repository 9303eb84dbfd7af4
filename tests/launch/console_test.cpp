#include "launch/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace accelerate::detail::launch {
namespace {

using Stream = ProcessSet::Stream;

// Two pipes in the place of stdout and stderr.
struct Pipes {
  PipePair out;
  PipePair err;

  std::string written() { return out.read_available(); }
  std::string errors() { return err.read_available(); }
};

Console::Route prefixed(const std::string& prefix) { return {.prefix = prefix}; }

TEST(Console, ShowsTheMainWorkerAsItIsAndTheOthersWithTheirPrefix) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  console.attach(1, prefixed("[1]:"), prefixed("[1]:"));
  console.bytes(0, Stream::kOutput, "zero\n");
  console.bytes(1, Stream::kOutput, "one\n");
  console.bytes(1, Stream::kError, "oops\n");
  EXPECT_EQ(pipes.written(), "zero\n[1]:one\n");
  EXPECT_EQ(pipes.errors(), "[1]:oops\n");
}

TEST(Console, TearsNoLine) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  console.attach(1, prefixed("[1]:"), {});
  console.bytes(0, Stream::kOutput, "ze");
  console.bytes(1, Stream::kOutput, "o");
  console.bytes(0, Stream::kOutput, "ro\nnext");
  console.bytes(1, Stream::kOutput, "ne\ntwo");
  EXPECT_EQ(pipes.written(), "zero\n[1]:one\n");
  console.ended(1);
  console.ended(0);
  EXPECT_EQ(pipes.written(), "[1]:two\nnext\n");
}

TEST(Console, ShowsOfALineThatIsDrawnAgainAndAgainTheLastState) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(1, prefixed("[1]:"), {});
  console.bytes(1, Stream::kOutput, "\r 10%\r 50%\r100%\n");
  EXPECT_EQ(pipes.written(), "[1]:100%\n");
}

TEST(Console, ShowsOnceWhereTheRanksWereWhenOneStrayed) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  console.attach(1, prefixed("[1]:"), prefixed("[1]:"));
  console.attach(2, prefixed("[2]:"), prefixed("[2]:"));
  const std::string finding =
      "accelerate: rank 2 is in another collective:\n  rank 0: reduce\n  rank 2: gather\n";
  console.bytes(1, Stream::kError, finding + "  this is rank 1\nits own line\n  rank 0: reduce\n");
  console.bytes(2, Stream::kError, finding + "  this is rank 2\n");
  console.bytes(0, Stream::kError, finding + "  this is rank 0\n");
  EXPECT_EQ(pipes.errors(),
            "[1]:accelerate: rank 2 is in another collective:\n[1]:  rank 0: reduce\n"
            "[1]:  rank 2: gather\n[1]:  this is rank 1\n[1]:its own line\n[1]:  rank 0: reduce\n"
            "[2]:accelerate: rank 2 is in another collective:\n[2]:  this is rank 2\n" +
                finding + "  this is rank 0\n");
  EXPECT_EQ(console.last_lines(2).size(), 4U);  // the report has it all
}

TEST(Console, KeepsWhatAProgressBarDoesNotDrawAgain) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(1, prefixed("[1]:"), {});
  console.bytes(1, Stream::kOutput, "the loss is NaN\r 10% it/s\r   \r 50% it/s loss\r\n");
  EXPECT_EQ(pipes.written(), "[1]:the loss is NaN\n[1]: 50% it/s loss\n");
  console.bytes(1, Stream::kOutput, "windows\r\n\n");
  EXPECT_EQ(pipes.written(), "[1]:windows\n[1]:\n");
}

TEST(LineCutter, LosesNothingOfAVeryLongLine) {
  LineCutter cutter;
  std::vector<std::string> lines;
  const auto take = [&](std::string_view line) { lines.emplace_back(line); };
  const std::string bar = "epoch 1\r";
  cutter.append("the loss is NaN\r", take);
  for (std::size_t sent = 0; sent < (3U << 20); sent += bar.size()) cutter.append(bar, take);
  cutter.append("epoch 2\n", take);
  EXPECT_EQ(lines, (std::vector<std::string>{"the loss is NaN", "epoch 2"}));
  lines.clear();
  cutter.append("begin " + std::string(3U << 20, 'x') + " end\n", take);
  std::string all;
  for (const auto& line : lines) all += line;
  EXPECT_EQ(all, "begin " + std::string(3U << 20, 'x') + " end");
}

TEST(Console, TellsThatOutputIsLostOnAFullDisk) {
  Pipes pipes;
  const Descriptor full(::open("/dev/full", O_WRONLY));
  Console console(full.get(), pipes.err.write_end());
  console.attach(0, {}, {});
  EXPECT_FALSE(console.has_lost_output());
  console.bytes(0, Stream::kOutput, "one\n");
  console.bytes(0, Stream::kOutput, "two\n");
  console.finish();
  EXPECT_TRUE(console.has_lost_output());
  EXPECT_EQ(pipes.errors(),
            "accelerate: stdout can no longer be written: No space left on device. The workers go "
            "on, but their output is lost.\n");
}

TEST(Console, EndsWaitingForAReaderWhenItIsInterrupted) {
  Pipes pipes;
  PipePair interrupt;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  console.bytes(0, Stream::kOutput, std::string(1U << 20, 'x') + "\n");
  ASSERT_EQ(::write(interrupt.write_end(), "x", 1), 1);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(console.finish(interrupt.read_end()));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Console, KeepsTheLastLinesOfStderrOrElseOfStdout) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  for (int i = 0; i < 30; ++i) {
    console.bytes(0, Stream::kOutput, "line " + std::to_string(i) + "\n");
  }
  ASSERT_EQ(console.last_lines(0).size(), 20U);
  EXPECT_EQ(console.last_lines(0).back(), "line 29");
  console.bytes(0, Stream::kError, "it broke");
  console.ended(0);
  EXPECT_EQ(console.last_lines(0), std::vector<std::string>{"it broke"});
}

TEST(Console, WritesWhatIsTeedAndHidesWhatIsNotShown) {
  std::string folder = "/tmp/console_test_XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const auto file = std::filesystem::path(folder) / "stdout.log";
  Pipes pipes;
  {
    Console console(pipes.out.write_end(), pipes.err.write_end());
    console.attach(0, {.shown = false, .file = file}, {});
    console.bytes(0, Stream::kOutput, "a\r\nb");
    console.ended(0);
  }
  std::ifstream content(file, std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(content), {}), "a\r\nb");
  EXPECT_EQ(pipes.written(), "");
  std::filesystem::remove_all(folder);
}

TEST(Console, NeverWaitsForAReaderAndSaysWhenItIsFull) {
  Pipes pipes;
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  const std::string line(1023, 'x');
  std::size_t sent = 0;
  while (!console.full() && sent < (8U << 20)) {
    console.bytes(0, Stream::kOutput, line + "\n");
    sent += line.size() + 1;
  }
  EXPECT_TRUE(console.full());
  std::size_t received = 0;
  while (received < sent) {
    const auto part = pipes.written().size();
    ASSERT_GT(part, 0U);
    received += part;
    console.flush();
  }
  EXPECT_FALSE(console.full());
}

TEST(Console, GoesOnWhenItsReaderIsGone) {
  Pipes pipes;
  ::signal(SIGPIPE, SIG_IGN);
  Console console(pipes.out.write_end(), pipes.err.write_end());
  console.attach(0, {}, {});
  pipes.out.close_read();
  console.bytes(0, Stream::kOutput, "nobody hears this\n");
  EXPECT_FALSE(console.full());
  EXPECT_TRUE(console.finish());
  EXPECT_FALSE(console.has_lost_output());
}

TEST(Screen, PutsALineOfAnotherBeforeTheLineThatTheMainWorkerHasBegunOnATerminal) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(::grantpt(terminal) + ::unlockpt(terminal), 0);
  const int inside = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
  ASSERT_GE(inside, 0);
  ::setenv("TERM", "xterm", 1);
  Screen screen(inside);
  screen.raw("50% ");
  screen.line("[1]:hello");
  screen.raw("51%");
  screen.flush();
  char text[256] = {};
  const auto count = ::read(terminal, text, sizeof text);
  EXPECT_EQ(std::string(text, static_cast<std::size_t>(count)), "50% \r\033[K[1]:hello\r\n50% 51%");
  ::close(inside);
  ::close(terminal);
}

}  // namespace
}  // namespace accelerate::detail::launch
