// `accelerate launch` on one machine, with real processes: what workers are given, how failures end
// a run, restarts, ports, and that nothing is left.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "launch/launching.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What each worker said about itself with "json", by rank.
std::map<int, json> facts_of(const Outcome& outcome) {
  std::map<int, json> facts;
  for (const auto& line : lines_of(outcome.output)) {
    const auto begin = line.find('{');
    if (begin == std::string::npos) continue;
    const auto fact = json::parse(line.substr(begin), nullptr, false);
    if (fact.is_discarded()) continue;
    facts[std::stoi(fact["environment"].value("RANK", "-1"))] = fact;
  }
  return facts;
}

// A port that somebody else has, as long as this lives.
class TakenPort {
 public:
  TakenPort() : fd_(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(fd_, 1), 0);
    EXPECT_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    number = ntohs(address.sin6_port);
  }
  ~TakenPort() { ::close(fd_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;

  int number = 0;

 private:
  int fd_;
};

std::string script(const Folder& folder, const std::string& name, const std::string& text) {
  const std::string path = folder / name;
  std::ofstream(path) << text;
  fs::permissions(path, fs::perms::owner_all);
  return path;
}

// ---- starting -----------------------------------------------------------------------------------

TEST(Launch, GivesEachWorkerItsPlace) {
  const auto outcome = run(launch(3, {}, probe({"json"})));
  expect_clean_end(outcome, 0);
  const auto facts = facts_of(outcome);
  ASSERT_EQ(facts.size(), 3U) << outcome.text();
  const std::string port = facts.at(0)["environment"]["MASTER_PORT"];
  EXPECT_GT(std::stoi(port), 0);
  for (const auto& [rank, fact] : facts) {
    const std::string own = std::to_string(rank);
    const auto& environment = fact["environment"];
    const std::map<std::string, std::string> expected = {{"RANK", own},
                                                         {"LOCAL_RANK", own},
                                                         {"ROLE_RANK", own},
                                                         {"WORLD_SIZE", "3"},
                                                         {"LOCAL_WORLD_SIZE", "3"},
                                                         {"ROLE_WORLD_SIZE", "3"},
                                                         {"GROUP_RANK", "0"},
                                                         {"GROUP_WORLD_SIZE", "1"},
                                                         {"ROLE_NAME", "default"},
                                                         {"MASTER_ADDR", "127.0.0.1"},
                                                         {"MASTER_PORT", port},
                                                         {"OMP_NUM_THREADS", "1"},
                                                         {"TORCHELASTIC_RESTART_COUNT", "0"},
                                                         {"TORCHELASTIC_MAX_RESTARTS", "0"},
                                                         {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
                                                         {"ACCELERATE_USE_CPU", "True"},
                                                         {"ACCELERATE_MIXED_PRECISION", "no"}};
    for (const auto& [name, value] : expected) {
      EXPECT_EQ(environment.value(name, "(unset)"), value) << name << " of rank " << rank;
    }
    EXPECT_NE(environment.value("TORCHELASTIC_RUN_ID", ""), "");
    EXPECT_NE(environment.value("TORCHELASTIC_ERROR_FILE", ""), "");
  }
}

TEST(Launch, PassesArgumentsOnAsTheyAre) {
  const Words odd = {"say=two words", "say=\"quoted\" and 'quoted'", "say=$HOME `x` *",
                     "say=", "json"};
  const auto outcome = run(launch(2, {}, probe(odd)));
  expect_clean_end(outcome, 0);
  for (const auto& [rank, fact] : facts_of(outcome)) EXPECT_EQ(fact["arguments"], json(odd));
}

TEST(Launch, DoesNotReadWhatFollowsTheProgram) {
  // These are flags of the launcher, too.
  const auto outcome = run(launch(2, {}, {"/bin/echo", "--num_processes", "7", "--help", "-m"}));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"--num_processes 7 --help -m", "[default1]:--num_processes 7 --help -m"}));
}

TEST(Launch, ReplacesTheLocalRankInArguments) {
  const auto outcome = run(launch(2, {}, probe({"say=I am ${local_rank}"})));
  EXPECT_EQ(sorted_lines(outcome.output), (Words{"I am 0", "[default1]:I am 1"})) << outcome.text();
}

TEST(Launch, KeepsTheRestOfTheEnvironmentAndTheFolder) {
  Folder folder;
  auto options = launch(2, {}, probe({"json"}));
  options.environment = {{"http_proxy", "a"}, {"Mixed_Case", "b c"}, {"EMPTY", ""}};
  options.working_directory = folder.path();
  const auto outcome = run(options);
  const auto facts = facts_of(outcome);
  ASSERT_EQ(facts.size(), 2U) << outcome.text();
  for (const auto& [rank, fact] : facts) {
    EXPECT_EQ(fact["environment"]["http_proxy"], "a");
    EXPECT_FALSE(fact["environment"].contains("HTTP_PROXY"));
    EXPECT_EQ(fact["environment"]["Mixed_Case"], "b c");
    EXPECT_EQ(fact["environment"]["EMPTY"], "");
    EXPECT_EQ(fact["folder"], fs::canonical(folder.path()).string());
  }
}

// Of all processes together. Those from 32 on are the C library's and our caller's business.
std::uint64_t ignored_signals(const std::string& output) {
  std::uint64_t ignored = 0;
  for (const auto& line : lines_of(output)) {
    if (contains(line, "SigIgn:"))
      ignored |= std::stoull(rest_of_line(line, "SigIgn:"), nullptr, 16);
  }
  return ignored & 0x7fffffffU;
}

TEST(Launch, GivesEachWorkerASessionOfItsOwnAndNothingOfTheLaunchers) {
  const auto outcome = run(launch(2, {}, probe({"json", "signals", "descriptors"})));
  expect_clean_end(outcome, 0);
  for (const auto& [rank, fact] : facts_of(outcome)) {
    EXPECT_EQ(fact["session"], fact["pid"]);
    EXPECT_EQ(fact["group"], fact["pid"]);
  }
  EXPECT_EQ(count_of(outcome.output, "signals: SigBlk:0000000000000000 SigIgn:"), 2)
      << outcome.text();
  EXPECT_EQ(ignored_signals(outcome.output), 0U) << outcome.text();
  for (const auto& line : lines_of(outcome.output)) {
    if (!contains(line, "descriptors:")) continue;
    EXPECT_FALSE(contains(line, " 3=")) << "an open descriptor went along: " << line;
  }
}

TEST(Launch, BecomesTheProgramWhenThereIsOneProcess) {
  Command command(launch(1, {}, probe({"json", "signals", "exit=7"})));
  const auto outcome = command.wait();
  expect_clean_end(outcome, 7);
  const auto fact = json::parse(lines_of(outcome.output).at(0));
  EXPECT_EQ(fact["pid"], command.pid());
  EXPECT_FALSE(fact["environment"].contains("RANK"));
  EXPECT_EQ(fact["environment"]["ACCELERATE_USE_CPU"], "True");
  EXPECT_TRUE(contains(outcome.output, "SigBlk:0000000000000000 SigIgn:")) << outcome.text();
  EXPECT_EQ(ignored_signals(outcome.output), 0U) << outcome.text();
}

TEST(Launch, ReplacesTheLocalRankForASingleProcessToo) {
  EXPECT_EQ(run(launch(1, {}, probe({"say=I am ${local_rank}"}))).output, "I am 0\n");
}

TEST(Launch, RestartsAndLogsASingleProcess) {
  Folder logs;
  const auto outcome = run(
      launch(1, {"--max_restarts", "2", "--tee", "3", "--log_dir", logs.path().string()},
             worker({"env=TORCHELASTIC_RESTART_COUNT", "flaky=2", "join", "gather", "exit=3"})));
  expect_clean_end(outcome, 3);
  EXPECT_TRUE(contains(outcome.error, "restart 2 of 2")) << outcome.text();
  EXPECT_TRUE(contains(outcome.output, "gathered 0")) << outcome.text();
  ASSERT_FALSE(fs::is_empty(logs.path()));
  const auto run_folder = fs::directory_iterator(logs.path())->path();
  for (const std::string attempt : {"attempt_0", "attempt_1", "attempt_2"}) {
    EXPECT_TRUE(fs::exists(run_folder / attempt / "0" / "stdout.log")) << attempt;
  }
}

TEST(Launch, EndsInTimeWhenItsStreamsAreClosed) {
  Folder folder;
  const auto line =
      launch_words(2, {}, probe({"say=out", "err=err", "ready=" + folder / "ran", "1:exit=3"}));
  const auto outcome =
      run({.argv = Words{"/bin/sh", "-c", "exec \"$@\" <&- >&- 2>&-", "sh"} + line});
  expect_clean_end(outcome, 3);
  EXPECT_LT(outcome.seconds, patient(Seconds(5)).count());
  EXPECT_TRUE(fs::exists(folder / "ran.1"));
}

TEST(Launch, StartsNothingWhenTheProgramCannotRun) {
  Folder folder;
  std::ofstream(folder / "plain") << "no program";
  for (const auto& [program, word] : std::map<std::string, std::string>{
           {folder / "missing", "missing"}, {folder / "plain", "plain"}, {folder / "", "folder"}}) {
    const auto outcome = run(launch(2, {}, {program}));
    expect_clean_end(outcome, 2);
    EXPECT_TRUE(contains(outcome.error, "accelerate: ")) << outcome.text();
    EXPECT_TRUE(contains(outcome.error, word)) << outcome.text();
    EXPECT_LT(outcome.seconds, patient(Seconds(2)).count());
  }
}

// ---- the group ----------------------------------------------------------------------------------

TEST(Launch, LetsAWorldMeetOnTheSocketThatItHandsToRankZero) {
  Folder folder;
  Command command(launch(
      3, {},
      worker({"env=TORCHELASTIC_USE_AGENT_STORE,MASTER_PORT", "env=ACCELERATE_MASTER_LISTEN_FD",
              "join", "gather", "say=met", "until=" + folder / "stop"})));
  ASSERT_TRUE(command.saw("met", 3)) << command.wait(Seconds(0)).text();
  const int port = std::stoi(rest_of_line(command.output(), "AGENT_STORE=False MASTER_PORT="));
  EXPECT_TRUE(is_listening(port));
  EXPECT_EQ(count_of(command.output(), "ACCELERATE_MASTER_LISTEN_FD=(unset)"), 2)
      << command.output();
  // Launcher, guard and three workers: nobody else serves the store.
  EXPECT_LE(command.processes().size(), 5U);
  std::ofstream(folder / "stop") << "";
  const auto outcome = command.wait();
  expect_clean_end(outcome, 0);
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1 2"), 3) << outcome.text();
  EXPECT_FALSE(is_listening(port));
}

TEST(Launch, ServesTheStoreItselfForProgramsThatCannotTakeTheSocket) {
  Folder folder;
  const auto wrapper = script(folder, "wrapper.sh", "#!/bin/sh\nexec \"$@\"\n");
  const auto outcome = run(launch(2, {},
                                  Words{wrapper} + worker({"env=TORCHELASTIC_USE_AGENT_STORE",
                                                           "env=ACCELERATE_MASTER_LISTEN_FD",
                                                           "env=MASTER_PORT", "join", "gather"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(count_of(outcome.output, "TORCHELASTIC_USE_AGENT_STORE=True"), 2) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "ACCELERATE_MASTER_LISTEN_FD=(unset)"), 2) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1"), 2) << outcome.text();
  EXPECT_FALSE(is_listening(std::stoi("0" + rest_of_line(outcome.output, "MASTER_PORT="))));
}

// ---- ports --------------------------------------------------------------------------------------

TEST(LaunchPort, IsTheOneThatWasAskedFor) {
  int port = 0;
  {
    port = TakenPort().number;
  }  // free again
  const auto outcome =
      run(launch(2, {"--main_process_port", std::to_string(port)}, probe({"env=MASTER_PORT"})));
  expect_clean_end(outcome, 0);
  const std::string line = "MASTER_PORT=" + std::to_string(port);
  EXPECT_EQ(sorted_lines(outcome.output), (Words{line, "[default1]:" + line}));
}

TEST(LaunchPort, IsAnotherOneWithAWarningWhenItIsTakenOnASingleMachine) {
  const TakenPort taken;
  const std::string number = std::to_string(taken.number);
  const auto outcome = run(
      launch(2, {"--main_process_port", number}, worker({"env=MASTER_PORT", "join", "gather"})));
  expect_clean_end(outcome, 0);
  EXPECT_TRUE(contains(outcome.error, number)) << outcome.text();
  EXPECT_FALSE(contains(outcome.output, "MASTER_PORT=" + number)) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1"), 2) << outcome.text();
}

TEST(LaunchPort, IsAnErrorThatNamesItWhenItIsTakenOnTheFirstOfSeveralMachines) {
  const TakenPort taken;
  const std::string number = std::to_string(taken.number);
  const auto outcome = run(launch(2,
                                  {"--num_machines", "2", "--machine_rank", "0",
                                   "--main_process_ip", "127.0.0.1", "--main_process_port", number},
                                  probe({"say=started"})));
  EXPECT_FALSE(outcome.timed_out) << outcome.text();
  EXPECT_NE(outcome.code, 0) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, number)) << outcome.text();
  EXPECT_FALSE(contains(outcome.output, "started")) << outcome.text();
  EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
}

// ---- failures -----------------------------------------------------------------------------------

TEST(LaunchFailure, PassesTheCodeOfTheFailedRankOnAndEndsTheOthers) {
  const auto outcome =
      run(launch(3, {}, probe({"trap=0", "1:sleep=0.2", "1:err=the reason", "1:exit=3", "wait"})));
  expect_clean_end(outcome, 3);
  EXPECT_LT(outcome.seconds, patient(Seconds(3)).count());
  EXPECT_TRUE(contains(outcome.error, "launch_probe FAILED")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "rank      : 1 (local_rank: 1)")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "exitcode  : 3 (pid: ")) << outcome.text();
  const auto report = outcome.error.substr(outcome.error.find("FAILED"));
  EXPECT_TRUE(contains(report, "the reason")) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "caught SIGTERM"), 2) << outcome.text();
}

TEST(LaunchFailure, WithTheCodeOfWrongInputHasAReport) {
  const auto outcome = run(launch(2, {}, probe({"1:exit=2", "wait"})));
  expect_clean_end(outcome, 2);
  EXPECT_TRUE(contains(outcome.error, "launch_probe FAILED")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "rank      : 1 (local_rank: 1)")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "exitcode  : 2 (pid: ")) << outcome.text();
}

TEST(LaunchFailure, NamesTheScriptAndNotItsInterpreter) {
  Folder folder;
  const auto path =
      script(folder, "train.py", "import os, sys\nsys.exit(int(os.environ['RANK']))\n");
  const auto outcome = run(launch(2, {}, {path}));
  expect_clean_end(outcome, 1);
  EXPECT_TRUE(contains(outcome.error, "\n" + path + " FAILED\n")) << outcome.text();
}

TEST(LaunchFailure, ShowsTheSignalThatEndedAWorker) {
  const auto outcome = run(launch(2, {}, probe({"1:signal=SIGSEGV", "wait"})));
  expect_clean_end(outcome, 128 + SIGSEGV);
  EXPECT_TRUE(contains(outcome.error, "exitcode  : -11 (pid: ")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "SIGSEGV")) << outcome.text();
}

TEST(LaunchFailure, SaysThatAWorkerWasKilled) {
  Folder folder;
  Command command(launch(2, {}, probe({"ready=" + folder / "ready", "say=up", "wait"})));
  ASSERT_TRUE(command.saw("up", 2));
  pid_t victim = 0;
  std::ifstream(folder / "ready.0") >> victim;
  ::kill(victim, SIGKILL);
  const auto outcome = command.wait();
  expect_clean_end(outcome, 137);
  EXPECT_TRUE(contains(outcome.error, "rank      : 0 (local_rank: 0)")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "SIGKILL")) << outcome.text();
}

TEST(LaunchFailure, ShowsTheFirstOneFirst) {
  // Rank 2 fails; rank 0, told to end, fails too, with another code.
  const auto outcome = run(launch(3, {}, probe({"2:sleep=0.2", "2:exit=9", "0:trap=5", "wait"})));
  expect_clean_end(outcome, 9);
  const auto first = outcome.error.find("rank      : 2");
  const auto other = outcome.error.find("rank 0 (local_rank: 0)");
  ASSERT_NE(first, std::string::npos) << outcome.text();
  ASSERT_NE(other, std::string::npos) << outcome.text();
  EXPECT_LT(first, other);
}

TEST(LaunchFailure, NamesTheRankThatThrewAndNotTheOnesThatLostIt) {
  // While rank 1 throws, the others wait for it in a collective and fail for want of it.
  const auto outcome =
      run(launch(3, {}, worker({"join", "sum", "1:throw=the loss is NaN", "sum", "wait"})));
  expect_clean_end(outcome, 1);
  EXPECT_TRUE(contains(outcome.error, "rank      : 1 (local_rank: 1)")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "message   : ")) << outcome.text();
  const auto root = outcome.error.substr(outcome.error.find("Root cause"));
  EXPECT_TRUE(contains(root.substr(0, root.find("Other")), "the loss is NaN")) << outcome.text();
}

TEST(LaunchFailure, LetsNoRankDieOfABrokenPipeToAnother) {
  // Gloo writes to connections whose other end may be gone. Python ignores the signal for it; a
  // native program must too, or its end is a riddle (SIGPIPE) in place of an error that can be
  // read.
  const auto outcome = run(launch(2, {}, worker({"join", "signals"})));
  expect_clean_end(outcome, 0);
  for (const auto& line : lines_of(outcome.output)) {
    const auto ignored = std::stoull(rest_of_line(line, "SigIgn:"), nullptr, 16);
    EXPECT_NE(ignored & (1ULL << (SIGPIPE - 1)), 0U) << line;
  }
}

TEST(LaunchFailure, NamesTheRankThatAllBlameAndWaitsForNobodyElse) {
  const auto outcome =
      run(launch(3, {}, probe({"err=accelerate: rank 2 is in another collective", "exit=70"})));
  expect_clean_end(outcome, 70);
  EXPECT_LT(outcome.seconds, patient(Seconds(1.5)).count()) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "  rank      : 2 (local_rank: 2)\n")) << outcome.text();
  EXPECT_EQ(count_of(outcome.error, ", because of rank 2\n"), 2) << outcome.text();
}

TEST(LaunchFailure, WaitsForNobodyWhenTheLastRankEndsWellAfterAFailure) {
  const auto outcome = run(launch(
      2, {},
      probe({"1:err=accelerate: rank 0 is in another collective", "1:exit=70", "sleep=0.3"})));
  expect_clean_end(outcome, 70);
  EXPECT_LT(outcome.seconds, patient(Seconds(1.5)).count()) << outcome.text();
}

TEST(LaunchFailure, ShowsWhereAKilledRankWasAsAnotherTells) {
  const auto outcome =
      run(launch(2, {},
                 probe({"1:signal=SIGKILL", "sleep=0.2",
                        "err=accelerate: rank 1 died in gather at a.cpp:3", "exit=70"})));
  expect_clean_end(outcome, 137);
  EXPECT_TRUE(contains(outcome.error, "Rank 0 reports: rank 1 died in gather at a.cpp:3"))
      << outcome.text();
}

TEST(LaunchFailure, LeavesTheErrorFileInTheLogFolder) {
  Folder logs;
  const auto outcome = run(
      launch(2, {"--log_dir", logs.path().string()}, worker({"1:throw=the disk is full", "wait"})));
  expect_clean_end(outcome, 1);
  const std::string file = rest_of_line(outcome.error, "error_file: ");
  ASSERT_TRUE(file.ends_with("/attempt_0/1/error.json")) << outcome.text();
  std::ifstream stream(file);
  const auto error = json::parse(stream);
  EXPECT_TRUE(contains(error["message"]["message"].get<std::string>(), "the disk is full"));
}

TEST(LaunchFailure, KillsWhoDoesNotEndInTime) {
  const auto outcome = run(launch(2, {"--shutdown_timeout", "1"},
                                  probe({"0:ignore=SIGTERM", "1:sleep=0.2", "1:exit=3", "wait"})));
  expect_clean_end(outcome, 3);
  EXPECT_GT(outcome.seconds, 1);
  EXPECT_LT(outcome.seconds, patient(Seconds(4)).count());
}

TEST(LaunchFailure, IsNotTalkedAboutWhenQuiet) {
  const auto outcome = run(launch(2, {"--quiet"}, probe({"1:exit=3", "wait"})));
  expect_clean_end(outcome, 3);
  EXPECT_EQ(outcome.error, "");
}

TEST(LaunchFailure, EndsGrandchildrenThatStayedInTheGroup) {
  const auto outcome = run(launch(2, {}, probe({"grandchild", "1:sleep=0.1", "1:exit=3", "wait"})));
  expect_clean_end(outcome, 3);
  EXPECT_EQ(count_of(outcome.output, "grandchild "), 2);
}

TEST(Launch, EndsGrandchildrenThatOutliveTheirWorkerAndDoesNotWaitForThem) {
  const auto outcome = run(launch(2, {}, probe({"grandchild"})));
  expect_clean_end(outcome, 0);
  EXPECT_LT(outcome.seconds, patient(Seconds(3)).count());
}

// ---- restarts -----------------------------------------------------------------------------------

TEST(LaunchRestart, StartsTheWholeGroupAnewWithTheCount) {
  const auto outcome = run(launch(2, {"--max_restarts", "3"},
                                  probe({"env=TORCHELASTIC_RESTART_COUNT,TORCHELASTIC_MAX_RESTARTS",
                                         "1:flaky=2", "0:flaky=2", "say=done"})));
  expect_clean_end(outcome, 0);
  for (const std::string count : {"0", "1", "2"}) {
    EXPECT_GE(count_of(outcome.output,
                       "TORCHELASTIC_RESTART_COUNT=" + count + " TORCHELASTIC_MAX_RESTARTS=3"),
              1)
        << outcome.text();
  }
  EXPECT_EQ(count_of(outcome.output, "done"), 2) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "restart 1 of 3")) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "restart 2 of 3")) << outcome.text();
}

TEST(LaunchRestart, EndsWithTheFailureWhenNoneIsLeft) {
  const auto outcome =
      run(launch(2, {"--max_restarts", "1"}, probe({"1:say=try", "1:exit=4", "wait"})));
  expect_clean_end(outcome, 4);
  EXPECT_EQ(count_of(outcome.output, "try"), 2) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "FAILED")) << outcome.text();
}

TEST(LaunchRestart, GivesEveryAttemptANewGroup) {
  const auto outcome = run(launch(2, {"--max_restarts", "2"},
                                  worker({"join", "sum", "1:flaky=2", "gather", "say=done"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1"), 2) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "sum 2"), 6) << outcome.text();
}

TEST(LaunchRestart, GivesProgramsWithAnAgentStoreANewGroupToo) {
  Folder folder;
  const auto wrapper = script(folder, "wrapper.sh", "#!/bin/sh\nexec \"$@\"\n");
  const auto outcome = run(
      launch(2, {"--max_restarts", "1"}, Words{wrapper} + worker({"join", "1:flaky=1", "gather"})));
  expect_clean_end(outcome, 0);
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1"), 2) << outcome.text();
}

// ---- engines

TEST(LaunchedEngines, ReachAnUnchangedProgramOnTheCpu) {
  const auto fsdp =
      run(launch(2,
                 {"--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy",
                  "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block"},
                 worker({"engine"})));
  expect_clean_end(fsdp, 0);
  EXPECT_TRUE(contains(fsdp.output, "engine FSDP 2 Block")) << fsdp.text();
  const auto fields =
      run(launch(2, {"--use_deepspeed", "--zero_stage", "3", "--gradient_clipping", "0.5"},
                 worker({"engine"})));
  expect_clean_end(fields, 0);
  EXPECT_TRUE(contains(fields.output, "engine DEEPSPEED 3 0.5")) << fields.text();
}

TEST(LaunchedEngines, TrainAnUnchangedProgram) {
  const auto trained = [](const Words& flags) {
    const auto result = run(launch(2, flags, worker({"train"})));
    expect_clean_end(result, 0);
    const auto at = result.output.find("trained ");
    EXPECT_NE(at, std::string::npos) << result.text();
    return at == std::string::npos ? ""
                                   : result.output.substr(at, result.output.find('\n', at) - at);
  };
  const auto wanted = trained({});
  EXPECT_EQ(trained({"--use_fsdp", "--fsdp_version", "2"}), wanted);
  EXPECT_EQ(trained({"--use_deepspeed", "--zero_stage", "3"}), wanted);
}

TEST(LaunchedEngines, DivideTheProcesses) {
  const Folder folder;
  std::ofstream(folder / "sizes.yaml") << "compute_environment: LOCAL_MACHINE\n"
                                          "distributed_type: MULTI_CPU\nuse_cpu: true\n"
                                          "parallelism_config:\n"
                                          "  parallelism_config_tp_size: 2\n";
  const auto expect_mesh = [](const Words& flags, const char* mesh) {
    const auto outcome = run(launch(2, flags, worker({"mesh"})));
    expect_clean_end(outcome, 0);
    EXPECT_EQ(count_of(outcome.output, mesh), 2) << outcome.text();
  };
  expect_mesh({"--use_parallelism_config", "--parallelism_config_pp_size", "2"}, "mesh pp 2");
  expect_mesh({"--use_megatron_lm", "--megatron_lm_pp_degree", "2"}, "mesh pp 2");
  expect_mesh({"--config_file", folder / "sizes.yaml"}, "mesh tp 2");
}

TEST(LaunchedEngines, TrainACutModel) {
  const auto trained = [](const std::string& mode, const Words& flags, const Words& settings) {
    const Folder folder;
    const auto program = Words{built("tests/cut_program"), "folder=" + folder.path().string(),
                               "mode=" + mode, "rows=12"} +
                         settings;
    expect_clean_end(run(launch(2, flags, program)), 0);
    std::ifstream file(folder / "trace.0");
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const std::string mode : {"tp", "pp", "cp", "sp"}) {
    const auto wanted = trained(mode, {}, {});
    EXPECT_EQ(std::ranges::count(wanted, '\n'), 6) << mode;
    EXPECT_EQ(
        trained(mode, {"--use_parallelism_config", "--parallelism_config_" + mode + "_size", "2"},
                {"launched=1"}),
        wanted)
        << mode;
  }
}

TEST(LaunchedEngines, TakeADeepSpeedFile) {
  const Folder folder;
  std::ofstream(folder / "zero.json")
      << R"({"gradient_clipping": 0.25, "zero_optimization": {"stage": 1}})";
  const Words flags{"--use_deepspeed", "--deepspeed_config_file", folder / "zero.json"};
  const auto file = run(launch(2, flags, worker({"engine"})));
  expect_clean_end(file, 0);
  EXPECT_TRUE(contains(file.output, "engine DEEPSPEED 1 0.25")) << file.text();
  std::ofstream(folder / "zero.json") << R"({"zero_optimisation": {"stage": 1}})";
  const auto wrong = run(launch(2, flags, worker({"engine"})));
  EXPECT_NE(wrong.code, 0);
  EXPECT_TRUE(contains(wrong.text(), "has no 'zero_optimization' section")) << wrong.text();
}

}  // namespace
}  // namespace accelerate::test
