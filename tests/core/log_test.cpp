#include "core/log.h"

#include <gtest/gtest.h>

#include <ctime>
#include <thread>
#include <vector>

#include "accelerate/errors.h"
#include "core/log_format.h"

namespace accelerate::detail::inline core {
namespace {

// 2024-02-03 04:05:06.789 in UTC.
LogEntry example() {
  ::setenv("TZ", "UTC", 1);
  ::tzset();
  LogEntry record{
      .name = "trainer.data",
      .level = LogLevel::kWarning,
      .message = "[RANK 1] hello",
      .where = std::source_location::current(),
      .created = std::chrono::system_clock::time_point(std::chrono::milliseconds(1706933106789)),
      .line = {}};
  return record;
}

std::string formatted(const std::string& format, const std::string& datefmt = {}) {
  return LogFormat(format, datefmt).apply(example());
}

std::string error_of(const std::string& format) {
  try {
    static_cast<void>(LogFormat(format, {}));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

// What the loggers of this process write, until the end of the scope.
struct Listening {
  Listening() {
    basic_config({.level = LogLevel::kWarning,
                  .sink = [this](const LogEntry& record) { lines.push_back(record.line); }});
  }
  ~Listening() { basic_config({.level = LogLevel::kWarning}); }
  std::vector<std::string> lines;
};

TEST(LogFormat, FillsInPythonsFields) {
  EXPECT_EQ(formatted("%(levelname)s:%(name)s:%(message)s"), "WARNING:trainer.data:[RANK 1] hello");
  EXPECT_EQ(formatted("%(asctime)s %(levelno)d"), "2024-02-03 04:05:06,789 30");
  EXPECT_EQ(formatted("%(filename)s %(module)s %(funcName)s"), "log_test.cpp log_test example");
  EXPECT_EQ(formatted("%(msecs)03d|%(created)f"), "789|1706933106.789000");
}

TEST(LogFormat, FollowsWidthsAndThePercentSign) {
  EXPECT_EQ(formatted("[%(levelname)-9s] [%(levelname)9s] 100%%"), "[WARNING  ] [  WARNING] 100%");
  EXPECT_EQ(formatted("%(levelname).4s"), "WARN");
}

TEST(LogFormat, TakesAFormatForTheTime) {
  EXPECT_EQ(formatted("%(asctime)s", "%d.%m.%Y"), "03.02.2024");
}

TEST(LogFormat, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(
      error_of("%(levelnam)s").substr(0, 102),
      "The log format '%(levelnam)s' has a field 'levelnam' that does not exist. Did you mean "
      "'levelname'? Fi");
  EXPECT_EQ(error_of("50%"),
            "The log format '50%' has a '%' that begins no field. Write %% for the sign itself.");
  EXPECT_EQ(error_of("%(name)d"),
            "The log format '%(name)d' asks for 'name' as 'd', which it is not.");
  EXPECT_EQ(error_of("%(name)9999999999s"),
            "The log format '%(name)9999999999s' gives 'name' the width '9999999999', which is "
            "none.");
}

TEST(BareFunctionName, DropsTypesParametersAndScopes) {
  EXPECT_EQ(bare_function_name("int main(int, char**)"), "main");
  EXPECT_EQ(bare_function_name("void ns::Trainer::step(std::function<void(int)>)"), "step");
  EXPECT_EQ(bare_function_name("void f(int)::<lambda(auto:1)> [with auto:1 = int]"), "f");
  EXPECT_EQ(bare_function_name("T ns::g(T) [with T = std::pair<int, int>]"), "g");
}

TEST(LogLevels, AreReadInAnyCaseAndRefusedWithTheChoices) {
  EXPECT_EQ(from_string<LogLevel>("debug"), LogLevel::kDebug);
  EXPECT_EQ(from_string<LogLevel>("WARN"), LogLevel::kWarning);
  EXPECT_EQ(to_string(LogLevel::kCritical), "CRITICAL");
  EXPECT_EQ(to_string(static_cast<LogLevel>(35)), "Level 35");
  try {
    static_cast<void>(from_string<LogLevel>("LOUD", "ACCELERATE_LOG_LEVEL"));
    FAIL() << "took a level that does not exist";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "ACCELERATE_LOG_LEVEL is 'LOUD', which is not a log level. Choose one of: DEBUG, "
                 "INFO, WARNING, ERROR, CRITICAL.");
  }
}

TEST(LogLevels, FollowTheDotsUpToTheRoot) {
  set_log_level("levels_test", LogLevel::kError);
  EXPECT_EQ(effective_log_level("levels_test.inner.most"), LogLevel::kError);
  EXPECT_EQ(effective_log_level("levels_test_other"), LogLevel::kWarning);
  set_log_level("levels_test", LogLevel::kNotset);
  EXPECT_EQ(effective_log_level("levels_test.inner"), LogLevel::kWarning);
}

TEST(LibraryMessages, GoThroughTheSinkUnderTheNameOfTheLibrary) {
  Listening listening;
  warn("mind the gap");
  info("not at this level");
  EXPECT_EQ(listening.lines, (std::vector<std::string>{"WARNING:accelerate:mind the gap"}));
}

TEST(LibraryMessages, AreGivenOnceWhereThatIsWanted) {
  Listening listening;
  for (int i = 0; i < 3; ++i) warn_once("only the first time");
  EXPECT_EQ(listening.lines.size(), 1u);
}

TEST(LibraryMessages, ComeFromTheMainProcessAndNameTheRank) {
  Listening listening;
  set_log_process_lookup(
      []() -> std::optional<LogProcess> { return LogProcess{.rank = 3, .is_main = true}; });
  warn("by the main process");
  set_log_process_lookup(
      []() -> std::optional<LogProcess> { return LogProcess{.rank = 1, .is_main = false}; });
  warn("by another");
  set_log_process_lookup(nullptr);
  EXPECT_EQ(listening.lines,
            (std::vector<std::string>{"WARNING:accelerate:[RANK 3] by the main process"}));
}

TEST(LibraryMessages, FromManyThreadsArriveWholeAndOneAtATime) {
  Listening listening;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([] {
        for (int i = 0; i < 100; ++i) warn("the same text");
      });
    }
  }
  EXPECT_EQ(listening.lines, std::vector<std::string>(400, "WARNING:accelerate:the same text"));
}

TEST(LibraryMessages, GoToStderrByDefaultInTheFormatThatIsSet) {
  basic_config({.format = "%(levelname)s <%(message)s>"});
  ::testing::internal::CaptureStderr();
  warn("straight out");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "WARNING <straight out>\n");
  basic_config();
}

}  // namespace
}  // namespace accelerate::detail::inline core
