#include "launch/coordinator.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>

namespace accelerate::detail::launch {
namespace {

using namespace std::chrono_literals;
using Order = Coordinator::Order;
using Kind = AgentMessage::Kind;
using Orders = std::vector<Order>;

constexpr Coordinator::Clock::time_point kStartOfTime{};

Member machine(int rank, const std::string& host = "", const std::string& terms = "same") {
  const auto name = host.empty() ? "host" + std::to_string(rank) : host;
  return {.machine_rank = rank,
          .nproc = 2,
          .host = name,
          .address = "10.0.0." + std::to_string(rank + 1),
          .terms = terms};
}

WorkerFailure failure(int rank, int code) {
  WorkerFailure result;
  result.rank = rank;
  result.host = "host" + std::to_string(rank / 2);
  result.status = {.code = code, .signal = 0};
  result.time_us = 1000 + rank;
  return result;
}

CoordinatorRules fixed(int machines, int restarts = 0) {
  return {.min_nodes = machines, .max_nodes = machines, .fixed = true, .max_restarts = restarts};
}

CoordinatorRules elastic(int least, int most, int restarts = 0) {
  return {.min_nodes = least, .max_nodes = most, .fixed = false, .max_restarts = restarts};
}

// "0 start, 1 stop": to whom and what, without the notices.
std::string shown(const Orders& orders) {
  std::string text;
  for (const auto& order : orders) {
    if (order.message.kind == Kind::kNotice) continue;
    const char* name = order.message.kind == Kind::kStart  ? "start"
                       : order.message.kind == Kind::kStop ? "stop"
                                                           : "end";
    text += (text.empty() ? "" : ", ") + std::to_string(order.to) + " " + name;
  }
  return text;
}

// A coordinator whose machines are 0, 1, ... under these ids and run their first round.
Coordinator running(const CoordinatorRules& rules, int machines) {
  Coordinator coordinator(rules, kStartOfTime);
  for (int i = 0; i < machines; ++i) {
    (void)coordinator.join(i, machine(i), kStartOfTime);
  }
  (void)coordinator.tick(kStartOfTime + rules.last_call);
  return coordinator;
}

TEST(Coordinator, StartsWhenAllMachinesAreHereAndNumbersTheirRanks) {
  Coordinator coordinator(fixed(2), kStartOfTime);
  EXPECT_EQ(shown(coordinator.join(0, machine(1), kStartOfTime)), "");
  const auto orders = coordinator.join(1, machine(0), kStartOfTime);
  ASSERT_EQ(shown(orders), "1 start, 0 start");
  EXPECT_EQ(orders[0].message.round, (LaunchRound{.nodes = 2, .first_rank = 0, .world_size = 4}));
  EXPECT_EQ(orders[1].message.round,
            (LaunchRound{.node_rank = 1, .nodes = 2, .first_rank = 2, .world_size = 4}));
}

TEST(Coordinator, EndsWellWhenAllMachinesAreDone) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.succeeded(0, kStartOfTime)), "");
  const auto orders = coordinator.succeeded(1, kStartOfTime);
  EXPECT_EQ(shown(orders), "0 end, 1 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 0);
}

TEST(Coordinator, NamesBothMachinesThatSayTheyAreTheSameOne) {
  Coordinator coordinator(fixed(3), kStartOfTime);
  (void)coordinator.join(0, machine(0), kStartOfTime);
  (void)coordinator.join(1, machine(1, "red"), kStartOfTime);
  const auto orders = coordinator.join(2, machine(1, "blue"), kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end, 1 end, 2 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 2);
  EXPECT_EQ(
      orders[0].message.verdict.reason,
      "two machines say that they are number 1: red (10.0.0.2) and blue (10.0.0.2). Give each "
      "machine its own --machine_rank, from 0 to 2.");
}

TEST(Coordinator, RefusesAMachineThatWasToldSomethingElse) {
  Coordinator coordinator(fixed(2), kStartOfTime);
  (void)coordinator.join(0, machine(0), kStartOfTime);
  const auto orders = coordinator.join(1, machine(1, "", "--num_machines 3"), kStartOfTime);
  ASSERT_EQ(shown(orders), "1 end");
  EXPECT_NE(orders[0].message.verdict.reason.find("started with --num_machines 3"),
            std::string::npos);
  EXPECT_TRUE(coordinator.gathering());
}

TEST(Coordinator, RefusesARankThatTheJobDoesNotHave) {
  Coordinator coordinator(fixed(2), kStartOfTime);
  const auto orders = coordinator.join(0, machine(2), kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_NE(orders[0].message.verdict.reason.find("--machine_rank is 2"), std::string::npos);
}

TEST(Coordinator, NamesTheMachinesThatNeverCome) {
  Coordinator coordinator(fixed(3), kStartOfTime);
  (void)coordinator.join(0, machine(0), kStartOfTime);
  EXPECT_EQ(coordinator.next_event(), kStartOfTime + 900s);
  EXPECT_EQ(shown(coordinator.tick(kStartOfTime + 899s)), "");
  const auto orders = coordinator.tick(kStartOfTime + 900s);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_NE(orders[0].message.verdict.reason.find(
                "1 of 3 machines arrived within 900 s; missing: machine 1, machine 2"),
            std::string::npos);
  EXPECT_EQ(orders[0].message.verdict.exit_code, 1);
}

TEST(Coordinator, SaysHowLongItWaitedToTheFraction) {
  auto rules = fixed(2);
  rules.join_timeout = 400ms;
  Coordinator coordinator(rules, kStartOfTime);
  (void)coordinator.join(0, machine(0), kStartOfTime);
  const auto orders = coordinator.tick(kStartOfTime + 400ms);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_NE(orders[0].message.verdict.reason.find("arrived within 0.4 s"), std::string::npos);
}

TEST(Coordinator, StopsAllAndPassesOnTheCodeOfTheWorkerThatFailed) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.failed(1, failure(3, 9), kStartOfTime)), "0 stop, 1 stop");
  auto ended_by_us = failure(0, 0);
  ended_by_us.status = {.code = -1, .signal = 15};
  ended_by_us.terminated_by_launcher = true;
  EXPECT_EQ(shown(coordinator.stopped(0, {ended_by_us}, kStartOfTime)), "");
  const auto orders = coordinator.stopped(1, {}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end, 1 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 9);
  ASSERT_EQ(orders[0].message.verdict.failures.size(), 2U);
  EXPECT_EQ(orders[0].message.verdict.failures[0].rank, 3);
  EXPECT_TRUE(orders[0].message.verdict.failures[1].terminated_by_launcher);
}

TEST(Coordinator, WaitsForTheCulpritWhenAWorkerHasOnlyLostItsPeers) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.failed(0, failure(0, 70), kStartOfTime)), "");
  EXPECT_EQ(coordinator.next_event(), kStartOfTime + 2s);
  EXPECT_EQ(shown(coordinator.failed(1, failure(2, 5), kStartOfTime + 1s)), "0 stop, 1 stop");
  (void)coordinator.stopped(0, {}, kStartOfTime + 1s);
  EXPECT_EQ(coordinator.stopped(1, {}, kStartOfTime + 1s).front().message.verdict.exit_code, 5);
}

TEST(Coordinator, BlamesTheOneThatLostItsPeersWhenNobodyElseFails) {
  auto coordinator = running(fixed(2), 2);
  (void)coordinator.failed(0, failure(0, 70), kStartOfTime);
  EXPECT_EQ(shown(coordinator.tick(kStartOfTime + 2s)), "0 stop, 1 stop");
}

TEST(Coordinator, WaitsForNobodyWhenAllWorkersHaveEnded) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.failed(0, failure(0, 70), kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.failed(0, failure(1, 70), kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.all_ended(0, kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.failed(1, failure(2, 70), kStartOfTime)), "");
  // Rank 3 ended with 0.
  EXPECT_EQ(shown(coordinator.all_ended(1, kStartOfTime)), "0 stop, 1 stop");
}

TEST(Coordinator, WaitsForNobodyWhenTheOtherMachinesHaveSucceeded) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.failed(0, failure(0, 70), kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.all_ended(0, kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.succeeded(1, kStartOfTime)), "0 stop, 1 stop");
}

TEST(Coordinator, GivesSurvivorsHalfASecondToTellWhereAWorkerWasKilled) {
  auto killed = failure(0, 0);
  killed.status = {.code = -1, .signal = 9};
  auto silent = running(fixed(2), 2);
  EXPECT_EQ(shown(silent.failed(0, killed, kStartOfTime)), "");
  EXPECT_EQ(silent.next_event(), kStartOfTime + 500ms);
  EXPECT_EQ(shown(silent.tick(kStartOfTime + 500ms)), "0 stop, 1 stop");
  auto told = running(fixed(2), 2);
  EXPECT_EQ(shown(told.failed(0, killed, kStartOfTime)), "");
  EXPECT_EQ(shown(told.failed(1, failure(2, 70), kStartOfTime + 10ms)), "0 stop, 1 stop");
  (void)told.stopped(0, {}, kStartOfTime + 10ms);
  EXPECT_EQ(told.stopped(1, {}, kStartOfTime + 10ms).front().message.verdict.exit_code, 137);
  auto alone = running(fixed(1), 1);
  EXPECT_EQ(shown(alone.failed(0, killed, kStartOfTime)), "");
  EXPECT_EQ(shown(alone.all_ended(0, kStartOfTime)), "0 stop");
}

WorkerFailure ended_by_us(int rank, ExitStatus status) {
  auto result = failure(rank, 0);
  result.status = status;
  result.terminated_by_launcher = true;
  return result;
}

// All four workers of two machines save their state and end with 75.
void preempt_all(Coordinator& coordinator) {
  for (const int rank : {3, 0, 1, 2}) {
    EXPECT_EQ(shown(coordinator.failed(rank / 2, failure(rank, 75), kStartOfTime)), "");
  }
  EXPECT_EQ(shown(coordinator.all_ended(0, kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.all_ended(1, kStartOfTime)), "0 stop, 1 stop");
  (void)coordinator.stopped(0, {}, kStartOfTime);
}

TEST(Coordinator, LetsThePeersOfAPreemptedWorkerEndByThemselves) {
  auto coordinator = running(fixed(2), 2);
  preempt_all(coordinator);
  const auto orders = coordinator.stopped(1, {}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end, 1 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 75);
}

TEST(Coordinator, DoesNotCallItPreemptedIfAWorkerHasNotSavedInTime) {
  for (const bool saves : {true, false}) {
    auto coordinator = running(fixed(1), 1);
    EXPECT_EQ(shown(coordinator.failed(0, failure(1, 75), kStartOfTime)), "");
    EXPECT_EQ(coordinator.next_event(), kStartOfTime + 30s);
    EXPECT_EQ(shown(coordinator.tick(kStartOfTime + 30s)), "0 stop");
    const ExitStatus status =
        saves ? ExitStatus{.code = 75} : ExitStatus{.code = -1, .signal = SIGKILL};
    const auto orders = coordinator.stopped(0, {ended_by_us(0, status)}, kStartOfTime + 31s);
    EXPECT_EQ(orders.front().message.verdict.exit_code, saves ? 75 : 1);
  }
}

TEST(Coordinator, DoesNotWaitForPreemptedWorkersWhenAnotherOneFails) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.failed(0, failure(0, 75), kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.failed(1, failure(2, 5), kStartOfTime)), "0 stop, 1 stop");
  (void)coordinator.stopped(0, {}, kStartOfTime);
  EXPECT_EQ(coordinator.stopped(1, {}, kStartOfTime).front().message.verdict.exit_code, 5);
}

TEST(Coordinator, RestartsPreemptedWorkersUnlessALauncherGotTheSignal) {
  auto coordinator = running(fixed(2, 5), 2);
  preempt_all(coordinator);
  EXPECT_EQ(shown(coordinator.stopped(1, {}, kStartOfTime)), "0 start, 1 start");
  coordinator.passed_on(SIGUSR1);
  preempt_all(coordinator);
  const auto orders = coordinator.stopped(1, {}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end, 1 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 75);
}

TEST(Coordinator, RestartsAfterAFailureThatHasNothingToDoWithTheSignal) {
  auto coordinator = running(fixed(1, 5), 1);
  coordinator.passed_on(SIGUSR1);
  (void)coordinator.failed(0, failure(0, 1), kStartOfTime);
  EXPECT_EQ(shown(coordinator.stopped(0, {}, kStartOfTime)), "0 start");
}

TEST(Coordinator, TellsTheOthersThatALeavingMachineHasPreemptedThem) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.leaves(1, SIGTERM, kStartOfTime)), "0 stop");
  const auto orders = coordinator.stopped(
      0, {ended_by_us(0, {.code = 75}), ended_by_us(1, {.code = 75})}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 75);
  EXPECT_EQ(orders[0].message.verdict.reason,
            "machine 1 (host1, 10.0.0.2) was told to end by SIGTERM");
}

TEST(Coordinator, RestartsTheWholeGroupAsOftenAsAllowed) {
  auto coordinator = running(fixed(2, 1), 2);
  EXPECT_EQ(shown(coordinator.failed(0, failure(0, 1), kStartOfTime)), "0 stop, 1 stop");
  (void)coordinator.stopped(0, {}, kStartOfTime);
  const auto again = coordinator.stopped(1, {}, kStartOfTime);
  ASSERT_EQ(shown(again), "0 start, 1 start");
  EXPECT_EQ(again[0].message.round.restart_count, 1);
  EXPECT_EQ(again[0].message.round.number, 1);
  (void)coordinator.failed(0, failure(0, 4), kStartOfTime);
  (void)coordinator.stopped(0, {}, kStartOfTime);
  const auto end = coordinator.stopped(1, {}, kStartOfTime);
  ASSERT_EQ(shown(end), "0 end, 1 end");
  EXPECT_EQ(end[0].message.verdict.exit_code, 4);
  EXPECT_EQ(end[0].message.verdict.failures.size(), 1U) << "failures of earlier rounds are history";
}

TEST(Coordinator, EndsTheJobWhenAFixedMachineIsGone) {
  auto coordinator = running(fixed(2), 2);
  (void)coordinator.failed(0, failure(0, 70), kStartOfTime);  // its workers noticed first
  EXPECT_EQ(shown(coordinator.lost(1, "is gone", kStartOfTime)), "0 stop");
  const auto orders = coordinator.stopped(0, {}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 70);
  EXPECT_EQ(orders[0].message.verdict.reason, "machine 1 (host1, 10.0.0.2) is gone");
}

TEST(Coordinator, LetsAFixedMachineComeBackWhileRestartsAreLeft) {
  auto coordinator = running(fixed(2, 1), 2);
  EXPECT_EQ(shown(coordinator.lost(1, "is gone", kStartOfTime)), "0 stop");
  EXPECT_EQ(shown(coordinator.stopped(0, {}, kStartOfTime)), "");
  EXPECT_TRUE(coordinator.gathering());
  EXPECT_EQ(shown(coordinator.join(7, machine(1), kStartOfTime)), "0 start, 7 start");
}

TEST(Coordinator, EndsTheJobWithTheSignalThatEndsOneFixedMachine) {
  auto coordinator = running(fixed(2), 2);
  EXPECT_EQ(shown(coordinator.leaves(1, 15, kStartOfTime)), "0 stop");
  const auto orders = coordinator.stopped(0, {}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 143);
  EXPECT_NE(orders[0].message.verdict.reason.find("told to end by SIGTERM"), std::string::npos);
}

TEST(ElasticCoordinator, StartsAtOnceWithTheMostAndAfterTheLastCallWithEnough) {
  Coordinator full(elastic(1, 2), kStartOfTime);
  (void)full.join(0, machine(0), kStartOfTime);
  EXPECT_EQ(shown(full.join(1, machine(1), kStartOfTime)), "0 start, 1 start");

  Coordinator few(elastic(1, 3), kStartOfTime);
  EXPECT_EQ(shown(few.join(0, machine(0), kStartOfTime)), "");
  EXPECT_EQ(few.next_event(), kStartOfTime + 30s);
  EXPECT_EQ(shown(few.tick(kStartOfTime + 30s)), "0 start");
}

TEST(ElasticCoordinator, OrdersMachinesByTheirAddresses) {
  Coordinator coordinator(elastic(3, 3), kStartOfTime);
  auto nine = machine(0);
  nine.address = "10.0.0.9";
  auto ten = machine(0);
  ten.address = "10.0.0.10";
  auto two = machine(0);
  two.address = "10.0.0.2";
  (void)coordinator.join(0, ten, kStartOfTime);
  (void)coordinator.join(1, nine, kStartOfTime);
  EXPECT_EQ(shown(coordinator.join(2, two, kStartOfTime)), "2 start, 1 start, 0 start");
}

TEST(ElasticCoordinator, BeginsANewRoundWhenAMachineLeavesOrJoinsWithoutUsingARestart) {
  auto coordinator = running(elastic(1, 3), 2);
  EXPECT_EQ(shown(coordinator.lost(1, "is gone", kStartOfTime)), "0 stop");
  EXPECT_EQ(shown(coordinator.stopped(0, {}, kStartOfTime)), "");
  auto alone = coordinator.tick(kStartOfTime + 30s);
  ASSERT_EQ(shown(alone), "0 start");
  EXPECT_EQ(alone[0].message.round.world_size, 2);
  EXPECT_EQ(alone[0].message.round.restart_count, 0);

  EXPECT_EQ(shown(coordinator.join(5, machine(1), kStartOfTime + 40s)), "0 stop");
  EXPECT_EQ(shown(coordinator.stopped(0, {}, kStartOfTime + 40s)), "");
  auto both = coordinator.tick(kStartOfTime + 70s);
  ASSERT_EQ(shown(both), "0 start, 5 start");
  EXPECT_EQ(both[0].message.round.world_size, 4);
  EXPECT_EQ(both[0].message.round.number, 2);
}

TEST(ElasticCoordinator, TakesLostPeersForTheConsequenceOfAMachineThatLeft) {
  auto coordinator = running(elastic(1, 2), 2);
  (void)coordinator.failed(0, failure(0, 70), kStartOfTime);
  EXPECT_EQ(shown(coordinator.lost(1, "is gone", kStartOfTime + 1s)), "0 stop");
  EXPECT_FALSE(coordinator.ended());
  (void)coordinator.stopped(0, {}, kStartOfTime + 1s);
  EXPECT_EQ(shown(coordinator.tick(kStartOfTime + 31s)), "0 start");
}

TEST(ElasticCoordinator, LetsMoreThanTheMostWaitUntilOneLeaves) {
  auto coordinator = running(elastic(1, 2), 2);
  EXPECT_EQ(shown(coordinator.join(2, machine(2), kStartOfTime)), "");
  EXPECT_EQ(shown(coordinator.lost(0, "is gone", kStartOfTime)), "1 stop");
  EXPECT_EQ(shown(coordinator.stopped(1, {}, kStartOfTime)), "1 start, 2 start");
}

TEST(ElasticCoordinator, FailsWhenTooFewAreLeftForTooLong) {
  auto coordinator = running(elastic(2, 3), 2);
  (void)coordinator.lost(1, "is gone", kStartOfTime);
  (void)coordinator.stopped(0, {}, kStartOfTime);
  EXPECT_TRUE(coordinator.gathering());
  const auto orders = coordinator.tick(kStartOfTime + 900s);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_NE(orders[0].message.verdict.reason.find("1 of at least 2 machines are here"),
            std::string::npos);
}

TEST(ElasticCoordinator, EndsWhenOthersAreDoneAndOneIsGoneBeforeItWas) {
  auto coordinator = running(elastic(1, 2), 2);
  (void)coordinator.succeeded(0, kStartOfTime);
  EXPECT_EQ(shown(coordinator.lost(1, "is gone", kStartOfTime)), "0 stop");
  const auto orders = coordinator.stopped(0, {}, kStartOfTime);
  ASSERT_EQ(shown(orders), "0 end");
  EXPECT_EQ(orders[0].message.verdict.exit_code, 70);
}

}  // namespace
}  // namespace accelerate::detail::launch
