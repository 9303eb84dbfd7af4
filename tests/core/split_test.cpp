#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "accelerate/detail/core/split_range.h"
#include "accelerate/errors.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::PadWith;
using detail::split_part;
using detail::SplitLengths;
using detail::SplitPart;

std::vector<std::int64_t> items(const SplitPart& part) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < part.size(); ++i) result.push_back(part.at(i));
  return result;
}

std::vector<std::vector<std::int64_t>> all_parts(std::int64_t length, int processes, bool padding,
                                                 PadWith with = PadWith::kLastOfPart) {
  std::vector<std::vector<std::int64_t>> result;
  for (int i = 0; i < processes; ++i) {
    result.push_back(items(split_part(length, processes, i, {.apply_padding = padding}, with)));
  }
  return result;
}

using Parts = std::vector<std::vector<std::int64_t>>;

TEST(SplitRange, GivesTheFirstProcessesOneItemMoreWhenItDoesNotDivide) {
  EXPECT_EQ(split_range(7, 3, 0), (SplitRange{.start = 0, .end = 3, .padded_size = 3}));
  EXPECT_EQ(split_range(7, 3, 1), (SplitRange{.start = 3, .end = 5, .padded_size = 3}));
  EXPECT_EQ(split_range(7, 3, 2), (SplitRange{.start = 5, .end = 7, .padded_size = 3}));
}

TEST(SplitRange, CoversEveryItemOnceInOrderForAllSizes) {
  for (std::int64_t length = 0; length < 40; ++length) {
    for (int processes = 1; processes < 10; ++processes) {
      std::int64_t next = 0;
      for (int i = 0; i < processes; ++i) {
        const auto range = split_range(length, processes, i);
        ASSERT_EQ(range.start, next) << length << " over " << processes;
        ASSERT_LE(range.end - range.start, range.padded_size);
        ASSERT_GE(range.end - range.start, range.padded_size - 1);
        next = range.end;
      }
      ASSERT_EQ(next, length) << length << " over " << processes;
    }
  }
}

TEST(SplitRange, RefusesAProcessThatDoesNotExist) {
  try {
    (void)split_range(7, 3, 3);
    FAIL() << "process 3 of 3 got a part";
  } catch (const ArgumentError& error) {
    EXPECT_STREQ(error.what(), "split_range: cannot give process 3 of 3 its part of 7 items.");
  }
  EXPECT_THROW((void)split_range(-1, 3, 0), ArgumentError);
  EXPECT_THROW((void)split_range(7, 0, 0), ArgumentError);
}

// The expected parts here and below are what Python Accelerate 1.13 gives.
TEST(SplitPart, PadsListsWithTheLastItemOfThePart) {
  EXPECT_EQ(all_parts(7, 3, false), (Parts{{0, 1, 2}, {3, 4}, {5, 6}}));
  EXPECT_EQ(all_parts(7, 3, true), (Parts{{0, 1, 2}, {3, 4, 4}, {5, 6, 6}}));
  EXPECT_EQ(all_parts(17, 4, true),
            (Parts{{0, 1, 2, 3, 4}, {5, 6, 7, 8, 8}, {9, 10, 11, 12, 12}, {13, 14, 15, 16, 16}}));
}

TEST(SplitPart, IsWhatPythonGivesForListsOfAllSizes) {
  std::ifstream file(test::reference_path("state/state.json"));
  const auto cases = nlohmann::json::parse(file).at("split");
  ASSERT_EQ(cases.size(), 40U);
  for (const auto& each : cases) {
    EXPECT_EQ(all_parts(each.at("length"), each.at("processes"), each.at("padding")),
              each.at("parts").get<Parts>())
        << each.at("length") << " items over " << each.at("processes") << " processes";
  }
}

TEST(SplitPart, PadsTensorsWithTheLastRowOfTheWholeInput) {
  EXPECT_EQ(all_parts(7, 3, true, PadWith::kLastOfInput), (Parts{{0, 1, 2}, {3, 4, 6}, {5, 6, 6}}));
}

TEST(SplitPart, RepeatsTheLastItemOnProcessesBeyondTheEnd) {
  EXPECT_EQ(all_parts(2, 4, false), (Parts{{0}, {1}, {1}, {1}}));
  EXPECT_EQ(all_parts(2, 4, true), (Parts{{0}, {1}, {1}, {1}}));
}

TEST(SplitPart, OfNothingIsNothingWithPaddingToo) {
  EXPECT_EQ(all_parts(0, 3, true), (Parts{{}, {}, {}}));
}

TEST(SplitPart, LeavesOneProcessTheWholeInputUnpadded) {
  EXPECT_EQ(all_parts(3, 1, true), (Parts{{0, 1, 2}}));
}

TEST(SplitPart, RestoresTheInputAfterAGatherCutToItsLengthWhenOnlyTheLastProcessIsShort) {
  for (const int processes : {1, 2, 4, 8}) {
    const std::int64_t length = 2 * processes - 1;
    std::vector<std::int64_t> gathered;
    for (const auto& part : all_parts(length, processes, true)) {
      EXPECT_EQ(part.size(), processes == 1 ? 1U : 2U);
      gathered.insert(gathered.end(), part.begin(), part.end());
    }
    gathered.resize(static_cast<std::size_t>(length));
    std::vector<std::int64_t> expected(static_cast<std::size_t>(length));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(gathered, expected);
  }
}

TEST(SplitLengths, NamesTheTwoLeavesThatDiffer) {
  SplitLengths lengths;
  lengths.add("text", 8);
  lengths.add("more.ids", 8);
  try {
    lengths.add("more.labels", 7);
    FAIL() << "7 and 8 items were taken together";
  } catch (const ArgumentError& error) {
    EXPECT_STREQ(error.what(),
                 "split_between_processes: all values of a map must have the same length, but "
                 "'text' has 8 items and 'more.labels' has 7.");
  }
}

}  // namespace
}  // namespace accelerate
