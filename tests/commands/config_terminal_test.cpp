// `accelerate config` in a real terminal.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "accelerate/config.h"
#include "core/files.h"
#include "support/command.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using test::Command;

class ConfigInATerminal : public testing::Test {
 protected:
  // The command in a shell that afterwards shows the state of the terminal.
  Command start(const test::Variables& environment = {}, int columns = 80) {
    std::ofstream(file_) << "old";
    test::Variables all{{"TERM", "xterm"}, {"LANG", "C.UTF-8"}, {"LC_ALL", std::nullopt}};
    all.insert(all.end(), environment.begin(), environment.end());
    // The shell lives through Ctrl-C, as an interactive one does.
    const std::string script = "trap : INT; " + test::built("bin/accelerate") +
                               " config --config_file " + file_.string() +
                               "; echo code $?; stty -a | tr ';' '\\n'; echo end of test";
    return Command({.argv = {"/bin/sh", "-c", script},
                    .environment = all,
                    .terminal = true,
                    .columns = columns});
  }
  [[nodiscard]] std::string content() const { return read_whole_file(file_); }

  const test::Folder folder_;
  const fs::path file_ = folder_ / "out.yaml";
};

constexpr auto* kFirst = "In which compute environment";
constexpr auto* kSecond = "Which type of machine";
constexpr auto* kCpu = "Do you want to run your training";
constexpr auto* kUp = "\x1b[A";
constexpr auto* kDown = "\x1b[B";

TEST_F(ConfigInATerminal, IsAnsweredWithArrowsNumbersAndText) {
  auto command = start();
  ASSERT_TRUE(command.saw(kFirst)) << command.output();
  command.type("\n");
  ASSERT_TRUE(command.saw(kSecond));
  command.type(std::string(kDown) + kDown + kUp + "4\n");  // multi-GPU
  ASSERT_TRUE(command.saw("How many different machines"));
  // What is typed ahead counts, for lines and for menus.
  command.type("\nno\nno\nno\nno\nno\n2\n\nno\njj\n");
  const auto outcome = command.wait();
  EXPECT_NE(outcome.output.find("configuration saved at"), std::string::npos) << outcome.text();
  EXPECT_NE(outcome.output.find("code 0"), std::string::npos) << outcome.text();
  const auto config = ClusterConfig::from_yaml_file(file_);
  EXPECT_EQ(config.distributed_type, DistributedType::kMultiGpu);
  EXPECT_EQ(config.num_processes, 2);
  EXPECT_EQ(config.mixed_precision, PrecisionType::kBf16);
}

// The terminal is as it was, the file too, and the shell sees the signal.
void expect_untouched(const test::Outcome& outcome, const std::string& content) {
  EXPECT_NE(outcome.output.find("interrupted; nothing was written."), std::string::npos)
      << outcome.text();
  EXPECT_NE(outcome.output.find("code 130"), std::string::npos) << outcome.text();
  EXPECT_NE(outcome.output.find(" icanon "), std::string::npos) << outcome.text();
  EXPECT_NE(outcome.output.find(" echo "), std::string::npos) << outcome.text();
  EXPECT_EQ(test::count_of(outcome.output, "\x1b[?25l"),
            test::count_of(outcome.output, "\x1b[?25h"));
  EXPECT_EQ(content, "old");
}

TEST_F(ConfigInATerminal, LeavesFileAndTerminalAsTheyWereAfterCtrlCInAMenu) {
  auto command = start();
  ASSERT_TRUE(command.saw("Arrow keys"));
  command.type("\x03");
  expect_untouched(command.wait(), content());
}

TEST_F(ConfigInATerminal, LeavesFileAndTerminalAsTheyWereAfterCtrlCInALine) {
  auto command = start();
  ASSERT_TRUE(command.saw(kFirst));
  command.type("\n0\n");
  ASSERT_TRUE(command.saw(kCpu)) << command.output();
  command.type("ye\x03");
  expect_untouched(command.wait(), content());
}

TEST_F(ConfigInATerminal, SaysThatThereIsNoSuchNumber) {
  auto command = start();
  ASSERT_TRUE(command.saw(kFirst));
  command.type("7");
  EXPECT_TRUE(command.saw("There is no choice 7; the last one is 1.")) << command.output();
  command.type("\x03");
  (void)command.wait();
}

TEST_F(ConfigInATerminal, EndsAtTheEndOfInput) {
  auto command = start();
  ASSERT_TRUE(command.saw(kFirst));
  command.type("\x04");
  const auto outcome = command.wait();
  EXPECT_NE(outcome.output.find("code 2"), std::string::npos) << outcome.text();
  EXPECT_EQ(content(), "old");
}

TEST_F(ConfigInATerminal, DrawsAgainForAnotherSize) {
  auto command = start();
  ASSERT_TRUE(command.saw(kFirst));
  command.type("\n");
  ASSERT_TRUE(command.saw("10  TPU"));
  command.resize(20, 8);
  // Two lines of the question, one hint and one row for the cursor: four choices are left.
  ASSERT_TRUE(command.saw("\r\x1b[JWhich type of\r\n")) << command.output();
  command.type("\x03");
  const auto outcome = command.wait();
  const auto redrawn = outcome.output.substr(outcome.output.rfind("\x1b[JWhich"));
  EXPECT_NE(redrawn.find("0  No distrib"), std::string::npos) << redrawn;
  EXPECT_EQ(redrawn.find("10  TPU"), std::string::npos) << redrawn;
}

TEST_F(ConfigInATerminal, HasColoursAndAnArrowOnlyWhereTheyAreUnderstood) {
  const std::string green = "\x1b[32m";
  auto coloured = start();
  ASSERT_TRUE(coloured.saw("Arrow keys"));
  EXPECT_NE(coloured.output().find(green + " ➔ 0"), std::string::npos);
  auto plain = start({{"NO_COLOR", "1"}, {"LANG", "C"}});
  ASSERT_TRUE(plain.saw("Arrow keys"));
  EXPECT_EQ(plain.output().find(green), std::string::npos);
  EXPECT_NE(plain.output().find(" > 0  This machine"), std::string::npos);
  auto dumb = start({{"TERM", "dumb"}});
  ASSERT_TRUE(dumb.saw("A number or a choice [0]: "));
  EXPECT_EQ(dumb.output().find('\x1b'), std::string::npos);
  for (auto* command : {&coloured, &plain, &dumb}) {
    command->type("\x03");
    (void)command->wait();
  }
}

TEST_F(ConfigInATerminal, CanBeStoppedAndContinued) {
  auto command = start();
  ASSERT_TRUE(command.saw("Arrow keys"));
  const auto accelerate = [&]() -> pid_t {
    for (const pid_t pid : command.processes()) {
      if (pid != command.pid()) return pid;
    }
    return -1;
  }();
  ASSERT_GT(accelerate, 0);
  const auto state = [&] {
    std::ifstream file("/proc/" + std::to_string(accelerate) + "/stat");
    std::string word;
    file >> word >> word >> word;
    return word;
  };
  ::kill(accelerate, SIGTSTP);
  ASSERT_TRUE(test::eventually([&] { return state() == "T"; }));
  EXPECT_TRUE(command.saw("\x1b[?25h"));
  ::kill(accelerate, SIGCONT);
  ASSERT_TRUE(command.saw("Arrow keys", 2));
  // Drawn below what the shell wrote, not over it.
  EXPECT_EQ(test::count_of(command.output(), "\x1b[J"), 0) << command.output();
  command.type("\x03");
  expect_untouched(command.wait(), content());
}

}  // namespace
}  // namespace accelerate::detail::commands
