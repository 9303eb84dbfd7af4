// `accelerate monitor` as a process: in a terminal, and as a server.
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "commands/monitor/screen.h"
#include "commands/running.h"
#include "core/progress_line.h"
#include "core/text.h"
#include "support/command.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using test::Command;

class MonitorInATerminal : public testing::Test {
 protected:
  void SetUp() override {
    write("first/monitor/20261116-101500-aaaa", 1, 5);
    write("second/monitor/20261116-111500-bbbb", 1000, 1);
  }
  void write(const std::string& run, double start, int slow) const {
    for (int rank = 0; rank < 2; ++rank) {
      const auto folder = folder_.path() / run;
      fs::create_directories(folder);
      std::ofstream file(folder / str("rank_", rank, ".jsonl"));
      for (int i = 0; i < 200; ++i) {
        const double time = start + 0.1 * i;
        if (rank == 0) {
          file << R"({"time": )" << time << R"(, "step": )" << i << R"(, "values": {"loss": )"
               << std::exp(-0.02 * i) << R"(, "accuracy": )" << 0.004 * i << "}}\n";
        }
        file << R"({"time": )" << time << R"(, "steps": )" << i << R"(, "count": 1, "ms": 10, )"
             << R"("wait": )" << (rank == 1 ? 1 : slow) << R"(, "lr": 0.1})" << "\n";
      }
      file << R"({"time": )" << start + 20 << R"(, "end": "finished"})" << "\n";
    }
  }
  Command start(int columns = 80, const std::string& language = "C.UTF-8") const {
    const std::string script = test::built("bin/accelerate") + " monitor --tui " +
                               folder_.path().string() +
                               "; echo code $?; stty -a | tr ';' '\\n'; echo end of test";
    return Command(
        {.argv = {"/bin/sh", "-c", "trap : INT; " + script},
         .environment = {{"TERM", "xterm"}, {"LANG", language}, {"LC_ALL", std::nullopt}},
         .terminal = true,
         .columns = columns});
  }

  const test::Folder folder_;
};

TEST_F(MonitorInATerminal, SwitchesCurvesAndRunsByKeysAndLeavesTheTerminalAsItWas) {
  auto command = start();
  ASSERT_TRUE(command.saw("second 11-16 11:15:00")) << command.output();
  ASSERT_TRUE(command.saw("run 1 of 2"));
  ASSERT_TRUE(command.saw("loss"));
  ASSERT_TRUE(command.saw("\xe2\xa0")) << "no dots";
  command.type("\t");
  ASSERT_TRUE(command.saw("accuracy")) << command.output();
  command.type("\x1b[C");
  ASSERT_TRUE(command.saw("learning rate"));
  command.type("\x1b[D\x1b[D");
  command.type("\x1b[B");
  ASSERT_TRUE(command.saw("run 2 of 2"));
  ASSERT_TRUE(command.saw("Rank 1 is the straggler: the others wait for it 40 % of a step."));
  command.type("q");
  const auto outcome = command.wait();
  EXPECT_TRUE(has(outcome.output, "code 0")) << outcome.text();
  EXPECT_TRUE(has(outcome.output, " icanon ")) << outcome.text();
  EXPECT_TRUE(has(outcome.output, " echo "));
  EXPECT_EQ(test::count_of(outcome.output, "\x1b[?1049h"), 1);
  EXPECT_EQ(test::count_of(outcome.output, "\x1b[?1049l"), 1);
  EXPECT_EQ(test::count_of(outcome.output, "\x1b[?25l"),
            test::count_of(outcome.output, "\x1b[?25h"));
}

TEST_F(MonitorInATerminal, FollowsTheSizeAndEndsByCtrlC) {
  auto command = start(100);
  ASSERT_TRUE(command.saw("run 1 of 2"));
  command.resize(40, 12);
  ASSERT_TRUE(command.saw("Tab or <- -> curve   up down run   x axi\x1b[0m")) << command.output();
  command.type("\x03");
  EXPECT_TRUE(has(command.wait().output, "code 0"));
}

TEST_F(MonitorInATerminal, FitsEverySize) {
  RunSet runs(folder_.path());
  runs.refresh_all();
  for (const std::size_t columns : {1U, 5U, 11U, 20U, 80U, 300U}) {
    for (const std::size_t rows : {1U, 2U, 5U, 9U, 24U, 100U}) {
      MonitorScreen screen(runs, {.color = true, .utf8 = true});
      for (int key = 0; key < 8; ++key) {
        const auto lines = screen.lines({.columns = columns, .rows = rows}, 2000);
        EXPECT_LE(lines.size(), std::max<std::size_t>(rows, 2));
        for (const auto& line : lines) {
          EXPECT_LE(display_width(line), static_cast<int>(columns)) << line;
        }
        EXPECT_TRUE(screen.press({.key = Key::kRight}));
      }
    }
  }
}

TEST_F(MonitorInATerminal, DrawsWithAsciiWhereThereIsNothingElse) {
  RunSet runs(folder_.path());
  runs.refresh_all();
  MonitorScreen screen(runs, {.color = false, .utf8 = false});
  for (const auto& line : screen.lines({.columns = 80, .rows = 24}, 2000)) {
    for (const char c : line) EXPECT_TRUE(c >= ' ' && c <= '~') << line;
  }
}

TEST_F(MonitorInATerminal, SaysWhatToDoWithoutATerminal) {
  const auto answer = ran({kAccelerate, "monitor", "--tui", folder_.path().string()});
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(has(answer.err, "draws in a terminal, but stdin or stdout is none")) << answer.err;
  EXPECT_EQ(answer.out, "");
}

TEST(Monitor, RefusesWrongInput) {
  const auto nothing = ran({kAccelerate, "monitor", "/no/such/folder"});
  EXPECT_EQ(nothing.code, 2);
  EXPECT_TRUE(has(nothing.err, "There is no file or folder '/no/such/folder'."));
  EXPECT_EQ(ran({kAccelerate, "monitor", "--port", "70000"}).code, 2);
  EXPECT_EQ(ran({kAccelerate, "monitor", "--tui", "--port", "1"}).code, 2);
  const auto foreign = ran({kAccelerate, "monitor", "--host", "192.0.2.1"});
  EXPECT_EQ(foreign.code, 2);
  EXPECT_TRUE(has(foreign.err, "cannot be served at 192.0.2.1:6116")) << foreign.err;
}

TEST(Monitor, PrintsItsAddressAndEndsByCtrlC) {
  const test::Folder folder;
  Command command(
      {.argv = {test::built("bin/accelerate"), "monitor", folder.path().string(), "--port", "0"}});
  ASSERT_TRUE(command.saw("Ctrl-C ends it")) << command.output();
  EXPECT_TRUE(command.output().starts_with("http://127.0.0.1:")) << command.output();
  EXPECT_FALSE(has(command.output(), "token"));
  command.signal(SIGINT);
  const auto outcome = command.wait();
  EXPECT_EQ(outcome.shell_code(), 0);
  EXPECT_TRUE(outcome.left_behind.empty());
}

TEST(Monitor, NeedsATokenForOtherMachines) {
  const test::Folder folder;
  Command command({.argv = {test::built("bin/accelerate"), "monitor", folder.path().string(),
                            "--host", "0.0.0.0", "--port", "0"}});
  ASSERT_TRUE(command.saw("Ctrl-C ends it")) << command.output();
  EXPECT_TRUE(has(command.output(), "/?token=")) << command.output();
  command.signal(SIGTERM);
  EXPECT_EQ(command.wait().shell_code(), 128 + SIGTERM);
}

}  // namespace
}  // namespace accelerate::detail::commands
