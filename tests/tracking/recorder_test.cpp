#include "tracking/recorder.h"

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/captured_log.h"
#include "core/files.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "support/command.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using std::chrono::milliseconds;

/// What a process has written, line by line; a last line without an end is left out.
std::vector<Json> lines_in(const fs::path& folder, int rank = 0) {
  std::vector<Json> lines;
  const auto text = read_whole_file(folder / str("rank_", rank, ".jsonl"));
  for (const auto& line : split(text.substr(0, text.rfind('\n')), '\n')) {
    lines.push_back(Json::parse(line));
  }
  return lines;
}

std::vector<Json> with(const std::vector<Json>& lines, const char* key) {
  std::vector<Json> found;
  for (const auto& line : lines) {
    if (line.contains(key)) found.push_back(line);
  }
  return found;
}

TEST(RecorderTest, OfAForkedCopyWritesNothingAndEnds) {
  const test::Folder folder;
  auto recorder = std::make_unique<Recorder>(RecorderOptions{.folder = folder.path()});
  std::this_thread::sleep_for(milliseconds(100));  // its thread waits now
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    recorder->log({{"loss", 0.5}}, 1);
    const bool due = recorder->count_step();
    recorder.reset();
    ::_exit(due ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  recorder->finish();
  EXPECT_TRUE(with(lines_in(folder.path()), "values").empty());
}

TEST(RecorderTest, WritesStartValuesStepsMemoryAndEnd) {
  const test::Folder folder;
  std::int64_t waited = 0;
  Recorder recorder(
      {.folder = folder.path() / "a", .rank = 3, .world = 4, .nanoseconds_waited = [&] {
         return waited;
       }});
  recorder.describe("spirals", {{"lr", 0.1}});
  recorder.log({{"loss", 0.5}, {"nan", std::nan("")}, {"text", "x"}, {"a", Value::Dict{{"b", 1}}}},
               7);
  EXPECT_FALSE(recorder.count_step());
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    waited += 5'000'000;
    if (recorder.count_step()) recorder.write_steps({.learning_rate = 0.25, .samples = 64});
  }
  recorder.finish();
  recorder.log({{"loss", 0.5}}, 8);
  recorder.finish();

  const auto lines = lines_in(folder.path() / "a", 3);
  EXPECT_EQ(lines.front()["start"]["rank"], 3);
  EXPECT_EQ(lines.front()["start"]["world"], 4);
  EXPECT_EQ(with(lines, "name").front()["config"], Json({{"lr", 0.1}}));
  ASSERT_EQ(with(lines, "values").size(), 1U);
  EXPECT_EQ(with(lines, "values").front()["values"],
            Json({{"loss", 0.5}, {"nan", "NaN"}, {"a/b", 1}}));
  const auto steps = with(lines, "steps");
  ASSERT_GE(steps.size(), 2U);
  EXPECT_GE(steps.front()["ms"], 50);
  EXPECT_EQ(steps.front()["wait"], 5);
  EXPECT_EQ(steps.front()["lr"], 0.25);
  EXPECT_EQ(steps.front()["samples"], 64);
  EXPECT_EQ(steps.back()["steps"], 5);
  EXPECT_GT(with(lines, "memory").front()["memory"], 1'000'000);
  EXPECT_EQ(lines.back()["end"], "finished");
}

TEST(RecorderTest, SaysThatTheRunFailedIfAnExceptionEndsIt) {
  const test::Folder folder;
  try {
    const Recorder recorder({.folder = folder.path()});
    throw std::runtime_error("an error");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(lines_in(folder.path()).back()["end"], "failed");
  }
}

TEST(RecorderTest, LosesLessThanASecondIfTheProcessIsKilled) {
  const test::Folder folder;
  ProcessSet children;
  children.fork({}, [&] {
    Recorder recorder({.folder = folder.path()});
    for (int i = 0;; ++i) {
      recorder.log({{"i", i}}, i);
      std::this_thread::sleep_for(milliseconds(1));
    }
    return 0;
  });
  ASSERT_TRUE(test::eventually([&] { return fs::exists(folder.path() / "rank_0.jsonl"); }));
  std::this_thread::sleep_for(milliseconds(1500));
  const auto now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch());
  children.terminate(milliseconds(0));
  EXPECT_GT(lines_in(folder.path()).back()["time"].get<double>(),
            now.count() - test::patient(test::Seconds(1)).count());
}

TEST(RecorderTest, WarnsOnceAndGoesOnIfTheDiskIsFull) {
  const test::CapturedLog log;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const test::Folder folder;
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    Recorder recorder({.folder = folder.path()});
    ASSERT_TRUE(test::eventually([&] { return fs::exists(folder.path() / "rank_0.jsonl"); }));
    const rlimit none{.rlim_cur = 300, .rlim_max = before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
    for (int i = 0; i < 20; ++i) {
      recorder.log({{"i", i}}, i);
      std::this_thread::sleep_for(milliseconds(50));
    }
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  }
  std::signal(SIGXFSZ, handler);
  const auto lines = lines_in(folder.path());
  EXPECT_EQ(with(lines, "values").size(), 20U);  // written when it works again
  EXPECT_EQ(test::count_of(join(log.messages(), "\n"), "The tracker monitor cannot write"), 1);
}

TEST(RecorderTest, LeavesOutCallsOfLogThatAreTooLong) {
  const test::CapturedLog log;
  const test::Folder folder;
  {
    Recorder recorder({.folder = folder.path()});
    recorder.log({{std::string(100'000, 'x'), 1}}, 1);
    Value::Dict many;
    for (int i = 0; i < 1000; ++i) many.set(str("value ", i), i);
    recorder.log(many, 2);
  }
  const auto values = with(lines_in(folder.path()), "values");
  ASSERT_EQ(values.size(), 1U);
  EXPECT_EQ(values.front()["values"].size(), 256U);
  EXPECT_NE(join(log.messages(), "\n").find("has left out 1 entry"), std::string::npos);
}

}  // namespace
}  // namespace accelerate::detail::tracking
