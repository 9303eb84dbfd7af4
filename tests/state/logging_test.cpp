#include "accelerate/logging.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"

namespace accelerate {
namespace {

// A state of one process, and everything that loggers write.
class Logging : public ::testing::Test {
 protected:
  void SetUp() override {
    basic_config({.level = LogLevel::kWarning,
                  .sink = [this](const LogEntry& record) { records.push_back(record); }});
    PartialState state({.cpu = true});
  }
  void TearDown() override {
    basic_config({.level = LogLevel::kWarning});
    PartialState::_reset_state();
  }

  [[nodiscard]] std::vector<std::string> lines() const {
    std::vector<std::string> result;
    for (const auto& record : records) result.push_back(record.line);
    return result;
  }

  std::vector<LogEntry> records;
};

using Lines = std::vector<std::string>;

// A wrapper that is not to be named as the origin.
void log_for_caller(const MultiProcessAdapter& logger,
                    std::source_location where = std::source_location::current()) {
  logger.warning("through a wrapper", {.where = where});
}

TEST_F(Logging, PutsTheRankBeforeTheMessage) {
  get_logger("trainer").warning("low on memory");
  EXPECT_EQ(lines(), (Lines{"WARNING:trainer:[RANK 0] low on memory"}));
  EXPECT_EQ(records[0].message, "[RANK 0] low on memory");
}

TEST_F(Logging, RefusesToSpeakBeforeThereIsAStateWhateverTheLevel) {
  PartialState::_reset_state();
  try {
    get_logger("early").debug("would be filtered anyway");
    FAIL() << "logged without a state";
  } catch (const StateError& error) {
    EXPECT_STREQ(error.what(),
                 "The logger 'early' was used before there is a state, so it does not know which "
                 "process this is. Make a PartialState or an Accelerator first.");
  }
}

TEST_F(Logging, StartsAtWarning) {
  const auto logger = get_logger("levels_default");
  logger.debug("no");
  logger.info("no");
  logger.warning("w");
  logger.error("e");
  logger.critical("c");
  logger.log(static_cast<LogLevel>(35), "between");
  EXPECT_EQ(lines(), (Lines{"WARNING:levels_default:[RANK 0] w", "ERROR:levels_default:[RANK 0] e",
                            "CRITICAL:levels_default:[RANK 0] c",
                            "Level 35:levels_default:[RANK 0] between"}));
}

TEST_F(Logging, ALevelGivenToOneLoggerBecomesThatOfTheRootToo) {
  const auto other = get_logger("levels_other");
  EXPECT_FALSE(other.is_enabled_for(LogLevel::kDebug));
  const auto logger = get_logger("levels_given", "debug");
  EXPECT_TRUE(logger.is_enabled_for(LogLevel::kDebug));
  EXPECT_TRUE(other.is_enabled_for(LogLevel::kDebug));
}

TEST_F(Logging, TakesItsLevelFromTheEnvironment) {
  const auto patched = patch_environment({{"ACCELERATE_LOG_LEVEL", "info"}});
  const auto logger = get_logger("levels_environment");
  EXPECT_TRUE(logger.is_enabled_for(LogLevel::kInfo));
  EXPECT_FALSE(logger.is_enabled_for(LogLevel::kDebug));
  EXPECT_FALSE(get_logger("levels_argument", "ERROR").is_enabled_for(LogLevel::kWarning));
}

TEST_F(Logging, RefusesALevelThatDoesNotExist) {
  const auto patched = patch_environment({{"ACCELERATE_LOG_LEVEL", "chatty"}});
  try {
    static_cast<void>(get_logger("levels_wrong"));
    FAIL() << "took a level that does not exist";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(
        error.what(),
        "ACCELERATE_LOG_LEVEL is 'chatty', which is not a log level. Choose one of: DEBUG, "
        "INFO, WARNING, ERROR, CRITICAL.");
  }
  EXPECT_THROW(static_cast<void>(get_logger("levels_wrong", "chatty")), ConfigError);
}

TEST_F(Logging, ANameWithDotsFollowsTheNameBeforeThem) {
  const auto parent = get_logger("family");
  const auto child = get_logger("family.child");
  parent.set_level(LogLevel::kError);
  EXPECT_FALSE(child.is_enabled_for(LogLevel::kWarning));
  child.set_level(LogLevel::kDebug);
  EXPECT_TRUE(child.is_enabled_for(LogLevel::kDebug));
  EXPECT_FALSE(parent.is_enabled_for(LogLevel::kDebug));
  parent.set_level(LogLevel::kNotset);
  child.set_level(LogLevel::kNotset);
}

TEST_F(Logging, NamesTheFileLineAndFunctionOfTheCaller) {
  const auto line = std::source_location::current().line() + 1;
  get_logger("origin").warning("from here");
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].where.line(), line);
  EXPECT_TRUE(std::string_view(records[0].where.file_name()).ends_with("logging_test.cpp"));
  EXPECT_NE(std::string_view(records[0].where.function_name()).find("TestBody"),
            std::string_view::npos);
}

TEST_F(Logging, AWrapperCanNameItsOwnCaller) {
  const auto line = std::source_location::current().line() + 1;
  log_for_caller(get_logger("origin"));
  EXPECT_EQ(records.at(0).where.line(), line);
}

TEST_F(Logging, FormatsWithPythonsFields) {
  basic_config({.format = "%(levelname)-8s|%(filename)s|%(funcName)s|%(message)s",
                .sink = [this](const LogEntry& record) { records.push_back(record); }});
  get_logger("formats").error("x");
  EXPECT_EQ(lines(), (Lines{"ERROR   |logging_test.cpp|TestBody|[RANK 0] x"}));
}

TEST_F(Logging, WarnsOnceForOneTextAndChoiceOfProcesses) {
  const auto logger = get_logger("once");
  const auto copy = logger;
  logger.warning_once("slow path");
  copy.warning_once("slow path");
  logger.warning_once("another");
  logger.warning_once("slow path", {.main_process_only = false});
  EXPECT_EQ(records.size(), 3u);
  // Another logger has a memory of its own.
  get_logger("once").warning_once("slow path");
  EXPECT_EQ(records.size(), 4u);
}

TEST_F(Logging, SpeaksAtOnceWhenAloneEvenIfInOrder) {
  get_logger("alone").warning("only me", {.in_order = true});
  EXPECT_EQ(lines(), (Lines{"WARNING:alone:[RANK 0] only me"}));
}

TEST_F(Logging, CarriesTheWarningsOfTheLibraryItself) {
  static_cast<void>(convert_dict_to_env_variables({{"BROKEN", "a b"}}));
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].name, "accelerate");
  EXPECT_TRUE(records[0].message.starts_with("[RANK 0] ")) << records[0].message;
}

TEST_F(Logging, GoesToStderrWithoutASink) {
  basic_config();
  ::testing::internal::CaptureStderr();
  get_logger("plain").warning("to stderr");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "WARNING:plain:[RANK 0] to stderr\n");
}

}  // namespace
}  // namespace accelerate
