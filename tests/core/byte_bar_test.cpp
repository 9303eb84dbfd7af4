// Who sees the bar of long work, and where. How a bar looks is in progress_line_test.cpp.
#include "core/byte_bar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "support/stderr_terminal.h"

namespace accelerate {
namespace {

using detail::ByteBar;
using detail::kBytesWorthABar;

constexpr auto kMuch = 2 * kBytesWorthABar;

/// What a terminal gets while a bar is open.
std::string on_terminal(std::optional<bool> asked, std::int64_t total = kMuch) {
  const test::StderrTerminal terminal(60);
  const ByteBar bar("saving", total, asked);
  return terminal.read();
}

/// What a log file has when all is done.
std::string in_log_file(std::optional<bool> asked) {
  ::testing::internal::CaptureStderr();
  {
    ByteBar bar("saving", kMuch, asked);
    for (int i = 0; i < 4; ++i) bar.add(kMuch / 4);
  }
  return ::testing::internal::GetCapturedStderr();
}

TEST(ByteBar, IsShownOnlyIfItIsAskedFor) {
  EXPECT_TRUE(on_terminal(std::nullopt).empty());
  EXPECT_TRUE(on_terminal(false).empty());
  EXPECT_NE(on_terminal(true).find("saving:   0%|"), std::string::npos);
}

TEST(ByteBar, IsAskedForByTheVariable) {
  const auto patched = patch_environment({{"ACCELERATE_PROGRESS", "1"}});
  EXPECT_NE(on_terminal(std::nullopt).find("saving:   0%|"), std::string::npos);
  EXPECT_TRUE(on_terminal(false).empty()) << "this call wants none";
}

TEST(ByteBar, IsTurnedOffByTheVariableForAll) {
  const auto patched = patch_environment({{"ACCELERATE_PROGRESS", "0"}});
  EXPECT_TRUE(on_terminal(true).empty());
  EXPECT_TRUE(in_log_file(true).empty());
  const test::StderrTerminal terminal(60);
  for ([[maybe_unused]] const int step : tqdm(std::vector<int>{1, 2})) {
  }
  EXPECT_TRUE(terminal.read().empty()) << "also for bars of the program";
}

TEST(ByteBar, RefusesOtherWordsInTheVariable) {
  const auto patched = patch_environment({{"ACCELERATE_PROGRESS", "maybe"}});
  EXPECT_THROW(on_terminal(std::nullopt), ConfigError);
}

TEST(ByteBar, IsLeftOutForWorkThatIsOverAtOnce) {
  EXPECT_TRUE(on_terminal(true, kBytesWorthABar - 1).empty());
}

TEST(ByteBar, IsShownByTheFirstProcessOfTheHost) {
  const auto patched = patch_environment({{"LOCAL_RANK", "1"}});
  EXPECT_TRUE(on_terminal(true).empty());
}

TEST(ByteBar, IsGoneFromATerminalAtTheEnd) {
  const test::StderrTerminal terminal(60);
  {
    ByteBar bar("saving", kMuch, true);
    EXPECT_FALSE(terminal.read().empty());
  }
  const auto end = terminal.read();
  EXPECT_EQ(end.find('\n'), std::string::npos);
  EXPECT_EQ(end.find_first_not_of("\r "), std::string::npos) << end;
}

TEST(ByteBar, IsOneWholeLineInALogFile) {
  const auto text = in_log_file(true);
  EXPECT_TRUE(text.starts_with("saving: 100%|")) << text;
  EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  EXPECT_TRUE(text.ends_with("]\n")) << text;
  EXPECT_EQ(text.find_first_of("\r\x1b"), std::string::npos) << text;
  EXPECT_TRUE(in_log_file(std::nullopt).empty());
}

TEST(ByteBar, IsWhatACommandAsksForOnATerminal) {
  {
    const test::StderrTerminal terminal(60);
    EXPECT_EQ(detail::asked_by_command(), true);
  }
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(detail::asked_by_command(), std::nullopt);
  (void)::testing::internal::GetCapturedStderr();
}

TEST(ByteBar, CountsPartsThatSeveralThreadsDo) {
  ::testing::internal::CaptureStderr();
  {
    ByteBar bar("hashing", kMuch, true);
    const auto half = [&] {
      auto part = bar.next_part();
      for (std::int64_t i = 1; i <= 1024; ++i) part(kMuch / 2 / 1024 * i);
    };
    const std::jthread other(half);
    half();
  }
  const auto text = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(text.starts_with("hashing: 100%|")) << text;
  EXPECT_NE(text.find("33.6M/33.6M"), std::string::npos) << text;
}

}  // namespace
}  // namespace accelerate
