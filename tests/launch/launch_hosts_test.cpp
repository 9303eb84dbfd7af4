// `accelerate launch` on several machines, each a network namespace: meeting, failing together,
// losing a machine, coming and going.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <memory>

#include "launch/launching.h"
#include "support/hosts.h"

namespace accelerate::test {
namespace {

// How the machines of a test are started.
struct Job {
  std::string machines = "2";
  int per_machine = 1;
  std::string backend = "static";
  /// Seconds; short, so that tests are.
  std::string conf = "timeout=20,join_timeout=20,last_call_timeout=0.3,keep_alive=10";
  std::string address = Hosts::address(0);
  Words flags = {};
};

class LaunchHosts : public ::testing::Test {
 protected:
  void SetUp() override { ACCELERATE_SKIP_WITHOUT_HOSTS(); }

  void make(int count) { hosts_ = std::make_unique<Hosts>(count); }

  // `machine_rank` is the number of the host, unless told otherwise.
  [[nodiscard]] Command start(int host, const Job& job, const Words& program,
                              int machine_rank = -1) const {
    const int most = std::stoi(job.machines.substr(job.machines.find(':') + 1));
    return Command(
        {.argv = hosts_->on(
             host,
             launch_words(most * job.per_machine,
                          Words{"--num_machines", job.machines, "--machine_rank",
                                std::to_string(machine_rank < 0 ? host : machine_rank),
                                "--main_process_ip", job.address, "--main_process_port", "29500",
                                "--rdzv_backend", job.backend, "--rdzv_conf", job.conf} +
                              job.flags,
                          program))});
  }

  [[nodiscard]] std::vector<Command> start_all(const Job& job, const Words& program) const {
    std::vector<Command> commands;
    for (int host = 0; host < hosts_->count(); ++host) {
      commands.push_back(start(host, job, program));
    }
    return commands;
  }

  // All end with this code, and nothing is left on any host.
  std::vector<Outcome> expect_all(std::vector<Command>& commands, int code,
                                  Seconds limit = Seconds(30)) const {
    std::vector<Outcome> outcomes;
    for (std::size_t i = 0; i < commands.size(); ++i) {
      outcomes.push_back(commands[i].wait(limit));
      SCOPED_TRACE("host " + std::to_string(i));
      expect_clean_end(outcomes.back(), code);
    }
    expect_nothing_left();
    return outcomes;
  }

  void expect_nothing_left() const {
    for (int host = 0; host < hosts_->count(); ++host) {
      // The last thread of a killed process closes its sockets, a moment after it looks dead.
      EXPECT_TRUE(eventually([&] { return hosts_->processes(host).empty(); })) << "host " << host;
      EXPECT_TRUE(eventually([&] { return hosts_->listening_ports(host).empty(); }))
          << "host " << host;
    }
  }

  std::unique_ptr<Hosts> hosts_;
};

std::string all_output(const std::vector<Outcome>& outcomes) {
  std::string text;
  for (const auto& outcome : outcomes) text += outcome.output;
  return text;
}

// ---- meeting ------------------------------------------------------------------------------------

TEST_F(LaunchHosts, TwoMeetWithStaticRanks) {
  make(2);
  auto commands = start_all({.per_machine = 2}, worker({"join", "facts", "gather"}));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1 2 3"), 4) << all_output(outcomes);
  EXPECT_TRUE(contains(outcomes[0].output, "rank 0 of 4, local 0, host n1, master 10.77.0.1"));
  EXPECT_TRUE(contains(outcomes[0].output, "rank 1 of 4, local 1, host n1"));
  EXPECT_TRUE(contains(outcomes[1].output, "[default0]:rank 2 of 4, local 0, host n2"))
      << outcomes[1].text();
  EXPECT_TRUE(contains(outcomes[1].output, "[default1]:rank 3 of 4, local 1, host n2"));
}

TEST_F(LaunchHosts, TwoMeetOverIpv6) {
  make(2);
  auto commands =
      start_all({.per_machine = 2, .address = Hosts::address6(0)}, worker({"join", "gather"}));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1 2 3"), 4) << all_output(outcomes);
}

TEST_F(LaunchHosts, TwoMeetOverIpv6AndC10d) {
  make(2);
  auto commands = start_all({.backend = "c10d", .address = Hosts::address6(0)},
                            worker({"join", "facts", "gather"}));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1"), 2) << all_output(outcomes);
}

TEST_F(LaunchHosts, ThreeMeetThroughC10dInTheOrderOfTheirAddresses) {
  make(3);
  const Job job{.machines = "3", .backend = "c10d"};
  std::vector<Command> commands;
  // The ranks that they are given do not count.
  for (int host = 0; host < 3; ++host) {
    commands.push_back(start(host, job, worker({"join", "facts", "gather"}), 2 - host));
  }
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1 2"), 3) << all_output(outcomes);
  for (int host = 0; host < 3; ++host) {
    EXPECT_TRUE(
        contains(outcomes[static_cast<std::size_t>(host)].output,
                 "rank " + std::to_string(host) + " of 3, local 0, host " + Hosts::name(host)))
        << all_output(outcomes);
  }
}

TEST_F(LaunchHosts, ThreeMeetInWhateverOrderTheyCome) {
  make(3);
  const Job job{.machines = "3"};
  const auto program = worker({"join", "gather"});
  std::vector<Command> commands;
  auto third = start(2, job, program);
  auto second = start(1, job, program);
  ::usleep(700'000);  // the first machine is late
  commands.push_back(start(0, job, program));
  commands.push_back(std::move(second));
  commands.push_back(std::move(third));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1 2"), 3) << all_output(outcomes);
}

TEST_F(LaunchHosts, WaitForALateMachine) {
  make(2);
  const Job job{};
  std::vector<Command> commands;
  commands.push_back(start(0, job, worker({"join", "gather"})));
  ::usleep(1'000'000);
  EXPECT_EQ(commands[0].output(), "");
  commands.push_back(start(1, job, worker({"join", "gather"})));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1"), 2) << all_output(outcomes);
}

TEST_F(LaunchHosts, RunScriptsWithAStoreOfTheLauncher) {
  make(2);
  auto commands = start_all({}, Words{"/bin/sh", "-c", "exec \"$@\"", "sh"} +
                                    worker({"env=TORCHELASTIC_USE_AGENT_STORE", "join", "gather"}));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "TORCHELASTIC_USE_AGENT_STORE=True"), 2);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1"), 2) << all_output(outcomes);
}

// ---- not meeting --------------------------------------------------------------------------------

TEST_F(LaunchHosts, SayWhichMachineIsMissing) {
  make(1);
  auto command =
      start(0, {.machines = "3", .conf = "timeout=1,join_timeout=1"}, probe({"say=started"}));
  const auto outcome = command.wait(Seconds(10));
  expect_clean_end(outcome, 1);
  EXPECT_TRUE(contains(outcome.error, "1 of 3 machines arrived within 1 s")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "missing: machine 1, machine 2")) << outcome.text();
  EXPECT_FALSE(contains(outcome.output, "started"));
  expect_nothing_left();
}

TEST_F(LaunchHosts, SayWhichMachineIsMissingEvenWhenQuiet) {
  make(1);
  auto command =
      start(0, {.machines = "2", .conf = "timeout=0.4", .flags = {"--quiet"}}, probe({}));
  const auto outcome = command.wait(Seconds(10));
  expect_clean_end(outcome, 1);
  EXPECT_TRUE(contains(outcome.error, "1 of 2 machines arrived within 0.4 s")) << outcome.text();
}

TEST_F(LaunchHosts, NameTwoMachinesThatSayTheyAreTheSame) {
  make(3);
  const Job job{.machines = "3"};
  std::vector<Command> commands;
  commands.push_back(start(0, job, probe({"say=started"})));
  commands.push_back(start(1, job, probe({"say=started"}), 1));
  commands.push_back(start(2, job, probe({"say=started"}), 1));
  const auto outcomes = expect_all(commands, 2, Seconds(10));
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome.error, "two machines say that they are number 1"))
        << outcome.text();
    EXPECT_TRUE(contains(outcome.error, Hosts::address(1))) << outcome.text();
    EXPECT_TRUE(contains(outcome.error, Hosts::address(2))) << outcome.text();
    EXPECT_TRUE(contains(outcome.error, "--machine_rank")) << outcome.text();
    EXPECT_FALSE(contains(outcome.output, "started")) << outcome.text();
  }
}

TEST_F(LaunchHosts, SayThatMachineZeroIsThereTwice) {
  make(2);
  std::vector<Command> commands;
  commands.push_back(start(0, {}, probe({"say=started"}), 0));
  // Machine 0 opens the port itself; on another host that is not its address.
  commands.push_back(start(1, {.conf = "timeout=3,join_timeout=3"}, probe({"say=started"}), 0));
  const auto outcome = commands[1].wait(Seconds(15));
  EXPECT_FALSE(outcome.timed_out) << outcome.text();
  EXPECT_NE(outcome.code, 0) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "machine_rank")) << outcome.text();
}

TEST_F(LaunchHosts, RefuseAMachineThatWasToldOtherThings) {
  make(2);
  auto first = start(0, {.machines = "2", .conf = "timeout=3,join_timeout=3"}, probe({}));
  auto second = start(1, {.machines = "2", .flags = {"--max_restarts", "3"}}, probe({}));
  const auto outcome = second.wait(Seconds(10));
  expect_clean_end(outcome, 2);
  EXPECT_TRUE(contains(outcome.error, "--max_restarts 3")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "--max_restarts 0")) << outcome.text();
}

TEST_F(LaunchHosts, RefuseAMachineOfAnotherRun) {
  make(2);
  auto first = start(0, {.conf = "timeout=3,join_timeout=3", .flags = {"--rdzv_id", "monday"}},
                     probe({"say=started"}));
  auto second = start(1, {.flags = {"--rdzv_id", "tuesday"}}, probe({"say=started"}));
  const auto outcome = second.wait(Seconds(10));
  expect_clean_end(outcome, 2);
  EXPECT_TRUE(contains(outcome.error, "monday")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "tuesday")) << outcome.text();
}

TEST_F(LaunchHosts, SayWhereNobodyAnsweredAndForHowLong) {
  make(1);
  for (const std::string nobody : {"10.77.0.200", "10.77.0.1"}) {  // no such host; nobody listens
    auto command = start(0, {.conf = "timeout=1.2,join_timeout=1.2", .address = nobody},
                         probe({"say=started"}), 1);
    const auto outcome = command.wait(Seconds(10));
    expect_clean_end(outcome, 1);
    EXPECT_TRUE(contains(outcome.error, nobody + ":29500")) << outcome.text();
    EXPECT_TRUE(contains(outcome.error, "tried for ")) << outcome.text();
    EXPECT_LT(outcome.seconds, patient(Seconds(4)).count());
  }
}

TEST_F(LaunchHosts, SayThatANameDoesNotResolve) {
  make(1);
  auto command = start(0, {.conf = "timeout=1,join_timeout=1", .address = "no-such-host.invalid"},
                       probe({}), 1);
  const auto outcome = command.wait(Seconds(15));
  expect_clean_end(outcome, 1);
  EXPECT_TRUE(contains(outcome.error, "no-such-host.invalid")) << outcome.text();
}

TEST_F(LaunchHosts, AreNotDisturbedByStrangersAtTheirPort) {
  // Health checks and port scanners: one says HTTP, one says nothing, one says a lot.
  make(3);
  const auto stranger = [&](const std::string& words) {
    return run({.argv = hosts_->on(2, {"python3", "-c",
                                       "import socket, sys, time\n"
                                       "s = socket.create_connection(('10.77.0.1', 29500), 5)\n"
                                       "s.sendall(eval(sys.argv[1]))\n"
                                       "time.sleep(0.2)",
                                       words})});
  };
  const auto disturb = [&] {
    for (const std::string words : {"b'GET / HTTP/1.0\\r\\n\\r\\n'", "b''", "b'x' * 3000000"}) {
      static_cast<void>(stranger(words));
    }
  };
  Folder folder;
  const auto program = worker({"join", "gather", "loop=" + folder / "stop"});
  std::vector<Command> commands;
  commands.push_back(start(0, {}, program));
  ASSERT_TRUE(eventually([&] { return !hosts_->listening_ports(0).empty(); }));
  disturb();
  commands.push_back(start(1, {}, program));
  ASSERT_TRUE(commands[0].saw("step 1")) << commands[0].error();
  disturb();
  std::ofstream(folder / "stop") << "";
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1"), 2) << all_output(outcomes);
}

TEST_F(LaunchHosts, EndAtOnceOnASignalWhileTheyWait) {
  make(2);
  auto leader = start(0, {}, probe({}));
  auto seeker = start(1, {.address = "10.77.0.200"}, probe({}));
  ASSERT_TRUE(eventually([&] { return !hosts_->listening_ports(0).empty(); }));
  ASSERT_TRUE(eventually([&] { return seeker.takes_signal(SIGTERM); }));
  leader.signal(SIGINT);
  seeker.signal(SIGTERM);
  const auto first = leader.wait(Seconds(5));
  expect_clean_end(first, 130);
  const auto second = seeker.wait(Seconds(5));
  expect_clean_end(second, 143);
}

TEST_F(LaunchHosts, TakeAnIpv6AddressInBrackets) {
  make(2);
  auto commands =
      start_all({.address = "[" + Hosts::address6(0) + "]"}, worker({"join", "gather"}));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1"), 2) << all_output(outcomes);
}

// ---- ending together ----------------------------------------------------------------------------

TEST_F(LaunchHosts, EndTogetherWithTheCodeOfTheFirstFailure) {
  make(3);
  auto commands = start_all(
      {.machines = "3"}, probe({"say=up", "2:err=the reason", "2:sleep=0.5", "2:exit=9", "wait"}));
  for (auto& command : commands) ASSERT_TRUE(command.saw("up")) << command.error();
  const auto outcomes = expect_all(commands, 9, Seconds(10));
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome.error, "rank      : 2 (local_rank: 0)")) << outcome.text();
    EXPECT_TRUE(contains(outcome.error, "host      : n3")) << outcome.text();
    EXPECT_TRUE(contains(outcome.error.substr(outcome.error.find("Root cause")), "the reason"))
        << outcome.text();
    EXPECT_LT(outcome.seconds, patient(Seconds(4)).count());
  }
}

TEST_F(LaunchHosts, RestartTogether) {
  make(2);
  auto commands =
      start_all({.flags = {"--max_restarts", "1"}},
                worker({"join", "sum", "1:flaky=1", "gather", "env=TORCHELASTIC_RESTART_COUNT"}));
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(all_output(outcomes), "gathered 0 1"), 2) << all_output(outcomes);
  EXPECT_EQ(count_of(all_output(outcomes), "TORCHELASTIC_RESTART_COUNT=1"), 2);
}

TEST_F(LaunchHosts, EndTogetherWhenOneIsInterrupted) {
  for (const std::size_t interrupted : {0U, 1U}) {
    make(2);
    auto commands = start_all({}, probe({"trap=0", "say=up", "wait"}));
    for (auto& command : commands) ASSERT_TRUE(command.saw("up")) << command.error();
    commands[interrupted].signal(SIGINT);
    const auto outcomes = expect_all(commands, 130, Seconds(10));
    EXPECT_EQ(count_of(all_output(outcomes), "caught SIG"), 2) << all_output(outcomes);
    EXPECT_TRUE(contains(outcomes[interrupted].output, "caught SIGINT"));
  }
}

// ---- losing a machine ---------------------------------------------------------------------------

TEST_F(LaunchHosts, EndWithAClearErrorWhenTheCableIsPulledDuringTraining) {
  make(2);
  Folder folder;
  auto commands = start_all({.conf = "join_timeout=20,keep_alive=1.5"},
                            worker({"join", "loop=" + folder / "stop"}));
  for (auto& command : commands) ASSERT_TRUE(command.saw("step 1")) << command.error();
  hosts_->cut(1);
  const auto outcomes = expect_all(commands, 70, Seconds(20));
  EXPECT_TRUE(contains(outcomes[0].error, "machine 1 (n2, 10.77.0.2)")) << outcomes[0].text();
  EXPECT_TRUE(contains(outcomes[1].error, "10.77.0.1:29500")) << outcomes[1].text();
  for (const auto& outcome : outcomes) EXPECT_LT(outcome.seconds, patient(Seconds(12)).count());
}

TEST_F(LaunchHosts, EndWhenAMachineLosesItsPower) {
  make(3);
  auto commands = start_all({.machines = "3", .conf = "join_timeout=20,keep_alive=1.5"},
                            probe({"say=up", "wait"}));
  for (auto& command : commands) ASSERT_TRUE(command.saw("up")) << command.error();
  hosts_->cut(1);
  commands[1].kill_all();
  for (const std::size_t survivor : {0U, 2U}) {
    const auto outcome = commands[survivor].wait(Seconds(15));
    expect_clean_end(outcome, 70);
    EXPECT_TRUE(contains(outcome.error, "machine 1 (n2, 10.77.0.2)")) << outcome.text();
  }
}

TEST_F(LaunchHosts, EndAtOnceWhenALauncherIsKilled) {
  for (const std::size_t victim : {1U, 0U}) {
    make(2);
    auto commands = start_all({}, probe({"grandchild", "say=up", "wait"}));
    for (auto& command : commands) ASSERT_TRUE(command.saw("up")) << command.error();
    commands[victim].signal(SIGKILL);
    const auto killed = commands[victim].wait();
    EXPECT_EQ(killed.left_behind, kNothing) << killed.text();
    const auto outcome = commands[1 - victim].wait(Seconds(5));
    expect_clean_end(outcome, 70);
    EXPECT_LT(outcome.seconds, patient(Seconds(4)).count());
    EXPECT_TRUE(contains(outcome.error, victim == 1 ? "machine 1 (n2" : "10.77.0.1:29500"))
        << outcome.text();
    expect_nothing_left();
  }
}

TEST_F(LaunchHosts, GoOnWithAMachineThatComesBackWhenThereAreRestarts) {
  make(2);
  Folder folder;
  const Job job{.flags = {"--max_restarts", "1"}};
  const auto program =
      worker({"join", "gather", "env=TORCHELASTIC_RESTART_COUNT", "loop=" + folder / "stop"});
  auto commands = start_all(job, program);
  for (auto& command : commands) ASSERT_TRUE(command.saw("step 1")) << command.error();
  commands[1].kill_all();
  static_cast<void>(commands[1].wait());
  ::usleep(300'000);
  commands[1] = start(1, job, program);
  ASSERT_TRUE(commands[0].saw("TORCHELASTIC_RESTART_COUNT=1")) << commands[0].error();
  ASSERT_TRUE(commands[1].saw("step 1")) << commands[1].error();
  std::ofstream(folder / "stop") << "";
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(outcomes[0].output, "gathered 0 1"), 2) << outcomes[0].text();
}

// ---- coming and going ---------------------------------------------------------------------------

TEST_F(LaunchHosts, JoinAndLeaveAnElasticJobWithoutUsingRestarts) {
  make(3);
  Folder folder;
  const Job job{.machines = "1:3", .backend = "c10d"};
  const auto program = worker(
      {"join", "gather", "env=TORCHELASTIC_RESTART_COUNT,WORLD_SIZE", "loop=" + folder / "stop"});
  auto first = start(0, job, program);
  ASSERT_TRUE(first.saw("RESTART_COUNT=0 WORLD_SIZE=1")) << first.error();
  ASSERT_TRUE(first.saw("step 1"));
  auto second = start(1, job, program);  // joins
  ASSERT_TRUE(first.saw("RESTART_COUNT=0 WORLD_SIZE=2")) << first.error();
  auto third = start(2, job, program);  // and a third
  ASSERT_TRUE(first.saw("RESTART_COUNT=0 WORLD_SIZE=3")) << first.error();
  ASSERT_TRUE(third.saw("step 1"));
  second.signal(SIGTERM);  // leaves in good order
  expect_clean_end(second.wait(Seconds(10)), 143);
  ASSERT_TRUE(first.saw("RESTART_COUNT=0 WORLD_SIZE=2", 2)) << first.error();
  ASSERT_TRUE(third.saw("step 1", 2)) << third.error();
  third.kill_all();  // leaves in bad order
  static_cast<void>(third.wait());
  ASSERT_TRUE(first.saw("RESTART_COUNT=0 WORLD_SIZE=1", 2)) << first.error();
  std::ofstream(folder / "stop") << "";
  const auto outcome = first.wait();
  expect_clean_end(outcome, 0);
  EXPECT_TRUE(contains(outcome.output, "gathered 0 1 2")) << outcome.text();
  expect_nothing_left();
}

TEST_F(LaunchHosts, GoOnWithoutAMachineOfAnElasticJobThatIsCutOff) {
  make(2);
  Folder folder;
  const Job job{.machines = "1:2",
                .backend = "c10d",
                .conf = "join_timeout=20,keep_alive=1.5,last_call_timeout=1"};
  const auto program = worker({"join", "env=WORLD_SIZE", "loop=" + folder / "stop"});
  auto commands = start_all(job, program);
  for (auto& command : commands) ASSERT_TRUE(command.saw("WORLD_SIZE=2")) << command.error();
  hosts_->cut(1);
  ASSERT_TRUE(commands[0].saw("WORLD_SIZE=1")) << commands[0].error();
  EXPECT_TRUE(contains(commands[0].error(), "machine n2, 10.77.0.2")) << commands[0].error();
  const auto lost = commands[1].wait(Seconds(15));
  expect_clean_end(lost, 70);
  EXPECT_TRUE(contains(lost.error, "10.77.0.1:29500")) << lost.text();
  std::ofstream(folder / "stop") << "";
  expect_clean_end(commands[0].wait(), 0);
}

TEST_F(LaunchHosts, WaitForAPlaceInAnElasticJobThatIsFull) {
  make(3);
  Folder folder;
  const Job job{.machines = "1:2", .backend = "c10d"};
  const auto program = worker({"join", "gather", "loop=" + folder / "stop"});
  auto first = start(0, job, program);
  auto second = start(1, job, program);
  ASSERT_TRUE(first.saw("gathered 0 1")) << first.error();
  ASSERT_TRUE(second.saw("step 1")) << second.error();
  auto third = start(2, job, program);
  ASSERT_TRUE(third.saw("which is its most")) << third.error();
  EXPECT_EQ(third.output(), "");
  EXPECT_EQ(count_of(first.output(), "gathered 0 1"), 1) << "the job was disturbed";
  second.signal(SIGINT);
  expect_clean_end(second.wait(Seconds(10)), 130);
  ASSERT_TRUE(third.saw("gathered 0 1")) << third.error();
  ASSERT_TRUE(third.saw("step 1")) << third.error();
  std::ofstream(folder / "stop") << "";
  expect_clean_end(first.wait(), 0);
  expect_clean_end(third.wait(), 0);
  expect_nothing_left();
}

TEST_F(LaunchHosts, EndAnElasticJobWithTheMachineThatLeadsIt) {
  make(2);
  auto commands = start_all({.backend = "c10d"}, probe({"trap=0", "say=up", "wait"}));
  for (auto& command : commands) ASSERT_TRUE(command.saw("up")) << command.error();
  commands[0].signal(SIGTERM);
  const auto outcomes = expect_all(commands, 143, Seconds(10));
  EXPECT_EQ(count_of(all_output(outcomes), "caught SIGTERM"), 2) << all_output(outcomes);
}

TEST_F(LaunchHosts, ComeBackToAnElasticJob) {
  make(2);
  Folder folder;
  const Job job{.machines = "2",
                .backend = "c10d",
                .conf = "join_timeout=20,keep_alive=1.5,last_call_timeout=0.3"};
  const auto program = worker({"join", "gather", "loop=" + folder / "stop"});
  auto commands = start_all(job, program);
  for (auto& command : commands) ASSERT_TRUE(command.saw("step 1")) << command.error();
  hosts_->cut(1);
  commands[1].kill_all();
  static_cast<void>(commands[1].wait());
  hosts_->restore(1);
  commands[1] = start(1, job, program);
  ASSERT_TRUE(commands[1].saw("step 1")) << commands[0].error() << commands[1].error();
  std::ofstream(folder / "stop") << "";
  const auto outcomes = expect_all(commands, 0);
  EXPECT_EQ(count_of(outcomes[0].output, "gathered 0 1"), 2) << outcomes[0].text();
}

TEST_F(LaunchHosts, BlameNoErrorOfAnEarlierRound) {
  // Told to end for a new round, the worker of the first machine writes an error down; in the next
  // round it is killed, which has nothing to do with that.
  make(2);
  Folder folder;
  std::ofstream(folder / "program.sh")
      << "if [ \"$WORLD_SIZE\" = 1 ]; then\n"
         "  trap 'echo \"{\\\"message\\\": {\\\"message\\\": \\\"old news\\\", "
         "\\\"extraInfo\\\": {\\\"timestamp\\\": \\\"1\\\"}}}\" "
         "> \"$TORCHELASTIC_ERROR_FILE\"; echo written; exit 1' TERM\n"
         "  echo alone; while :; do sleep 0.05; done\n"
         "fi\n"
         "[ \"$1\" = first ] && kill -9 $$\n"
         "sleep 30\n";
  const Job job{.machines = "1:2", .backend = "c10d"};
  auto first = start(0, job, {"/bin/sh", folder / "program.sh", "first"});
  ASSERT_TRUE(first.saw("alone")) << first.error();
  auto second = start(1, job, {"/bin/sh", folder / "program.sh", "second"});
  const auto outcome = first.wait();
  expect_clean_end(outcome, 137);
  EXPECT_TRUE(contains(outcome.output, "written")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "SIGKILL")) << outcome.text();
  EXPECT_FALSE(contains(outcome.error, "old news")) << outcome.text();
  expect_clean_end(second.wait(), 137);
  expect_nothing_left();
}

TEST_F(LaunchHosts, StillFailWhenAWorkerOfAnElasticJobFails) {
  make(2);
  auto commands = start_all({.backend = "c10d"}, probe({"1:exit=6", "wait"}));
  const auto outcomes = expect_all(commands, 6, Seconds(10));
  EXPECT_TRUE(contains(outcomes[0].error, "host      : n2")) << outcomes[0].text();
}

}  // namespace
}  // namespace accelerate::test
