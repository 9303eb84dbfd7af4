// What `accelerate monitor` reads, and what its page answers.
#include <gtest/gtest.h>

#include <sys/socket.h>

#include <cmath>
#include <fstream>
#include <thread>

#include "accelerate/errors.h"
#include "commands/monitor/page.h"
#include "commands/monitor/report.h"
#include "core/json.h"
#include "core/sockets.h"
#include "core/text.h"
#include "support/command.h"
#include "support/message_of.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

// ---- lines --------------------------------------------------------------------------------------

Run run_of(std::initializer_list<const char*> lines) {
  Run run;
  for (const auto* line : lines) run.add_line(3, line);
  return run;
}

TEST(RunTest, ReadsTheLinesOfARecorder) {
  const auto run = run_of(
      {R"({"time": 5, "start": {"rank": 3, "host": "n1", "device": "cpu", "program": "train"}})",
       R"({"time": 6, "name": "spirals", "config": {"lr": 0.1}})",
       R"({"time": 7, "steps": 9, "count": 3, "ms": 2, "wait": 0.2, "lr": 0.1, "samples": 64})",
       R"({"time": 8, "memory": 7, "gpu": {"used": 1, "total": 2, "busy": 97}})",
       R"({"time": 9, "end": "failed"})"});
  EXPECT_EQ(run.name(), "spirals");
  EXPECT_EQ(run.config.front(), (std::pair<std::string, std::string>("lr", "0.1")));
  EXPECT_EQ(run.throughput.points.front().value, 32'000);
  EXPECT_EQ(run.learning_rate.points.front().step, 9);
  const auto& record = run.ranks.at(3);
  EXPECT_EQ(record.host, "n1");
  EXPECT_EQ(record.step_time.points.front().value, 2);
  EXPECT_EQ(record.wait.points.front().value, 0.2);
  EXPECT_EQ(record.memory.points.front().value, 7);
  EXPECT_EQ(record.gpu_busy.points.front().value, 97);
  EXPECT_EQ(record.gpu_total, 2);
  EXPECT_EQ(run.state(/*now=*/9), RunState::kFailed);
}

TEST(RunTest, ReadsTheLinesOfTheTrackerJsonl) {
  const auto run = run_of(
      {R"({"time": 5, "step": 2, "values": {"loss": 0.5, "a": {"b": 1}, "bad": "NaN", "t": "x"}})",
       R"({"time": 5, "step": null, "values": {"loss": 0.25}})"});
  EXPECT_EQ(run.metrics.size(), 3U);
  EXPECT_EQ(run.metrics.at("loss").points.front().step, 2);
  EXPECT_EQ(run.metrics.at("loss").points.back().step, 1);
  EXPECT_EQ(run.metrics.at("a/b").points.front().value, 1);
  EXPECT_EQ(run.metrics.at("bad").not_finite, 1);
}

TEST(RunTest, LeavesOutTornAndForeignLines) {
  const auto run = run_of({"", "{", "[]", "{}", R"({"time": "x", "end": "finished"})",
                           R"({"time": 5, "steps": "NaN"})", R"({"time": 1e999, "steps": 1})",
                           R"({"time": 5, "table": "t", "values": {"a": 1}})"});
  EXPECT_TRUE(run.metrics.empty());
  EXPECT_EQ(run.steps(), 0);
}

// ---- curves -------------------------------------------------------------------------------------

TEST(Curve, KeepsTheLowestAndHighestPointOfEachColumn) {
  std::vector<Point> points;
  for (int i = 0; i < 1'000'000; ++i) {
    points.push_back(
        {.step = static_cast<double>(i), .time = 0, .value = i == 777'777 ? 9.0 : 1.0});
  }
  const auto curve = curve_of(points, {.columns = 100});
  ASSERT_EQ(curve.size(), 100U);
  EXPECT_EQ(curve[77].high, 9.0);
  EXPECT_EQ(curve[77].low, 1.0);
  EXPECT_NEAR(curve[77].mean, 1.0008, 1e-6);
  EXPECT_EQ(curve[76].high, 1.0);
  EXPECT_EQ(curve.back().x, 999'999);
}

TEST(Curve, ShowsAPartOfAnAxisAndTakesPointsInAnyOrder) {
  const std::vector<Point> points{{.step = 3, .time = 13, .value = 30},
                                  {.step = 1, .time = 11, .value = 10},
                                  {.step = 2, .time = 12, .value = 20}};
  const auto all = curve_of(points, {.columns = 50});
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all.front().mean, 10);
  EXPECT_EQ(all.back().mean, 30);
  const auto part = curve_of(
      points, {.axis = Axis::kTime, .time_zero = 10, .columns = 50, .from = 1.5, .to = 2.5});
  ASSERT_EQ(part.size(), 1U);
  EXPECT_EQ(part.front().x, 2);
  EXPECT_TRUE(curve_of({}, {}).empty());
}

// ---- runs ---------------------------------------------------------------------------------------

class Runs : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& lines) const {
    const fs::path path = folder_.path() / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::app) << lines;
  }
  static std::string steps(double time, double steps, double ms, double wait) {
    return str(R"({"time": )", time, R"(, "steps": )", steps, R"(, "count": 1, "ms": )", ms,
               R"(, "wait": )", wait, R"(, "lr": 0.1, "samples": 64})", "\n");
  }

  const test::Folder folder_;
};

TEST_F(Runs, AreReadWhileTheyGrow) {
  const std::string file = "mnist/monitor/20261116-133246-5f3a/rank_0.jsonl";
  write(file, R"({"time": 1, "step": 1, "values": {"loss": 2}})"
              "\n"
              R"({"time": 2, "ste)");
  RunSet set(folder_.path());
  set.refresh_all();
  ASSERT_EQ(set.runs().size(), 1U);
  const auto& run = *set.runs().front();
  EXPECT_EQ(run.name(), "mnist 11-16 13:32:46");
  EXPECT_EQ(run.metrics.at("loss").points.size(), 1U);

  write(file, "p\": 2, \"values\": {\"loss\": \"NaN\"}}\n" + steps(3, 2, 10, 1));
  set.refresh_all();
  EXPECT_EQ(run.metrics.at("loss").points.size(), 1U);
  EXPECT_EQ(run.metrics.at("loss").not_finite, 1);
  EXPECT_EQ(run.metrics.at("loss").first_not_finite, 2);
  EXPECT_EQ(run.throughput.points.back().value, 6400);
  EXPECT_TRUE(run.counts_samples);
  EXPECT_EQ(run.state(/*now=*/5), RunState::kRunning);
  EXPECT_EQ(run.state(/*now=*/60), RunState::kSilent);

  write(file, R"({"time": 4, "end": "finished"})"
              "\n");
  set.refresh_all();
  EXPECT_EQ(run.state(/*now=*/60), RunState::kFinished);
}

TEST_F(Runs, NameTheRankThatTheOthersWaitFor) {
  for (int rank = 0; rank < 4; ++rank) {
    const double wait = rank == 2 ? 1 : 6;
    write(str("monitor/a/rank_", rank, ".jsonl"), steps(1, 1, 20, wait) + steps(2, 2, 20, wait));
  }
  RunSet set(folder_.path());
  set.refresh_all();
  EXPECT_EQ(set.runs().front()->straggler_text(),
            "Rank 2 is the straggler: the others wait for it 25 % of a step.");
}

TEST_F(Runs, NameNoRankIfAllWaitEquallyLong) {
  for (int rank = 0; rank < 2; ++rank) {
    write(str("monitor/a/rank_", rank, ".jsonl"), steps(1, 1, 20, 6 + 0.1 * rank));
  }
  RunSet set(folder_.path());
  set.refresh_all();
  EXPECT_EQ(set.runs().front()->straggler_text(), "");
}

TEST_F(Runs, ComeFromTrackersWhereNothingElseWasRecorded) {
  write("a/project/metrics.jsonl", R"({"time": 1, "step": 1, "values": {"loss": 2}})"
                                   "\n");
  write("c/project/metrics.jsonl", R"({"time": 1, "step": 1, "values": {"loss": 2}})"
                                   "\n");
  write("c/monitor/x/rank_0.jsonl", R"({"time": 1, "step": 1, "values": {"loss": 2}})"
                                    "\n");
  RunSet set(folder_.path());
  set.refresh_all();
  std::set<std::string> names;
  for (const auto* run : set.runs()) names.insert(run->name());
  EXPECT_EQ(names, (std::set<std::string>{"a/project", "c"}));
}

TEST_F(Runs, LeaveOutLinesThatAreTooLong) {
  write("monitor/a/rank_0.jsonl", std::string(3 << 20, 'x') + "\n" + steps(1, 7, 20, 1));
  RunSet set(folder_.path());
  set.refresh_all();
  EXPECT_EQ(set.runs().front()->steps(), 7);
}

TEST_F(Runs, HaveTheCheckpointsOfTheirProjectAndTheTailsOfLogs) {
  write("p/logs/monitor/a/rank_0.jsonl", steps(1, 7, 20, 1));
  write("p/checkpoints/checkpoint_0/model.safetensors", "12345");
  write("p/logs/out/stdout.log", "one\ntwo\x1b[31m\nthree\n");
  RunSet set(folder_.path());
  set.refresh_all();
  const auto& list = set.checkpoints(*set.runs().front());
  ASSERT_EQ(list.checkpoints.size(), 1U);
  EXPECT_EQ(list.checkpoints.front().bytes, 5);
  ASSERT_EQ(set.logs().size(), 1U);
  EXPECT_EQ(RunSet::tail(set.logs().front(), 2), (std::vector<std::string>{"two", "three"}));
}

TEST_F(Runs, NeedAFolder) {
  EXPECT_NE(
      test::message_of<ConfigError>([&] { RunSet set(folder_ / "nothing"); }).find("There is no"),
      std::string::npos);
}

// ---- the page -----------------------------------------------------------------------------------

class Page : public Runs {
 protected:
  PageReply get(const std::string& target, const std::string& host = "localhost:6116",
                const std::string& cookie = "") {
    auto parsed = parse_page_request(
        str("GET ", target, " HTTP/1.1\r\nHost: ", host, "\r\nCookie: ", cookie));
    return page_.answer(std::get<PageRequest>(parsed));
  }
  Value::Dict state(const std::string& query = "") {
    set_.refresh_all();
    const auto reply = get("/api/state?" + query);
    EXPECT_EQ(reply.status, 200);
    return json_loads(reply.body).as_dict();
  }

  RunSet set_{folder_.path()};
  MonitorPage page_{set_, {.hosts = {"localhost", "127.0.0.1"}}};
};

TEST_F(Page, ShowsRunsCurvesProcessesAndCheckpoints) {
  write("p/monitor/a/rank_0.jsonl",
        R"({"time": 1, "start": {"rank": 0, "host": "n0", "device": "cpu"}})"
        "\n"
        R"({"time": 1, "step": 1, "values": {"accuracy": 0.5, "my_loss": 2}})"
        "\n" +
            steps(2, 5, 10, 1));
  write("p/checkpoints/checkpoint_0/model.safetensors", "12345");
  const auto shown = state();
  EXPECT_EQ(shown.at("runs").as_list().size(), 1U);
  const auto& charts = shown.at("charts").as_list();
  EXPECT_EQ(charts.at(0).as_dict().at("title"), Value("my_loss"));  // losses first
  EXPECT_EQ(charts.at(1).as_dict().at("title"), Value("accuracy"));
  const auto& line = charts.at(0).as_dict().at("lines").as_list().at(0).as_dict();
  EXPECT_EQ(line.at("x").as_list().at(0), Value(1));
  EXPECT_EQ(line.at("mean").as_list().at(0), Value(2));
  EXPECT_EQ(shown.at("ranks").as_list().at(0).as_dict().at("step_ms"), Value(10));
  EXPECT_EQ(shown.at("checkpoints").as_list().at(0).as_dict().at("bytes"), Value(5));
}

TEST_F(Page, SendsNothingAgainWhileNothingChanges) {
  write("monitor/a/rank_0.jsonl", steps(1, 7, 20, 1));
  const auto version = state().at("version").as_string();
  EXPECT_EQ(get("/api/state?version=" + version).status, 304);
  write("monitor/a/rank_0.jsonl", steps(2, 8, 20, 1));
  set_.refresh_all();
  EXPECT_EQ(get("/api/state?version=" + version).status, 200);
}

TEST_F(Page, KeepsAMillionPointsSmallAndQuick) {
  std::string lines;
  for (int i = 0; i < 1'000'000; ++i) {
    lines += str(R"({"time": 1, "step": )", i, R"(, "values": {"loss": )", i % 7, "}}\n");
  }
  write("monitor/a/rank_0.jsonl", lines);
  set_.refresh_all();
  const auto start = std::chrono::steady_clock::now();
  const auto reply = get("/api/state?columns=800");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(reply.body.size(), 40'000U);
  EXPECT_LT(took.count(), test::patient(test::Seconds(1)).count());
}

TEST_F(Page, ComparesTheRunsThatAreChosen) {
  for (const auto* name : {"a", "b", "c"}) {
    write(str(name, "/monitor/x/rank_0.jsonl"), R"({"time": 1, "step": 1, "values": {"loss": 2}})"
                                                "\n");
  }
  EXPECT_EQ(state().at("charts").as_list().at(0).as_dict().at("lines").as_list().size(), 3U);
  const auto two = state("runs=0,2&focus=2");
  EXPECT_EQ(two.at("charts").as_list().at(0).as_dict().at("lines").as_list().size(), 2U);
  EXPECT_EQ(two.at("focus"), Value(2));
  EXPECT_EQ(state("runs=").at("charts").as_list().size(), 0U);
}

TEST_F(Page, EscapesWhatRunsAreCalled) {
  write("<img src=x>\"/monitor/a/rank_0.jsonl",
        R"({"time": 1, "step": 1, "values": {"</script>\"\u0007": 2}})"
        "\n");
  write("\xff/monitor/a/rank_0.jsonl", steps(1, 7, 20, 1));  // not UTF-8
  const auto shown = state();
  EXPECT_EQ(shown.at("charts").as_list().at(0).as_dict().at("title"), Value("</script>\"\a"));
  EXPECT_EQ(get("/api/state").type, "application/json");
}

TEST_F(Page, ServesItsFilesAndNoOthers) {
  EXPECT_NE(get("/").body.find("<!doctype html>"), std::string::npos);
  EXPECT_NE(get("/page.js").body.find("'use strict'"), std::string::npos);
  EXPECT_NE(get("/page.css").body.find(":root"), std::string::npos);
  write("secret.txt", "secret");
  write("a.log", "line\n");
  set_.refresh_all();
  for (const auto* path : {"/secret.txt", "/../secret.txt", "/%2e%2e/etc/passwd", "//etc/passwd",
                           "/api/log?file=secret.txt", "/api/log?file=../a.log",
                           "/api/log?file=%2Fetc%2Fpasswd", "/api/log"}) {
    EXPECT_EQ(get(path).status, 404) << path;
  }
  EXPECT_EQ(get("/api/log?file=a.log").body, R"({"lines": ["line"]})");
}

TEST_F(Page, RefusesForeignHostNames) {
  EXPECT_EQ(get("/", "127.0.0.1:6116").status, 200);
  EXPECT_EQ(get("/", "LOCALHOST").status, 200);
  for (const auto* host : {"evil.example:6116", "", "localhost.evil.example", "localhost:x"}) {
    EXPECT_EQ(get("/", host).status, 403) << host;
  }
}

TEST_F(Page, AsksForItsTokenOnceAndKeepsItInACookie) {
  const auto token = new_token();
  EXPECT_EQ(token.size(), 32U);
  EXPECT_NE(token, new_token());
  MonitorPage page(set_, {.token = token, .cookie = "c"});
  const auto ask = [&](const std::string& target, const std::string& cookie) {
    auto parsed = parse_page_request(str("GET ", target, " HTTP/1.1\r\nCookie: ", cookie));
    return page.answer(std::get<PageRequest>(parsed));
  };
  for (const auto* target : {"/", "/page.js", "/api/state", "/?token=", "/?token=0"}) {
    EXPECT_EQ(ask(target, "").status, 403) << target;
  }
  EXPECT_EQ(ask("/", "c=wrong").status, 403);
  const auto first = ask("/?token=" + token, "");
  EXPECT_EQ(first.status, 303);
  EXPECT_NE(first.bytes().find("Set-Cookie: c=" + token + "; HttpOnly; SameSite=Lax"),
            std::string::npos);
  EXPECT_EQ(ask("/", "x=1; c=" + token).status, 200);
}

TEST(PageRequests, AreRefusedIfTheyAreNoGet) {
  const auto status = [](const std::string& head) {
    const auto parsed = parse_page_request(head);
    const auto* reply = std::get_if<PageReply>(&parsed);
    return reply != nullptr ? reply->status : 200;
  };
  EXPECT_EQ(status("GET / HTTP/1.1"), 200);
  EXPECT_EQ(status("POST / HTTP/1.1"), 405);
  EXPECT_EQ(status("HEAD / HTTP/1.1"), 405);
  EXPECT_EQ(status("GET http://x/ HTTP/1.1"), 400);
  EXPECT_EQ(status("GET /"), 400);
  EXPECT_EQ(status(""), 400);
}

TEST(PageServerTest, IsNotHeldUpBySlowClients) {
  std::string error;
  auto listening = listen_at("127.0.0.1", 0, error);
  ASSERT_TRUE(listening) << error;
  const int port = port_of(*listening);
  PageServer server(std::move(*listening),
                    [](const auto&) { return PageReply{.body = std::string(8 << 20, 'x')}; });
  constexpr std::string_view kGet = "GET / HTTP/1.1\r\n\r\n";
  std::vector<Descriptor> slow;
  for (int i = 0; i < 100; ++i) {  // half of them say nothing, half never read
    auto socket = connect_to("127.0.0.1", port, milliseconds(1000), error);
    ASSERT_TRUE(socket) << error;
    const std::size_t length = i % 2 == 0 ? kGet.size() : 0;
    ASSERT_GE(::send(socket->get(), kGet.data(), length, MSG_NOSIGNAL), 0);
    slow.push_back(std::move(*socket));
    server.serve(milliseconds(1));
  }
  auto quick = connect_to("127.0.0.1", port, milliseconds(1000), error);
  ASSERT_TRUE(quick);
  ASSERT_GT(::send(quick->get(), kGet.data(), kGet.size(), MSG_NOSIGNAL), 0);
  std::string reply(9 << 20, '\0');
  std::size_t length = 0;
  for (int i = 0; i < 2000; ++i) {
    server.serve(milliseconds(2));
    const auto count = ::recv(quick->get(), reply.data() + length, reply.size() - length, 0);
    if (count == 0) break;
    length += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
  EXPECT_TRUE(reply.starts_with("HTTP/1.1 200 \r\n"));
  EXPECT_GT(length, 8U << 20);
  EXPECT_NE(reply.find("Content-Security-Policy: default-src 'none'"), std::string::npos);
}

}  // namespace
}  // namespace accelerate::detail::commands
