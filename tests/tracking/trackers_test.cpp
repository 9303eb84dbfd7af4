#include "tracking/trackers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <regex>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/captured_log.h"
#include "core/json.h"
#include "core/yaml.h"
#include "formats/crc32.h"
#include "support/command.h"
#include "support/message_of.h"
#include "tracking/proto_reader.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::tracking::make_tracker;
using test::message_of;
using test::ProtoReader;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(JsonlTracker, WritesOneObjectPerCall) {
  const test::Folder folder;
  for (int run = 0; run < 2; ++run) {
    const auto tracker =
        make_tracker("jsonl", {.project_name = "project", .logging_dir = folder.path()});
    tracker->start();
    tracker->store_init_configuration({{"lr", 0.1}});
    tracker->log({{"loss", kNan}, {"acc", Value::Dict{{"a", -kInfinity}}}}, 3, {});
    tracker->log_table("t", {.columns = {"x"}, .data = {{1}, {"\xff"}}}, std::nullopt, {});
    tracker->finish();
  }
  const auto lines = test::file_lines(folder / "project/metrics.jsonl");
  ASSERT_EQ(lines.size(), 6U);  // the second run is behind the first
  const auto config = detail::json_loads(lines[0]);
  EXPECT_EQ(config.at("config"), Value(Value::Dict{{"lr", 0.1}}));
  const auto values = detail::json_loads(lines[1]);
  EXPECT_GT(values.at("time").as_double(), 1.7e9);
  EXPECT_EQ(values.at("step"), Value(3));
  EXPECT_EQ(values.at("values"),
            Value(Value::Dict{{"loss", "NaN"}, {"acc", Value::Dict{{"a", "-Infinity"}}}}));
  EXPECT_EQ(detail::json_loads(lines[2]).at("table"), Value("t"));
}

TEST(CsvTracker, WritesARowPerValue) {
  const test::Folder folder;
  for (int run = 0; run < 2; ++run) {
    const auto tracker =
        make_tracker("csv", {.project_name = "project", .logging_dir = folder.path()});
    tracker->start();
    tracker->store_init_configuration({{"lr", 0.1}, {"t", "\xff"}});
    tracker->log({{"loss", 0.5}, {"note", "a, \"b\""}, {"all", Value::Dict{{"x", 1}}}}, 3, {});
    tracker->log({{"loss", kNan}}, std::nullopt, {});
    tracker->finish();
  }
  const auto lines = test::file_lines(folder / "project/metrics.csv");
  ASSERT_EQ(lines.size(), 9U);
  EXPECT_EQ(lines[0], "time,step,name,value");
  const auto behind_time = [&](std::size_t i) { return lines[i].substr(lines[i].find(',')); };
  EXPECT_EQ(behind_time(1), ",3,loss,0.5");
  EXPECT_EQ(behind_time(2), ",3,note,\"a, \"\"b\"\"\"");
  EXPECT_EQ(behind_time(3), ",3,all/x,1");
  EXPECT_EQ(behind_time(4), ",,loss,nan");
  EXPECT_EQ(test::content_of(folder / "project/config.json"),
            "{\n  \"lr\": 0.1,\n  \"t\": \"\\ufffd\"\n}\n");
}

TEST(TextTrackers, ReplaceBytesThatAreNotUtf8) {
  const test::Folder folder;
  const auto csv = make_tracker("csv", {.project_name = "project", .logging_dir = folder.path()});
  csv->start();
  csv->log({{"a\xff", "b\xfe,"}}, 1, {});
  csv->finish();
  const auto row = test::file_lines(folder / "project/metrics.csv").at(1);
  EXPECT_EQ(row.substr(row.find(',')), ",1,a\uFFFD,\"b\uFFFD,\"");

  const auto live = make_tracker(
      "dvclive", {.project_name = "p", .kwargs = {{"dir", folder / "live"}, {"dvcyaml", nullptr}}});
  live->start();
  live->store_init_configuration(
      {{"k\xff", Value::list({"v\xff", Value::Dict{{"x", Value::tuple({"\xfe"})}}})}});
  live->log({{"t", "b\xfe"}}, std::nullopt, {});
  live->finish();
  EXPECT_EQ(
      detail::yaml_loads(test::content_of(folder / "live/params.yaml")),
      Value(Value::Dict{
          {"k\uFFFD", Value::list({"v\uFFFD", Value::Dict{{"x", Value::list({"\uFFFD"})}}})}}));
  EXPECT_EQ(test::content_of(folder / "live/plots/metrics/t.tsv"), "step\tt\n0\tb\uFFFD\n");
}

// What DVCLive 3.49 writes for the same calls.
TEST(DvcLiveTracker, WritesTheFilesOfDvcLive) {
  const test::Folder folder;
  const test::CapturedLog log;
  const auto live = folder / "live";
  const auto tracker = make_tracker(
      "dvclive",
      {.project_name = "ignored", .kwargs = {{"dir", live}, {"dvcyaml", folder / "dvc.yaml"}}});
  tracker->start();
  tracker->store_init_configuration({{"lr", 0.1}, {"sizes", Value::List{1, 2}}});
  tracker->log({{"loss", 0.5}, {"train/acc", 1}, {"t", "text"}, {"nan", kNan}}, std::nullopt, {});
  tracker->log({{"loss", 0.25}}, std::nullopt, {});
  tracker->log({{"../up", 1},
                {"loss", 0.125},
                {"train/acc", true},
                {"inf", -kInfinity},
                {"map", Value::Dict{}}},
               3, {});
  tracker->finish();
  EXPECT_EQ(test::content_of(live + "/plots/metrics/loss.tsv"),
            "step\tloss\n0\t0.5\n1\t0.25\n3\t0.125\n");
  EXPECT_EQ(test::content_of(live + "/plots/metrics/train/acc.tsv"), "step\tacc\n0\t1\n3\tTrue\n");
  EXPECT_EQ(test::content_of(live + "/plots/metrics/inf.tsv"), "step\tinf\n3\t-inf\n");
  EXPECT_EQ(
      test::content_of(live + "/metrics.json"),
      "{\n    \"loss\": 0.125,\n    \"train\": {\n        \"acc\": true\n    },\n"
      "    \"t\": \"text\",\n    \"nan\": \"nan\",\n    \"step\": 3,\n    \"inf\": \"-inf\"\n}\n");
  EXPECT_EQ(test::content_of(live + "/params.yaml"), "lr: 0.1\nsizes:\n- 1\n- 2\n");
  EXPECT_EQ(
      detail::yaml_loads(test::content_of(folder / "dvc.yaml")),
      Value(Value::Dict{{"metrics", Value::list({live + "/metrics.json"})},
                        {"params", Value::list({live + "/params.yaml"})},
                        {"plots", Value::list({Value::Dict{
                                      {live + "/plots/metrics", Value::Dict{{"x", "step"}}}}})}}));
  ASSERT_EQ(log.messages().size(), 2U);
  EXPECT_NE(log.messages()[0].find("'../up'"), std::string::npos);
  EXPECT_NE(log.messages()[1].find("'map'"), std::string::npos);
}

TEST(DvcLiveTracker, GoesOnOrBeginsAnew) {
  const test::Folder folder;
  const auto run = [&](bool resume) {
    const auto tracker = make_tracker(
        "dvclive",
        {.kwargs = {{"dir", folder / "live"}, {"dvcyaml", nullptr}, {"resume", resume}}});
    tracker->start();
    for (int i = 0; i < 2; ++i) tracker->log({{"loss", 1}}, std::nullopt, {});
    tracker->finish();
    return test::content_of(folder / "live/plots/metrics/loss.tsv");
  };
  EXPECT_EQ(run(false), "step\tloss\n0\t1\n1\t1\n");
  EXPECT_EQ(run(true), "step\tloss\n0\t1\n1\t1\n2\t1\n3\t1\n");
  EXPECT_EQ(run(false), "step\tloss\n0\t1\n1\t1\n");
}

TEST(DvcLiveTracker, ReadsBackWhateverItHasWritten) {
  const test::Folder folder;
  const auto start = [&] {
    auto tracker = make_tracker(
        "dvclive",
        {.kwargs = {{"dir", folder / "live"}, {"dvcyaml", folder / "dvc.yaml"}, {"resume", true}}});
    tracker->start();
    return tracker;
  };
  start()->finish();
  EXPECT_FALSE(fs::exists(folder / "live/metrics.json"));  // an empty one is no JSON
  fs::remove(folder / "dvc.yaml");
  const auto tracker = start();
  tracker->log({{"note", "\xff"}}, 1, {});
  tracker->finish();
  start()->log({{"loss", 1}}, std::nullopt, {});
  EXPECT_EQ(detail::json_loads(test::content_of(folder / "live/metrics.json")),
            Value(Value::Dict{{"note", "\xEF\xBF\xBD"}, {"step", 2}, {"loss", 1}}));
}

TEST(TrackioTracker, IsInTheHomeOfHuggingFace) {
  const test::Folder folder;
  const auto parent = [] {
    const auto tracker = make_tracker("trackio", {.project_name = "project"});
    tracker->start();
    return std::any_cast<fs::path>(tracker->tracker()).parent_path();
  };
  const auto patched = patch_environment({{"HOME", folder.path().string()},
                                          {"HF_HOME", ""},
                                          {"XDG_CACHE_HOME", ""},
                                          {"TRACKIO_DIR", ""}});
  EXPECT_EQ(parent(), folder.path() / ".cache/huggingface/trackio/inbox");
  const auto cache = patch_environment({{"XDG_CACHE_HOME", folder / "cache"}});
  EXPECT_EQ(parent(), folder.path() / "cache/huggingface/trackio/inbox");
  const auto home = patch_environment({{"HF_HOME", "~/hf"}});
  EXPECT_EQ(parent(), folder.path() / "hf/trackio/inbox");
}

TEST(TrackioTracker, PutsFragmentsIntoTheInbox) {
  const test::Folder folder;
  const auto patched = patch_environment({{"TRACKIO_DIR", folder.path().string()}});
  const auto tracker =
      make_tracker("trackio", {.project_name = "project", .kwargs = {{"name", "r"}}});
  tracker->start();
  tracker->store_init_configuration({{"lr", 0.1}});
  tracker->log({{"loss", kNan}}, std::nullopt, {});
  tracker->log({{"loss", 1}}, 5, {});
  tracker->log({{"loss", 2}}, std::nullopt, {});
  tracker->finish();
  const auto inbox = std::any_cast<fs::path>(tracker->tracker());
  EXPECT_EQ(inbox.parent_path(), folder.path() / "inbox");
  EXPECT_TRUE(std::regex_match(inbox.filename().string(), std::regex("[0-9a-f]{16}")));
  const auto lines = test::file_lines(inbox / "00000000.jsonl");
  ASSERT_EQ(lines.size(), 3U);
  const auto first = detail::json_loads(lines[0]);
  EXPECT_EQ(first.at("v"), Value(1));
  EXPECT_EQ(first.at("kind"), Value("metric"));
  EXPECT_EQ(first.at("project"), Value("project"));
  EXPECT_EQ(first.at("run"), Value("r"));
  EXPECT_EQ(first.at("metrics"), Value(Value::Dict{{"loss", "NaN"}}));
  EXPECT_EQ(first.at("step"), Value(0));
  EXPECT_EQ(first.at("config"), Value(Value::Dict{{"lr", 0.1}}));
  EXPECT_TRUE(std::regex_match(first.at("timestamp").as_string(),
                               std::regex(R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00)")));
  EXPECT_TRUE(std::regex_match(
      first.at("log_id").as_string(),
      std::regex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")));
  EXPECT_EQ(detail::json_loads(lines[2]).at("step"), Value(6));
  EXPECT_EQ(detail::json_loads(lines[2]).at("config"), Value());
}

/// The records of an offline run, whose checksums must be right.
std::vector<ProtoReader> wandb_records(const fs::path& file) {
  const auto bytes = test::content_of(file);
  EXPECT_EQ(bytes.substr(0, 7), std::string(":W&B\xE1\xBE\0", 7));
  std::vector<ProtoReader> records;
  std::string record;
  for (std::size_t at = 7; at < bytes.size();) {
    if (const auto room = 32768 - at % 32768; room < 7) {
      EXPECT_EQ(bytes.substr(at, room), std::string(room, '\0'));
      at += room;
      continue;
    }
    const auto size = detail::formats::read_little<std::uint16_t>(bytes, at + 4);
    EXPECT_EQ(detail::formats::crc32(bytes.substr(at + 6, size + 1U)),
              detail::formats::read_little<std::uint32_t>(bytes, at));
    EXPECT_EQ(record.empty(), bytes[at + 6] == 1 || bytes[at + 6] == 2);
    record += bytes.substr(at + 7, size);
    if (bytes[at + 6] == 1 || bytes[at + 6] == 4) records.emplace_back(std::exchange(record, {}));
    at += 7U + size;
  }
  EXPECT_EQ(record, "");
  for (std::size_t i = 0; i < records.size(); ++i) EXPECT_EQ(records[i].number(1), i + 1);
  return records;
}

/// The JSON texts of items {1 key, 16 value_json}.
std::map<std::string, std::string> items_of(const ProtoReader& record) {
  std::map<std::string, std::string> items;
  for (const auto& bytes : record.texts.at(1)) {
    items[ProtoReader(bytes).text(1)] = ProtoReader(bytes).text(16);
  }
  return items;
}

TEST(WandbTracker, WritesAnOfflineRun) {
  const test::Folder folder;
  const test::CapturedLog log;
  const auto tracker = make_tracker("wandb", {.project_name = "project",
                                              .kwargs = {{"dir", folder.path().string()},
                                                         {"id", "abc"},
                                                         {"name", "nice"},
                                                         {"tags", Value::List{"x", "y"}},
                                                         {"config", Value::Dict{{"a", 1}}}}});
  tracker->start();
  tracker->store_init_configuration({{"lr", 0.1}});
  tracker->log({{"loss", 0.5}}, std::nullopt, {});
  tracker->log({{"loss", 0.25}}, 3, {});
  tracker->log({{"acc", kNan}}, 3, {});
  tracker->log({{"late", 1}}, 2, {});
  tracker->log({{"big", std::string(100000, 'x')}}, 4, {});
  tracker->finish();
  const auto run = std::any_cast<fs::path>(tracker->tracker());
  EXPECT_TRUE(
      std::regex_match(run.filename().string(), std::regex(R"(offline-run-\d{8}_\d{6}-abc)")));
  EXPECT_EQ(fs::canonical(folder / "wandb/latest-run"), fs::canonical(run));
  const auto records = wandb_records(run / "run-abc.wandb");
  ASSERT_EQ(records.size(), 10U);  // header, run, config, 3 rows with their summaries, exit
  EXPECT_FALSE(records[0].message(21).message(1).text(2).empty());
  const auto made = records[1].message(17);
  EXPECT_EQ(made.text(1), "abc");
  EXPECT_EQ(made.text(3), "project");
  EXPECT_EQ(made.text(8), "nice");
  EXPECT_EQ(made.texts.at(10), (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(items_of(made.message(4)).at("a"), "1");
  EXPECT_EQ(items_of(records[2].message(5)).at("lr"), "0.1");
  EXPECT_EQ(items_of(records[3].message(2)).at("loss"), "0.5");
  EXPECT_EQ(items_of(records[3].message(2)).at("_step"), "0");
  const auto row = items_of(records[5].message(2));
  EXPECT_EQ(row.at("loss"), "0.25");
  EXPECT_EQ(row.at("acc"), "NaN");
  EXPECT_EQ(row.at("_step"), "3");
  EXPECT_EQ(records[5].message(2).message(2).number(1), 3U);
  EXPECT_EQ(items_of(records[6].message(3)), row);
  EXPECT_EQ(items_of(records[7].message(2)).at("big").size(), 100002U);
  EXPECT_TRUE(records[9].texts.contains(18));
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_NE(log.messages()[0].find("step 2"), std::string::npos);
}

TEST(WandbTracker, WritesNothingIfItIsDisabled) {
  const test::Folder folder;
  const auto write = [&](Value::Dict kwargs) {
    kwargs.set("dir", folder.path().string());
    const auto tracker = make_tracker("wandb", {.project_name = "p", .kwargs = kwargs});
    tracker->start();
    tracker->log({{"loss", 1}}, 1, {});
    tracker->log_images({}, 1, {});
    tracker->log_table("t", {}, 1, {});
    tracker->finish();
  };
  write({{"mode", "disabled"}});
  const auto patched = patch_environment({{"WANDB_MODE", "disabled"}});
  write({});
  EXPECT_TRUE(fs::is_empty(folder.path()));
  const test::CapturedLog log;
  const auto online = patch_environment({{"WANDB_MODE", "online"}});
  write({});
  write({});
  EXPECT_TRUE(fs::exists(folder / "wandb"));
  const auto about_the_mode = [](const auto& text) { return text.starts_with("WANDB_MODE is "); };
  EXPECT_EQ(std::ranges::count_if(log.messages(), about_the_mode), 1);
}

TEST(WandbTracker, HasTheExitCodeOfARunThatAnExceptionEnds) {
  struct Run {
    std::shared_ptr<GeneralTracker> tracker;
    ~Run() { tracker->finish(); }
  };
  const test::Folder folder;
  const auto exit_code = [&](const char* id, bool fails) {
    const auto tracker = make_tracker(
        "wandb", {.project_name = "p", .kwargs = {{"dir", folder.path().string()}, {"id", id}}});
    tracker->start();
    try {
      const Run run{tracker};
      if (fails) throw std::runtime_error("it fails.");
    } catch (const std::runtime_error&) {
    }
    const auto file =
        std::any_cast<fs::path>(tracker->tracker()) / ("run-" + std::string(id) + ".wandb");
    return wandb_records(file).back().message(18).number(1);
  };
  EXPECT_EQ(exit_code("good", false), 0U);
  EXPECT_EQ(exit_code("bad", true), 1U);
}

TEST(WandbTracker, WritesImagesAndTablesAsFiles) {
  const test::Folder folder;
  const auto tracker =
      make_tracker("wandb", {.project_name = "p", .kwargs = {{"dir", folder.path().string()}}});
  tracker->start();
  const TrackerImage image{.height = 1, .width = 2, .channels = 3, .pixels = "abcdef"};
  tracker->log_images({{"group/im", {image, image}}}, 1, {});
  tracker->log_table("tab", {.columns = {"x", "y"}, .data = {{1, "a"}, {2.5, nullptr}}}, 2, {});
  tracker->finish();
  const auto run = std::any_cast<fs::path>(tracker->tracker());
  std::string file;
  for (const auto& entry : fs::directory_iterator(run)) {
    if (entry.path().extension() == ".wandb") file = entry.path();
  }
  std::map<std::string, std::string> values;
  for (const auto& record : wandb_records(file)) {
    if (record.texts.contains(2)) values.merge(items_of(record.message(2)));
  }
  const auto shown = detail::json_loads(values.at("group/im"));
  EXPECT_EQ(shown.at("_type"), Value("images/separated"));
  EXPECT_EQ(shown.at("count"), Value(2));
  EXPECT_TRUE(fs::exists(run / "files" / shown.at("filenames").items()[0].as_string()));
  const auto table = detail::json_loads(values.at("tab"));
  const auto path = run / "files" / table.at("path").as_string();
  EXPECT_EQ(test::content_of(path), R"({"columns": ["x", "y"], "data": [[1, "a"], [2.5, null]]})");
  EXPECT_EQ(table.at("sha256"), Value(detail::tracking::sha256_hex(test::content_of(path))));
}

TEST(Trackers, NameSettingsThatTheyDoNotHave) {
  EXPECT_EQ(
      message_of<ArgumentError>([] {
        static_cast<void>(make_tracker("wandb", {.project_name = "p", .kwargs = {{"nam", "x"}}}));
      }),
      "The tracker wandb has no setting 'nam'. Did you mean 'name'? It has: name, id, entity, "
      "group, job_type, notes, tags, dir, config, mode.");
  EXPECT_NE(message_of<UnsupportedError>([] {
              static_cast<void>(make_tracker("wandb", {.kwargs = {{"mode", "online"}}}));
            }).find("wandb sync"),
            std::string::npos);
  EXPECT_NE(message_of<UnsupportedError>([] {
              make_tracker("trackio", {.project_name = "p"})->log_images({});
            }).find("The tracker trackio takes no images"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate
