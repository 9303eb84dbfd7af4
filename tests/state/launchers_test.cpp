// What launchers refuse, and how `record` reports. Launches are in launchers_multi_test.cpp.
#include "accelerate/launchers.h"

#include <gtest/gtest.h>

#include <c10/util/Exception.h>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/captured_log.h"

namespace accelerate {
namespace {

template <class E>
std::string refusal_of(const NotebookLaunchOptions& options) {
  bool ran = false;
  try {
    notebook_launcher([&] { ran = true; }, options);
  } catch (const E& error) {
    EXPECT_FALSE(ran);
    return error.what();
  }
  return "no error";
}

struct Recorded {
  int code = 0;
  std::string error_output;
  nlohmann::json file;
};

// Runs `record` with an error file in a temporary folder.
template <class F>
Recorded recorded(F body) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("accelerate-record-" + std::to_string(::getpid())) / "error.json";
  const auto patched = patch_environment({{"TORCHELASTIC_ERROR_FILE", path.string()}});
  Recorded result;
  ::testing::internal::CaptureStderr();
  result.code = record(body);
  result.error_output = ::testing::internal::GetCapturedStderr();
  if (std::ifstream file(path); file) result.file = nlohmann::json::parse(file);
  std::filesystem::remove_all(path.parent_path());
  return result;
}

TEST(Record, ReturnsWhatTheProgramReturns) {
  EXPECT_EQ(record([] { return 7; }), 7);
  EXPECT_EQ(record([] {}), 0);
  const auto result = recorded([] {});
  EXPECT_EQ(result.error_output, "");
  EXPECT_TRUE(result.file.is_null());
}

TEST(Record, GivesEachKindOfErrorItsExitCode) {
  EXPECT_EQ(recorded([] { throw ConfigError("x"); }).code, 2);
  EXPECT_EQ(recorded([] { throw CommError("x", 3); }).code, 70);
  EXPECT_EQ(recorded([] { throw DistributedOperationException("x"); }).code, 70);
  EXPECT_EQ(recorded([] { throw StateError("x"); }).code, 1);
  EXPECT_EQ(recorded([] { throw std::logic_error("x"); }).code, 1);
  EXPECT_EQ(recorded([] { throw 3; }).code, 1);
}

TEST(Record, PrintsTheMessageOnStderr) {
  EXPECT_EQ(recorded([] { throw ConfigError("num_processes is -1."); }).error_output,
            "accelerate: num_processes is -1.\n");
  EXPECT_TRUE(
      recorded([] { throw 3; }).error_output.starts_with("accelerate: The program threw 3."));
}

TEST(Record, WritesTheErrorFileThatLaunchersRead) {
  const auto result = recorded([] { throw StateError("too early"); });
  const auto& message = result.file.at("message");
  EXPECT_EQ(message.at("message"), "accelerate::StateError: too early");
  EXPECT_EQ(message.at("extraInfo").at("py_callstack"), "accelerate::StateError: too early");
  const auto timestamp = message.at("extraInfo").at("timestamp").get<std::string>();
  EXPECT_EQ(timestamp.find_first_not_of("0123456789"), std::string::npos);
}

TEST(Record, KeepsTheStackOfLibTorchOutOfTheMessage) {
  const auto result = recorded([] { TORCH_CHECK(false, "shapes differ"); });
  EXPECT_EQ(result.error_output, "accelerate: shapes differ\n");
  const auto& message = result.file.at("message");
  EXPECT_EQ(message.at("message"), "c10::Error: shapes differ");
  EXPECT_TRUE(message.at("extraInfo")
                  .at("py_callstack")
                  .get<std::string>()
                  .starts_with("Exception raised from"));
}

TEST(NotebookLauncher, NeedsToKnowHowManyProcesses) {
  EXPECT_EQ(refusal_of<ConfigError>({}),
            "notebook_launcher: num_processes is not given. Say how many processes shall run, such "
            "as {.num_processes = 2}.");
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 0}),
            "notebook_launcher: num_processes is 0; at least one process is needed.");
}

TEST(NotebookLauncher, RefusesANodeRankBeyondTheNodes) {
  EXPECT_EQ(
      refusal_of<ConfigError>({.num_processes = 2, .node_rank = 1}),
      "notebook_launcher: node_rank is 1, which must be less than the number of nodes (1) and "
      "not negative.");
}

TEST(NotebookLauncher, RefusesWhatIsNoPortOrRendezvous) {
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .use_port = "http"}),
            "notebook_launcher: use_port is 'http', which is not a port. Give a number from 0 to "
            "65535; 0 takes a free one.");
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .rdzv_backend = "etcd"}),
            "notebook_launcher: rdzv_backend is 'etcd'. Choose one of: static, c10d.");
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .monitor_interval = 0}),
            "notebook_launcher: monitor_interval is 0 seconds; it must be positive.");
}

TEST(NotebookLauncher, LeavesToTheCommandLineWhatLaunchersMustAgreeOn) {
  EXPECT_EQ(refusal_of<UnsupportedError>({.num_processes = 2, .num_nodes = 3, .max_restarts = 1}),
            "notebook_launcher: max_restarts is 1 on 3 machines, whose launchers would have to "
            "restart together. Start the program with `accelerate launch --max_restarts 1` on each "
            "machine.");
  EXPECT_EQ(
      refusal_of<UnsupportedError>({.num_processes = 2, .num_nodes = 2, .rdzv_backend = "c10d"}),
      "notebook_launcher: on several machines rdzv_backend must be 'static'. For 'c10d' start the "
      "program with `accelerate launch --rdzv_backend c10d` on each machine.");
}

TEST(NotebookLauncher, NeedsAPortThatAllMachinesKnow) {
  const std::string text =
      "notebook_launcher: a launch on several machines needs a port that all of them know. Give "
      "the same use_port, such as \"29500\", on each.";
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .use_port = "0", .num_nodes = 2}), text);
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .num_nodes = 2, .rdzv_endpoint = "[::1]"}),
            text);
}

TEST(NotebookLauncher, RefusesSettingsThatDoNotExist) {
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .max_restarts = -1}),
            "notebook_launcher: max_restarts is -1; it must not be negative.");
  EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .rdzv_conf = {{"time_out", "9"}}}),
            "notebook_launcher: rdzv_conf has no setting 'time_out'. There are: timeout, "
            "join_timeout, last_call_timeout, close_timeout, read_timeout, rank.");
  for (const std::string text : {"soon", "", "-1", "0", "9 s", "nan", "inf"}) {
    EXPECT_EQ(refusal_of<ConfigError>({.num_processes = 2, .rdzv_conf = {{"timeout", text}}}),
              "notebook_launcher: rdzv_conf's timeout is '" + text +
                  "', which is not a positive number of seconds.");
  }
}

TEST(NotebookLauncher, SaysWhichSettingsHaveNoEffect) {
  const test::CapturedLog log;
  const NotebookLaunchOptions options{.num_processes = 1,
                                      .rdzv_conf = {{"read_timeout", "60"}, {"timeout", "9"}}};
  ::testing::internal::CaptureStdout();
  notebook_launcher([] {}, options);
  notebook_launcher([] {}, options);
  (void)::testing::internal::GetCapturedStdout();
  EXPECT_EQ(log.messages(), std::vector<std::string>{
                                "notebook_launcher: rdzv_conf's read_timeout is '60', which has no "
                                "effect: only timeout and join_timeout count here. Leave it out."});
}

TEST(NotebookLauncher, RunsOneProcessRightHere) {
  int given = 0;
  std::string precision;
  ::testing::internal::CaptureStdout();
  notebook_launcher(
      [&](int number) {
        given = number;
        precision = parse_choice_from_env("ACCELERATE_MIXED_PRECISION");
      },
      {.num_processes = 1, .mixed_precision = PrecisionType::kBf16}, 42);
  const auto output = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(given, 42);
  EXPECT_EQ(precision, "bf16");
  EXPECT_EQ(std::getenv("ACCELERATE_MIXED_PRECISION"), nullptr);
  EXPECT_TRUE(output.starts_with("Launching training on ")) << output;
}

TEST(NotebookLauncher, LetsErrorsOfASingleProcessThrough) {
  ::testing::internal::CaptureStdout();
  EXPECT_THROW(notebook_launcher([] { throw std::out_of_range("x"); }, {.num_processes = 1}),
               std::out_of_range);
  static_cast<void>(::testing::internal::GetCapturedStdout());
}

TEST(DebugLauncher, NeedsAtLeastOneProcess) {
  try {
    debug_launcher([] {}, {.num_processes = 0});
    FAIL() << "launched nothing";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "debug_launcher: num_processes is 0; at least one process is needed.");
  }
}

TEST(DebugLauncher, DoesNotCopyAProcessThatHasAState) {
  PartialState state({.cpu = true});
  try {
    debug_launcher([] {});
    ADD_FAILURE() << "copied a process with a state";
  } catch (const StateError& error) {
    EXPECT_STREQ(error.what(),
                 "debug_launcher: this process has a PartialState already, and its copies would "
                 "take themselves for it. Make it inside the function, or use "
                 "StartMethod::kSpawn.");
  }
  PartialState::_reset_state();
}

TEST(StartMethods, AreSpelledAsInPython) {
  EXPECT_EQ(to_string(StartMethod::kFork), "fork");
  EXPECT_EQ(from_string<StartMethod>("spawn"), StartMethod::kSpawn);
}

}  // namespace
}  // namespace accelerate
