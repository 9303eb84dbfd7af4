#include "accelerate/version.h"

#include <gtest/gtest.h>

#include "core/text.h"

namespace accelerate {
namespace {

TEST(VersionHeader, HoldsTheVersionOfTheProject) {
  EXPECT_EQ(kVersion, ACCELERATE_TEST_PROJECT_VERSION);
  EXPECT_EQ(kVersion, detail::str(ACCELERATE_VERSION_MAJOR, ".", ACCELERATE_VERSION_MINOR, ".",
                                  ACCELERATE_VERSION_PATCH));
}

}  // namespace
}  // namespace accelerate
