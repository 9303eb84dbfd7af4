#include "accelerate/logging/rich.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

namespace accelerate {
namespace {

// Not inlined, and not the last thing its caller does, so that it has a frame.
[[gnu::noinline]] void the_thrower() { throw std::runtime_error("the lake is dry"); }

void die(const char* enabled) {
  ::setenv("ACCELERATE_ENABLE_RICH", enabled, 1);
  rich::install();
  const auto run = []() noexcept { the_thrower(); };
  run();
}

TEST(Rich, ShowsTypeMessageAndStackOfWhatNobodyCatches) {
  EXPECT_DEATH(die("1"),
               "Uncaught exception \\(most recent call first\\)\n(.*\n)+"
               "std::runtime_error: the lake is dry\n");
  EXPECT_DEATH(die("1"), "  .*  core_process_test\\+0x[0-9a-f]+\n");
}

TEST(Rich, LeavesItToTheSystemUnlessAskedFor) {
  EXPECT_DEATH(die("0"), "terminate called after throwing");
}

}  // namespace
}  // namespace accelerate
