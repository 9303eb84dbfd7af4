// Who shows a progress bar, and on what. How it looks is in tests/core/progress_line_test.cpp.
#include "accelerate/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <concepts>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/state.h"
#include "support/on_processes.h"
#include "support/stderr_terminal.h"

namespace accelerate {
namespace {

template <class T>
concept TakenByTqdm = requires(T value) { tqdm(value); };

static_assert(!TakenByTqdm<bool>, "true is not a range");
static_assert(TakenByTqdm<std::vector<int>>);
static_assert(!std::constructible_from<ProgressBar, bool>);

TEST(ProgressOnATerminal, FillsTheLineButForOneColumnAndFollowsItsWidth) {
  const test::StderrTerminal terminal(60);
  ProgressBar bar({.total = 2, .ascii = true});
  EXPECT_EQ(terminal.read().size(), 60u);  // a carriage return and 59 columns
  terminal.resize(80);
  bar.refresh();
  EXPECT_EQ(terminal.read().size(), 80u);
}

TEST(ProgressOnATerminal, DrawsBlocksWhereTheLocaleIsUtf8) {
  const test::StderrTerminal terminal(60);
  {
    const auto patched = patch_environment({{"LC_ALL", "de_DE.UTF-8"}});
    ProgressBar bar({.total = 2, .initial = 1});
    EXPECT_NE(terminal.read().find("█"), std::string::npos);
  }
  static_cast<void>(terminal.read());
  const auto patched = patch_environment({{"LC_ALL", "C"}});
  ProgressBar bar({.total = 2, .initial = 1});
  EXPECT_NE(terminal.read().find("#"), std::string::npos);
}

TEST(ProgressInALogFile, WritesPlainLinesAndFew) {
  const auto outcomes = run_processes(1, {.rendezvous = false}, [] {
    const std::vector<int> steps(1000);
    for ([[maybe_unused]] const int step :
         tqdm(steps, {.desc = "steps", .mininterval = 0, .ascii = true})) {
    }
  });
  const std::string& output = outcomes[0].output;
  if (in_child_process()) return;
  EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1) << output;
  EXPECT_EQ(output.find('\r'), std::string::npos);
  EXPECT_TRUE(output.starts_with("steps: 100%|##########| 1000/1000 [")) << output;
}

TEST(ProgressBars, AreShownOnTheFirstProcessOfTheHostEvenBeforeThereIsAState) {
  const auto patched = patch_environment({{"LOCAL_RANK", "1"}});
  ASSERT_FALSE(PartialState::initialized());
  EXPECT_TRUE(ProgressBar({.total = 1, .sink = [](std::string_view) {}}).disabled());
  EXPECT_FALSE(
      ProgressBar({.main_process_only = false, .sink = [](std::string_view) {}}).disabled());
  // An explicit wish for nothing wins.
  EXPECT_TRUE(ProgressBar({.main_process_only = false, .disable = true}).disabled());
}

}  // namespace
}  // namespace accelerate
