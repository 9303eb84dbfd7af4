#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/logging.h"
#include "core/captured_log.h"
#include "core/json.h"
#include "core/yaml.h"
#include "support/command.h"
#include "support/message_of.h"
#include "tracking/http.h"
#include "tracking/http_server.h"
#include "tracking/proto_reader.h"
#include "tracking/trackers.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::str;
using detail::tracking::make_tracker;
using test::message_of;

Value::Dict meta_of(const fs::path& folder) {
  return detail::yaml_loads(test::content_of(folder / "meta.yaml")).as_dict();
}

/// The folder of a run below the root.
fs::path run_folder(const fs::path& root, const std::string& id) {
  for (const auto& entry : fs::directory_iterator(root)) {
    if (fs::exists(entry.path() / id)) return entry.path() / id;
  }
  return "none";
}

TEST(MlflowFolder, HasTheLayoutOfItsFileStore) {
  const test::Folder folder;
  const test::CapturedLog log;
  const auto root = folder.path() / "mlruns";
  const auto patched = patch_environment({{"MLFLOW_TRACKING_URI", "file://" + root.string()},
                                          {"MLFLOW_TAGS", R"({"team": "a", "n": 1})"},
                                          {"USER", "me"}});
  const auto tracker = make_tracker(
      "mlflow", {.project_name = "it's", .kwargs = {{"run_name", "nice"}, {"description", "why"}}});
  EXPECT_FALSE(fs::exists(root));
  tracker->start();
  const auto id = std::any_cast<std::string>(tracker->tracker());
  const auto run = run_folder(root, id);
  EXPECT_EQ(meta_of(run).at("status"), Value(1));
  const Value::Dict config{{"lr", 0.1},
                           {"none", nullptr},
                           {"sizes", Value::List{1, 2}},
                           {"deep/er", true},
                           {"long", std::string(6001, 'x')}};
  tracker->store_init_configuration(config);
  tracker->log({{"loss", 0.5}, {"train/acc", 1}, {"note", "text"}}, 3, {});
  tracker->log({{"loss", std::numeric_limits<double>::quiet_NaN()}, {"bad\nname", 1}}, std::nullopt,
               {});
  tracker->log({{"../up", 1}, {"loss/train", 1}, {std::string(251, 'n'), 1}, {"after", 2}}, 0, {});
  tracker->finish();

  EXPECT_EQ(meta_of(run.parent_path()).at("name"), Value("it's"));
  EXPECT_EQ(test::content_of(run.parent_path() / "tags/team"), "a");
  EXPECT_EQ(meta_of(root / "0").at("name"), Value("Default"));
  const auto meta = meta_of(run);
  EXPECT_EQ(meta.at("status"), Value(3));
  EXPECT_EQ(meta.at("run_id"), Value(id));
  EXPECT_EQ(meta.at("artifact_uri"), Value("file://" + (run / "artifacts").string()));
  EXPECT_GE(meta.at("end_time").as_int(), meta.at("start_time").as_int());
  EXPECT_EQ(test::content_of(run / "params/lr"), "0.1");
  EXPECT_EQ(test::content_of(run / "params/none"), "None");
  EXPECT_EQ(test::content_of(run / "params/sizes"), "[1, 2]");
  EXPECT_EQ(test::content_of(run / "params/deep/er"), "True");
  EXPECT_FALSE(fs::exists(run / "params/long"));
  EXPECT_EQ(test::content_of(run / "tags/mlflow.runName"), "nice");
  EXPECT_EQ(test::content_of(run / "tags/mlflow.note.content"), "why");
  EXPECT_EQ(test::content_of(run / "tags/mlflow.user"), "me");
  const auto loss = test::file_lines(run / "metrics/loss");
  ASSERT_EQ(loss.size(), 2U);
  EXPECT_TRUE(loss[0].ends_with(" 0.5 3")) << loss[0];
  EXPECT_TRUE(loss[1].ends_with(" nan 0")) << loss[1];
  EXPECT_TRUE(test::file_lines(run / "metrics/train/acc").at(0).ends_with(" 1.0 3"));
  EXPECT_FALSE(fs::exists(run / "up"));
  EXPECT_EQ(test::file_lines(run / "metrics/after").size(), 1U);
  // long, note, bad name, ../up, loss/train below a file, a name of 251, one entry lost
  ASSERT_EQ(log.messages().size(), 7U);
  EXPECT_NE(log.messages()[4].find("metrics/loss/train': Not a directory"), std::string::npos)
      << log.messages()[4];
}

TEST(MlflowFolder, GoesOnWithARun) {
  const test::Folder folder;
  const auto patched = patch_environment({{"MLFLOW_TRACKING_URI", folder / "mlruns"}});
  const auto first = make_tracker("mlflow", {.project_name = "project"});
  first->start();
  first->log({{"loss", 1}}, 0, {});
  first->finish();
  const auto id = std::any_cast<std::string>(first->tracker());
  const auto run = run_folder(folder / "mlruns", id);
  const auto again = patch_environment({{"MLFLOW_RUN_ID", id}});
  const auto second = make_tracker("mlflow", {.project_name = "project"});
  second->start();
  EXPECT_EQ(meta_of(run).at("status"), Value(1));
  second->log({{"loss", 0.5}}, 1, {});
  second->finish();
  EXPECT_EQ(test::file_lines(run / "metrics/loss").size(), 2U);
  const auto missing =
      make_tracker("mlflow", {.project_name = "project", .kwargs = {{"run_id", "x"}}});
  const auto other = patch_environment({{"MLFLOW_RUN_ID", "nowhere"}});
  const auto third = make_tracker("mlflow", {.project_name = "project"});
  EXPECT_NE(message_of<ConfigError>([&] { third->start(); }).find("'nowhere'"), std::string::npos);
}

TEST(MlflowFolder, SaysWhichStoresItCannotOpen) {
  const auto message = [](const char* uri) {
    const auto patched = patch_environment({{"MLFLOW_TRACKING_URI", uri}});
    return message_of<UnsupportedError>(
        [] { static_cast<void>(make_tracker("mlflow", {.project_name = "project"})); });
  };
  EXPECT_NE(
      message("sqlite:///mlflow.db").find("mlflow server --backend-store-uri sqlite:///mlflow.db"),
      std::string::npos);
  EXPECT_NE(message("https://host").find("speaks no TLS"), std::string::npos);
  for (const char* uri : {"postgresql://me:secret@host/db", "https://me:secret@host"}) {
    EXPECT_EQ(message(uri).find("secret"), std::string::npos) << message(uri);
    EXPECT_NE(message(uri).find("://host"), std::string::npos) << message(uri);
  }
}

/// As much of an MLflow server as a run needs.
std::pair<std::string, std::string> mlflow(const test::Request& request) {
  if (request.line.find("get-by-name") != std::string::npos) return {"404 Not Found", "{}"};
  if (request.line.find("experiments/create") != std::string::npos) {
    return {"200 OK", R"({"experiment_id": "7"})"};
  }
  if (request.line.find("runs/create") != std::string::npos) {
    return {"200 OK", R"({"run": {"info": {"run_id": "r1"}}})"};
  }
  return {"200 OK", "{}"};
}

TEST(MlflowServer, GetsExperimentRunParametersAndMetrics) {
  const test::HttpServer server(mlflow);
  const auto patched =
      patch_environment({{"MLFLOW_TRACKING_URI", str("http://127.0.0.1:", server.port(), "/base/")},
                         {"MLFLOW_TRACKING_TOKEN", "secret"}});
  const auto tracker = make_tracker("mlflow", {.project_name = "a b&c"});
  tracker->start();
  EXPECT_EQ(std::any_cast<std::string>(tracker->tracker()), "r1");
  Value::Dict config;
  for (int i = 0; i < 101; ++i) config.set(str("p", i), i);
  tracker->store_init_configuration(config);
  for (int i = 0; i < 300; ++i) {
    tracker->log({{"loss", 0.5}, {"nan", std::numeric_limits<double>::infinity()}}, i, {});
  }
  tracker->finish();
  const auto requests = server.requests();
  ASSERT_GE(requests.size(), 7U);
  EXPECT_EQ(requests[0].line,
            "GET /base/api/2.0/mlflow/experiments/get-by-name?experiment_name=a%20b%26c HTTP/1.0");
  EXPECT_NE(requests[0].head.find("Authorization: Bearer secret"), std::string::npos);
  EXPECT_EQ(requests[1].line, "POST /base/api/2.0/mlflow/experiments/create HTTP/1.0");
  EXPECT_EQ(detail::json_loads(requests[2].body).at("experiment_id"), Value("7"));
  EXPECT_EQ(detail::json_loads(requests[3].body).at("params").as_list().size(), 100U);
  EXPECT_EQ(detail::json_loads(requests[4].body).at("params").as_list().size(), 1U);
  std::int64_t next = 0;
  for (std::size_t i = 5; i + 1 < requests.size(); ++i) {
    const auto batch = detail::json_loads(requests[i].body);
    EXPECT_EQ(batch.at("run_id"), Value("r1"));
    EXPECT_LE(batch.at("metrics").items().size(), 1000U);
    for (const auto& metric : batch.at("metrics").items()) {
      EXPECT_EQ(metric.at("key"), Value(next % 2 == 0 ? "loss" : "nan"));
      EXPECT_EQ(metric.at("step"), Value(next++ / 2));
      EXPECT_EQ(metric.at("value"), next % 2 == 0 ? Value("Infinity") : Value(0.5));
    }
  }
  EXPECT_EQ(next, 600);
  EXPECT_EQ(detail::json_loads(requests.back().body).at("status"), Value("FINISHED"));
}

TEST(MlflowServer, ThatRefusesABatchLosesOnlyTheCulprit) {
  const test::CapturedLog log;
  // Until the login works metrics wait; then they come in one batch.
  std::atomic<bool> logged_in = false;
  const test::HttpServer server([&](const test::Request& request) {
    const bool batch = request.line.find("log-batch") != std::string::npos;
    if (batch && !logged_in) return std::pair<std::string, std::string>("401 Unauthorized", "{}");
    if (batch && request.body.find("\"bad\"") != std::string::npos) {
      return std::pair<std::string, std::string>("400 Bad Request", "bad");
    }
    return mlflow(request);
  });
  const auto patched =
      patch_environment({{"MLFLOW_TRACKING_URI", str("http://127.0.0.1:", server.port())}});
  const auto tracker = make_tracker("mlflow", {.project_name = "project"});
  tracker->start();
  for (int i = 0; i < 20; ++i) tracker->log({{i == 13 ? "bad" : "loss", i}}, i, {});
  while (server.requests().size() < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  logged_in = true;
  tracker->finish();
  std::vector<std::int64_t> taken;
  for (const auto& request : server.requests()) {
    if (request.line.find("log-batch") == std::string::npos) continue;
    const auto metrics = detail::json_loads(request.body).at("metrics");
    if (request.body.find("\"bad\"") != std::string::npos) continue;
    for (const auto& metric : metrics.items()) taken.push_back(metric.at("step").as_int());
  }
  std::ranges::sort(taken);
  taken.erase(std::ranges::unique(taken).begin(), taken.end());
  EXPECT_EQ(taken.size(), 19U);
  ASSERT_EQ(log.messages().size(), 3U);
  EXPECT_NE(log.messages()[0].find("HTTP 401"), std::string::npos);
  EXPECT_NE(log.messages()[1].find("HTTP 400: bad"), std::string::npos);
  EXPECT_EQ(log.messages()[2], "The tracker mlflow could not write 1 entry, which is lost.");
}

TEST(MlflowServer, ThatGoesAwayDoesNotStopTheTraining) {
  // The thread of the tracker warns while this one waits for it.
  std::atomic<int> warnings = 0;
  std::string warning;
  basic_config({.sink = [&](const LogEntry& entry) {
    if (warnings == 0) warning = entry.message;
    ++warnings;
  }});
  auto server = std::make_unique<test::HttpServer>(mlflow);
  const int port = server->port();
  const auto patched = patch_environment({{"MLFLOW_TRACKING_URI", str("http://127.0.0.1:", port)}});
  const auto tracker = make_tracker("mlflow", {.project_name = "project"});
  tracker->start();
  server.reset();
  for (int i = 0; i < 50; ++i) tracker->log({{"loss", 0.5}}, i, {});
  for (int i = 0; i < 500 && warnings == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(warnings, 1);
  EXPECT_NE(warning.find(str("No answer from http://127.0.0.1:", port)), std::string::npos)
      << warning;
  const test::HttpServer restarted(mlflow, port);
  tracker->finish();
  std::size_t metrics = 0;
  for (const auto& request : restarted.requests()) {
    const auto body = detail::json_loads(request.body).as_dict();
    if (body.contains("metrics")) metrics += body.at("metrics").items().size();
  }
  EXPECT_EQ(metrics, 50U);
  EXPECT_EQ(warnings, 1);
  basic_config({});
}

TEST(MlflowServer, ThatIsNotThereIsAnErrorAtTheStart) {
  int port = 0;
  {
    const test::HttpServer server(mlflow);
    port = server.port();
  }
  const auto patched = patch_environment({{"MLFLOW_TRACKING_URI", str("http://127.0.0.1:", port)}});
  const auto tracker = make_tracker("mlflow", {.project_name = "project"});
  EXPECT_EQ(message_of<ConfigError>([&] { tracker->start(); }),
            str("No answer from http://127.0.0.1:", port, ": Connection refused."));
}

TEST(Http, ReadsAddresses) {
  using detail::tracking::HttpServer;
  const auto server = HttpServer::parse("http://me:pass@[::1]:5000/a/", "X");
  EXPECT_EQ(server.host, "::1");
  EXPECT_EQ(server.port, 5000);
  EXPECT_EQ(server.path, "/a");
  EXPECT_EQ(server.login, "me:pass");
  EXPECT_EQ(HttpServer::parse("http://host", "X").port, 80);
  EXPECT_EQ(HttpServer::parse("http://a%40b:100%25%@host", "X").login, "a@b:100%%");
  EXPECT_EQ(message_of<ConfigError>(
                [] { static_cast<void>(HttpServer::parse("http://me:se/cret@host:0", "X")); }),
            "X is 'http://host:0', which is no address of a server. Expected http://HOST:PORT.");
  for (const char* address : {"host:80", "http://", "http://host:x", "http://host:70000"}) {
    EXPECT_NE(message_of<ConfigError>([&] {
                static_cast<void>(HttpServer::parse(address, "X"));
              }).find("no address of a server"),
              std::string::npos)
        << address;
  }
  EXPECT_EQ(detail::tracking::base64_encoded("a"), "YQ==");
  EXPECT_EQ(detail::tracking::base64_encoded("user:pass"), "dXNlcjpwYXNz");
}

}  // namespace
}  // namespace accelerate
