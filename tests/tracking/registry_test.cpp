#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/message_of.h"
#include "tracking/trackers.h"

namespace accelerate {
namespace {

using detail::tracking::TrackerSet;
using test::message_of;
using Names = std::vector<std::string>;

/// Remembers its calls.
class Recorder : public GeneralTracker {
 public:
  explicit Recorder(Names& calls, std::string name = "mine")
      : calls_(calls), name_(std::move(name)) {}
  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] bool requires_logging_directory() const override { return false; }
  [[nodiscard]] std::any tracker() override { return &calls_; }
  void start() override { note("start"); }
  void store_init_configuration(const Value::Dict& values) override {
    note("config " + Value(values).repr());
  }
  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    note("log " + Value(values).repr() + " " + Value(step).repr() + " " + Value(kwargs).repr());
    if (values.contains("bad")) throw std::runtime_error("it is bad.");
  }
  void finish() override { note("finish"); }

 protected:
  void note(const std::string& call) { calls_.push_back(name_ + ": " + call); }

 private:
  Names& calls_;
  std::string name_;
};

class NeedsFolder : public Recorder {
 public:
  using Recorder::Recorder;
  [[nodiscard]] bool requires_logging_directory() const override { return true; }
};

class Failing : public Recorder {
 public:
  using Recorder::Recorder;
  void start() override { throw ConfigError("it does not start."); }
};

Names names(const std::vector<TrackerChoice>& choices) {
  Names result;
  for (const auto& choice : choices) result.push_back(choice.name());
  return result;
}

TEST(FilterTrackers, KeepsObjectsAndEachNameOnce) {
  Names calls;
  const auto mine = std::make_shared<Recorder>(calls);
  EXPECT_EQ(names(filter_trackers({})), Names{});
  EXPECT_EQ(names(filter_trackers({LoggerType::kMlflow, mine, "mlflow", mine, "jsonl"}, "logs")),
            (Names{"mlflow", "mine", "mine", "jsonl"}));
  EXPECT_EQ(names(filter_trackers({std::make_shared<NeedsFolder>(calls)})), Names{"mine"});
}

TEST(FilterTrackers, TakesAllThatAreAvailable) {
  Names calls;
  auto expected = get_available_trackers();
  EXPECT_EQ(Names(expected.begin(), expected.begin() + 7),
            (Names{"tensorboard", "wandb", "mlflow", "dvclive", "trackio", "jsonl", "csv"}));
  expected.insert(expected.begin(), "mine");
  EXPECT_EQ(names(filter_trackers({"wandb", LoggerType::kAll, std::make_shared<Recorder>(calls)},
                                  "logs")),
            expected);
}

TEST(FilterTrackers, SaysWhatIsWrong) {
  EXPECT_EQ(
      message_of<ConfigError>([] { static_cast<void>(filter_trackers({"wanb"})); }).substr(0, 66),
      "Unsupported logging capability: wanb. Choose between [all, tensorb");
  for (const auto& choice : {TrackerChoice("tensorboard"), TrackerChoice(LoggerType::kAll)}) {
    EXPECT_EQ(
        message_of<ConfigError>([&] { static_cast<void>(filter_trackers({choice})); }),
        "Logging with `tensorboard` requires a `logging_dir` to be passed in. Set project_dir, "
        "or logging_dir of project_config.");
  }
  for (const auto type :
       {LoggerType::kAim, LoggerType::kClearml, LoggerType::kCometml, LoggerType::kSwanlab}) {
    const auto message =
        message_of<UnsupportedError>([&] { static_cast<void>(filter_trackers({type}, "logs")); });
    EXPECT_NE(message.find(to_string(type) + ", which is not here: "), std::string::npos)
        << message;
    EXPECT_NE(message.find("Log with tensorboard"), std::string::npos) << message;
  }
  EXPECT_THROW(TrackerChoice(std::shared_ptr<GeneralTracker>()), ArgumentError);
}

TEST(RegisterTrackerClass, MakesATrackerAvailableByName) {
  const test::CapturedLog log;
  Names calls;
  TrackerArguments arguments;
  const auto factory = [&](const TrackerArguments& given) {
    arguments = given;
    return std::make_shared<Recorder>(calls, "special");
  };
  register_tracker_class("special", true, factory);
  EXPECT_EQ(get_available_trackers().back(), "special");
  EXPECT_THROW(static_cast<void>(filter_trackers({"special"})), ConfigError);
  TrackerSet set(filter_trackers({"special"}, "logs"), "logs");
  set.start("project", {{"lr", 1}}, {{"special", Value::Dict{{"a", 2}}}, {"other", nullptr}});
  EXPECT_EQ(arguments.project_name, "project");
  EXPECT_EQ(arguments.logging_dir, "logs");
  EXPECT_EQ(arguments.kwargs, (Value::Dict{{"a", 2}}));
  EXPECT_EQ(calls, (Names{"special: start", "special: config {'lr': 1}"}));
  EXPECT_TRUE(log.messages().empty());
  register_tracker_class("special", false, factory);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_NE(log.messages()[0].find("'special' already"), std::string::npos);
  EXPECT_THROW(register_tracker_class("", false, factory), ArgumentError);
  EXPECT_THROW(register_tracker_class("x", false, {}), ArgumentError);
}

TEST(TrackerSetTest, StartsFeedsAndEndsItsTrackersInOrder) {
  Names calls;
  TrackerSet set({std::make_shared<Recorder>(calls, "a"), std::make_shared<Recorder>(calls, "b")},
                 {});
  EXPECT_TRUE(set.waits_for_start());
  set.start("project", {}, {});
  set.log({{"loss", 0.5}}, 3, {{"b", Value::Dict{{"k", 1}}}});
  EXPECT_EQ(set.get("b").name(), "b");
  EXPECT_EQ(message_of<ArgumentError>([&] { static_cast<void>(set.get("c")); }),
            "c is not an available tracker stored inside the `Accelerator`. Choose one of: a, b.");
  set.finish();
  set.log({{"loss", 1}}, 4, {});
  EXPECT_EQ(calls, (Names{"a: start", "b: start", "a: log {'loss': 0.5} 3 {}",
                          "b: log {'loss': 0.5} 3 {'k': 1}", "a: finish", "b: finish"}));
}

TEST(TrackerSetTest, TurnsErrorsWhileLoggingIntoOneWarning) {
  const test::CapturedLog log;
  Names calls;
  TrackerSet set({std::make_shared<Recorder>(calls, "a"), std::make_shared<Recorder>(calls, "b")},
                 {});
  set.start("project", {}, {});
  for (int i = 0; i < 5; ++i) set.log({{"bad", 1}}, i, {});
  EXPECT_EQ(calls.size(), 12U);
  ASSERT_EQ(log.messages().size(), 2U);
  EXPECT_EQ(log.messages()[0],
            "The tracker a did not log: it is bad. More of its errors are not shown.");
}

TEST(TrackerSetTest, KeepsTrackersAliveUntilTheNextStart) {
  const test::CapturedLog log;
  Names calls;
  std::weak_ptr<GeneralTracker> alive;
  register_tracker_class("short lived", false, [&](const TrackerArguments&) {
    const auto made = std::make_shared<Recorder>(calls, "short lived");
    alive = made;
    return made;
  });
  TrackerSet set({"short lived", std::make_shared<Recorder>(calls, "object")}, {});
  set.start("project", {}, {});
  const auto first = alive;
  set.log({{"bad", 1}}, 0, {});
  set.finish();
  EXPECT_FALSE(set.running());
  ASSERT_FALSE(first.expired());
  EXPECT_EQ(&set.get("short lived"), first.lock().get());
  set.start("project", {}, {});
  EXPECT_TRUE(first.expired());
  set.log({{"bad", 1}}, 0, {});
  EXPECT_EQ(log.messages().size(), 4U);  // of each tracker, after each start
}

TEST(TrackerSetTest, ThrowsIfOneCannotStartAndEndsTheOthers) {
  Names calls;
  TrackerSet set({std::make_shared<Recorder>(calls, "a"), std::make_shared<Failing>(calls, "b")},
                 {});
  EXPECT_EQ(message_of<ConfigError>([&] { set.start("project", {{"lr", 1}}, {}); }),
            "it does not start.");
  EXPECT_EQ(calls, (Names{"a: start", "a: finish"}));
  EXPECT_FALSE(set.running());
}

TEST(TrackerSetTest, HasABlankTrackerWhereNothingWasStarted) {
  TrackerSet set({}, {});
  auto& blank = set.get("whatever");
  blank.log({{"loss", 1}});
  blank.log_images({});
  blank.log_table("t", {});
  EXPECT_FALSE(blank.tracker().has_value());
}

}  // namespace
}  // namespace accelerate
