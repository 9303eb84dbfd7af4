// The harness of the launcher's tests, by itself: commands, hosts and a Slurm.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>

#include "support/command.h"
#include "support/hosts.h"
#include "support/slurm.h"

namespace accelerate::test {
namespace {

using Words = std::vector<std::string>;

Words sorted_lines(const std::string& text) {
  auto lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

CommandOptions shell(const std::string& script) { return {.argv = {"sh", "-c", script}}; }

TEST(Command, TellsWhatWasWrittenAndHowItEnded) {
  const auto outcome = run(shell("echo out; echo err >&2; exit 3"));
  EXPECT_EQ(outcome.output, "out\n");
  EXPECT_EQ(outcome.error, "err\n");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_EQ(outcome.left_behind, Words{});
}

TEST(Command, TellsTheSignalThatEndedIt) {
  const auto outcome = run(shell("kill -TERM $$; sleep 10"));
  EXPECT_EQ(outcome.signal, SIGTERM);
  EXPECT_EQ(outcome.shell_code(), 143);
}

TEST(Command, IsKilledAtTheTimeLimit) {
  const auto outcome = run(shell("echo before; sleep 100"), Seconds(0.2));
  EXPECT_TRUE(outcome.timed_out);
  EXPECT_EQ(outcome.output, "before\n");
  EXPECT_EQ(outcome.left_behind, Words{});
}

TEST(Command, SeesAProcessThatIsLeftInAnotherSession) {
  pid_t left = 0;
  {
    Command command(shell("setsid sleep 100 >/dev/null 2>&1 & echo $!"));
    const auto outcome = command.wait();
    left = std::stoi(outcome.output);
    ASSERT_EQ(outcome.left_behind.size(), 1U) << outcome.text();
    EXPECT_EQ(outcome.left_behind[0], "process " + std::to_string(left) + " (sleep 100 )");
    EXPECT_TRUE(is_alive(left));
  }
  EXPECT_TRUE(eventually([&] { return !is_alive(left); }));
}

TEST(Command, SeesAFileThatIsLeft) {
  const auto outcome = run(shell("touch \"$TMPDIR/x\""));
  ASSERT_EQ(outcome.left_behind.size(), 1U);
  EXPECT_TRUE(outcome.left_behind[0].ends_with("/tmp/x")) << outcome.left_behind[0];
}

TEST(Command, RunsInATerminalWithKeysAndAWindowThatCloses) {
  Command command({.argv = {"sh", "-c",
                            "test -t 1 && echo a terminal; trap 'echo int' INT; echo ready; "
                            "while :; do sleep 0.05; done"},
                   .terminal = true});
  ASSERT_TRUE(command.saw("ready"));
  EXPECT_TRUE(command.saw("a terminal"));
  command.type("\x03");
  EXPECT_TRUE(command.saw("int"));
  command.close_terminal();
  EXPECT_EQ(command.wait().signal, SIGHUP);
}

TEST(Command, StartsWithoutTheVariablesOfLaunchers) {
  ::setenv("RANK", "3", 1);
  const auto outcome = run(shell("echo ${RANK-none} ${A-none}"));
  ::unsetenv("RANK");
  EXPECT_EQ(outcome.output, "none none\n");
  EXPECT_EQ(run({.argv = {"sh", "-c", "echo ${RANK-none}"}, .environment = {{"RANK", "1"}}}).output,
            "1\n");
}

TEST(Hosts, HaveNamesAndAddressesOfTheirOwnAndReachEachOther) {
  ACCELERATE_SKIP_WITHOUT_HOSTS();
  Hosts hosts(3);
  EXPECT_EQ(run({.argv = hosts.on(1, {"hostname"})}).output, "n2\n");
  for (const auto& address : {Hosts::address(0), Hosts::address6(0)}) {
    Command server({.argv = hosts.on(
                        0, {"python3", "-u", "-c",
                            "import socket, sys\n"
                            "s = socket.create_server((sys.argv[1], 7000), family=socket.AF_INET6 "
                            "if ':' in sys.argv[1] else socket.AF_INET)\n"
                            "print('listening'); print(s.accept()[1][0])",
                            address})});
    ASSERT_TRUE(server.saw("listening")) << server.error();
    EXPECT_EQ(hosts.listening_ports(0), std::vector{7000});
    EXPECT_EQ(hosts.listening_ports(1), std::vector<int>{});
    const auto client =
        run({.argv = hosts.on(2, {"python3", "-c",
                                  "import socket, sys; "
                                  "socket.create_connection((sys.argv[1], 7000), 5)",
                                  address})});
    EXPECT_EQ(client.code, 0) << client.error;
    EXPECT_EQ(server.wait().output.substr(10), address.find(':') == std::string::npos
                                                   ? Hosts::address(2) + "\n"
                                                   : Hosts::address6(2) + "\n");
  }
}

TEST(Hosts, CanBeCutOffAndComeBack) {
  ACCELERATE_SKIP_WITHOUT_HOSTS();
  Hosts hosts(2);
  const Words connect = {"python3", "-c",
                         "import socket\n"
                         "try: socket.create_connection(('10.77.0.1', 9), 0.3)\n"
                         "except ConnectionRefusedError: print('refused')\n"
                         "except OSError: print('no way')"};
  EXPECT_EQ(run({.argv = hosts.on(1, connect)}).output, "refused\n");
  hosts.cut(0);
  EXPECT_EQ(run({.argv = hosts.on(1, connect)}).output, "no way\n");
  hosts.restore(0);
  EXPECT_TRUE(
      eventually([&] { return run({.argv = hosts.on(1, connect)}).output == "refused\n"; }));
}

TEST(Hosts, EndWithTheirProcesses) {
  ACCELERATE_SKIP_WITHOUT_HOSTS();
  pid_t pid = 0;
  {
    Hosts hosts(1);
    Command command({.argv = hosts.on(0, {"sh", "-c", "echo $$; exec sleep 100"})});
    ASSERT_TRUE(command.saw("\n"));
    pid = std::stoi(command.output());
    EXPECT_EQ(pid, command.pid()) << "signals to the command must reach the program";
    EXPECT_EQ(hosts.processes(0), std::vector{pid});
  }
  EXPECT_FALSE(is_alive(pid));
}

TEST(Slurm, RunsTasksOnTwoNodes) {
  ACCELERATE_SKIP_WITHOUT_SLURM();
  Hosts hosts(2);
  Slurm slurm(hosts);
  const auto outcome = run(slurm.srun(
      {"-N2", "-n4", "--ntasks-per-node=2", "sh", "-c", "echo $SLURM_PROCID $(hostname)"}));
  EXPECT_EQ(sorted_lines(outcome.output), (Words{"0 n1", "1 n1", "2 n2", "3 n2"}))
      << outcome.text();
}

}  // namespace
}  // namespace accelerate::test
