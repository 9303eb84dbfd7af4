// Who shows a progress bar, and on what. How it looks is in tests/core/progress_line_test.cpp.
#include "accelerate/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdlib>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/state.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

template <class T>
concept TakenByTqdm = requires(T value) { tqdm(value); };

static_assert(!TakenByTqdm<bool>, "true is not a range");
static_assert(TakenByTqdm<std::vector<int>>);
static_assert(!std::constructible_from<ProgressBar, bool>);

// Makes stderr a terminal until the end of the scope and keeps what it shows.
class Terminal {
 public:
  explicit Terminal(unsigned short columns) : master_(::posix_openpt(O_RDWR | O_NOCTTY)) {
    ::grantpt(master_);
    ::unlockpt(master_);
    std::array<char, 128> name{};
    ::ptsname_r(master_, name.data(), name.size());
    slave_ = ::open(name.data(), O_RDWR | O_NOCTTY);
    resize(columns);
    before_ = ::dup(STDERR_FILENO);
    ::dup2(slave_, STDERR_FILENO);
  }
  ~Terminal() {
    ::dup2(before_, STDERR_FILENO);
    for (const int fd : {before_, slave_, master_}) ::close(fd);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void resize(unsigned short columns) const {
    winsize size{.ws_row = 25, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    ::ioctl(slave_, TIOCSWINSZ, &size);
  }

  // What was written since the last call.
  [[nodiscard]] std::string read() const {
    ::fcntl(master_, F_SETFL, O_NONBLOCK);
    std::array<char, 8192> bytes{};
    const auto count = ::read(master_, bytes.data(), bytes.size());
    return count > 0 ? std::string(bytes.data(), static_cast<std::size_t>(count)) : std::string();
  }

 private:
  int master_;
  int slave_ = -1;
  int before_ = -1;
};

TEST(ProgressOnATerminal, FillsTheLineButForOneColumnAndFollowsItsWidth) {
  const Terminal terminal(60);
  ProgressBar bar({.total = 2, .ascii = true});
  EXPECT_EQ(terminal.read().size(), 60u);  // a carriage return and 59 columns
  terminal.resize(80);
  bar.refresh();
  EXPECT_EQ(terminal.read().size(), 80u);
}

TEST(ProgressOnATerminal, DrawsBlocksWhereTheLocaleIsUtf8) {
  const Terminal terminal(60);
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
