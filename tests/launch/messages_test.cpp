#include "launch/messages.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "accelerate/errors.h"
#include "launch/channel.h"
#include "launch/rendezvous_conf.h"

namespace accelerate::detail::launch {
namespace {

using namespace std::chrono_literals;
using Kind = AgentMessage::Kind;

AgentMessage sent_and_read(const AgentMessage& message) {
  const auto result = from_line(to_line(message));
  EXPECT_TRUE(result.has_value());
  return result.value_or(AgentMessage{});
}

TEST(Messages, CarryWhatTheyAreAbout) {
  AgentMessage hello{.kind = Kind::kHello};
  hello.member = {.machine_rank = 3, .nproc = 2, .host = "h", .address = "::1", .terms = "t"};
  EXPECT_EQ(sent_and_read(hello).member.address, "::1");
  EXPECT_TRUE(to_line(hello).starts_with("ACCELERATE-LAUNCH 1 {"));

  WorkerFailure failure;
  failure.rank = 5;
  failure.status = {.code = -1, .signal = 9};
  failure.last_lines = {"not \xff utf-8", "two\nlines"};
  const auto failed = sent_and_read({.kind = Kind::kFailed, .failures = {failure}});
  ASSERT_EQ(failed.failures.size(), 1U);
  EXPECT_EQ(failed.failures[0].status, failure.status);
  EXPECT_EQ(failed.failures[0].last_lines[0], "not \xef\xbf\xbd utf-8");
  EXPECT_EQ(failed.failures[0].last_lines[1], "two\nlines");

  const LaunchRound round{.number = 2,
                          .restart_count = 1,
                          .node_rank = 1,
                          .nodes = 3,
                          .first_rank = 4,
                          .world_size = 6};
  const auto start = sent_and_read(
      {.kind = Kind::kStart, .round = round, .master_port = 29500, .agent_store = true});
  EXPECT_EQ(start.round, round);
  EXPECT_EQ(start.master_port, 29500);
  EXPECT_TRUE(start.agent_store);

  AgentMessage end{.kind = Kind::kEnd};
  end.verdict = {.exit_code = 7, .reason = "why", .failures = {failure}};
  EXPECT_EQ(sent_and_read(end).verdict.exit_code, 7);
  EXPECT_EQ(sent_and_read(end).verdict.failures.size(), 1U);
}

TEST(Messages, AreNothingElse) {
  for (const char* line :
       {"", "hello", "{", "[]", "{}", R"({"kind":"dance"})", R"({"kind":3})", R"({"kind":"hello"})",
        R"(ACCELERATE-LAUNCH 1 {"kind":"stop"})", R"({"kind":"start","round":7})",
        R"({"kind":"failed","failures":[1]})", "GET / HTTP/1.1"}) {
    EXPECT_FALSE(from_line(line).has_value()) << line;
  }
}

TEST(Channel, DeliversMessagesAndNoticesTheEnd) {
  auto [left, right] = Channel::pair(Channel::Clock::now());
  left.send({.kind = Kind::kLeaving, .signal = 2});
  left.send({.kind = Kind::kStop});
  const auto messages = right.exchange(Channel::Clock::now());
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_EQ(messages[0].signal, 2);
  {
    const auto gone = std::move(left);
  }
  EXPECT_TRUE(right.exchange(Channel::Clock::now()).empty());
  EXPECT_TRUE(right.closed());
}

TEST(ConnectTo, KeepsItsLimitOverAllAddressesAndSignals) {
  // A door that is full: further requests for a connection get no answer.
  std::string error;
  const auto door = listen_on(0, /*loopback_only=*/false, error);
  ASSERT_TRUE(door) << error;
  ASSERT_EQ(::listen(door->get(), 0), 0);
  const int port = port_of(*door);
  std::vector<Descriptor> waiting;
  for (const auto* const host : {"::1", "127.0.0.1"}) {
    while (auto socket = connect_to(host, port, 200ms, error))
      waiting.push_back(std::move(*socket));
  }
  ASSERT_EQ(error, "no answer");
  // Signals every 20 ms.
  struct sigaction action{};
  struct sigaction before{};
  action.sa_handler = [](int) {};
  ::sigaction(SIGALRM, &action, &before);
  const itimerval often{.it_interval = {0, 20'000}, .it_value = {0, 20'000}};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  const auto start = Channel::Clock::now();
  EXPECT_FALSE(connect_to("localhost", port, 1200ms, error));
  const auto took = Channel::Clock::now() - start;
  const itimerval never{};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_EQ(error, "no answer");
  EXPECT_GE(took, 1190ms);
  EXPECT_LT(took, 2000ms);
}

TEST(Channel, EndsWithWhoeverTalksNonsense) {
  std::string error;
  auto door = listen_on(0, /*loopback_only=*/true, error);
  ASSERT_TRUE(door) << error;
  auto stranger = connect_to("127.0.0.1", port_of(*door), 1000ms, error);
  ASSERT_TRUE(stranger) << error;
  auto arrival = accept_from(*door);
  ASSERT_TRUE(arrival);
  EXPECT_EQ(arrival->second, "127.0.0.1");
  Channel channel(std::move(arrival->first), Channel::Clock::now());
  write_fully(stranger->get(), "GET / HTTP/1.1\r\n\r\n");
  for (int i = 0; i < 100 && !channel.closed(); ++i) {
    EXPECT_TRUE(channel.exchange(Channel::Clock::now()).empty());
  }
  EXPECT_TRUE(channel.closed());
}

TEST(RendezvousConf, ReadsSecondsPortsAndTruthValues) {
  const auto conf = RendezvousConf::parse({{"timeout", "2.5"},
                                           {"last_call_timeout", "1"},
                                           {"keep_alive", "0.5"},
                                           {"is_host", "no"},
                                           {"store_port", "4000"}});
  EXPECT_EQ(conf, (RendezvousConf{.join_timeout = 2500ms,
                                  .last_call = 1000ms,
                                  .keep_alive = 500ms,
                                  .is_host = false,
                                  .store_port = 4000}));
}

TEST(RendezvousConf, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW((void)RendezvousConf::parse({{"timeout", "soon"}}), ConfigError);
  EXPECT_THROW((void)RendezvousConf::parse({{"timeout", "-1"}}), ConfigError);
  EXPECT_THROW((void)RendezvousConf::parse({{"is_host", "perhaps"}}), ConfigError);
  EXPECT_THROW((void)RendezvousConf::parse({{"store_port", "70000"}}), ConfigError);
  EXPECT_THROW((void)RendezvousConf::parse({{"colour", "red"}}), ConfigError);
}

}  // namespace
}  // namespace accelerate::detail::launch
