// Ranges of elements as boxes, and what a box and a range share, for all small tensors.
#include "formats/boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace accelerate::detail::formats {
namespace {

using Numbers = std::vector<std::int64_t>;

/// All shapes of up to `dimensions` dimensions of sizes 1 to `largest`.
std::vector<Numbers> shapes(std::size_t dimensions, std::int64_t largest) {
  std::vector<Numbers> all{{}};
  for (std::size_t begin = 0, d = 0; d < dimensions; ++d) {
    const auto end = all.size();
    for (; begin < end; ++begin) {
      for (std::int64_t size = 1; size <= largest; ++size) {
        all.push_back(all[begin]);
        all.back().push_back(size);
      }
    }
  }
  return all;
}

/// The positions of the elements of a box in the tensor, row by row.
Numbers positions(const Numbers& sizes, const Box& box) {
  const auto strides = dense_strides(sizes);
  Numbers result{0};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    Numbers next;
    for (const auto at : result) {
      for (std::int64_t i = 0; i < box.sizes[d]; ++i) {
        next.push_back(at + (box.offsets[d] + i) * strides[d]);
      }
    }
    result = std::move(next);
  }
  return result;
}

Numbers counted(FlatRange range) {
  Numbers numbers(static_cast<std::size_t>(range.count()));
  std::iota(numbers.begin(), numbers.end(), range.begin);
  return numbers;
}

template <class F>
void for_each_range(std::int64_t count, const F& f) {
  for (std::int64_t begin = 0; begin <= count; ++begin) {
    for (std::int64_t end = begin; end <= count; ++end) f(FlatRange{begin, end});
  }
}

/// True if the elements of two boxes that follow each other make a box.
bool could_be_one(const Box& a, const Box& b) {
  std::size_t different = 0;
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.offsets[d] == b.offsets[d] && a.sizes[d] == b.sizes[d]) continue;
    if (a.offsets[d] + a.sizes[d] != b.offsets[d]) return false;
    ++different;
  }
  return different == 1;
}

TEST(FlatRangeToBoxes, CoversPartOfTheFirstRowWholeRowsAndPartOfTheLast) {
  const std::vector<Box> expected{{{0, 3}, {1, 3}}, {{1, 0}, {2, 6}}, {{3, 0}, {1, 2}}};
  EXPECT_EQ(flat_range_to_boxes({4, 6}, {3, 20}), expected);
  EXPECT_EQ(flat_range_to_boxes({}, {0, 1}), std::vector<Box>{Box{}});
  EXPECT_EQ(flat_range_to_boxes({}, {0, 0}), std::vector<Box>{});
  EXPECT_EQ(flat_range_to_boxes({0, 3}, {0, 0}), std::vector<Box>{});
  EXPECT_EQ(flat_range_to_boxes({5}, {2, 4}), (std::vector<Box>{{{2}, {2}}}));
}

TEST(FlatRangeToBoxes, HasEachElementOnceInOrderInFewBoxesForAllSmallTensors) {
  std::int64_t ranges = 0;
  for (const auto& sizes : shapes(4, 3)) {
    for_each_range(element_count(sizes), [&](FlatRange range) {
      const auto boxes = flat_range_to_boxes(sizes, range);
      Numbers covered;
      for (const auto& box : boxes) {
        const auto more = positions(sizes, box);
        covered.insert(covered.end(), more.begin(), more.end());
      }
      ASSERT_EQ(covered, counted(range));
      ASSERT_LE(boxes.size(), sizes.empty() ? 1 : 2 * (sizes.size() - 1) + 1);
      ASSERT_EQ(std::ranges::adjacent_find(boxes, could_be_one), boxes.end());
      ++ranges;
    });
  }
  EXPECT_GT(ranges, 20'000);
}

/// All boxes of a tensor that are not empty.
std::vector<Box> boxes_of(const Numbers& sizes) {
  std::vector<Box> all{{}};
  for (const auto size : sizes) {
    std::vector<Box> next;
    for (const auto& box : all) {
      for_each_range(size, [&](FlatRange range) {
        if (range.count() == 0) return;
        next.push_back(box);
        next.back().offsets.push_back(range.begin);
        next.back().sizes.push_back(range.count());
      });
    }
    all = std::move(next);
  }
  return all;
}

TEST(SharedRuns, AreTheElementsOfABoxInARangeForAllSmallTensors) {
  std::int64_t cases = 0;
  for (const auto& sizes : shapes(3, 3)) {
    for (const auto& box : boxes_of(sizes)) {
      const auto inside = positions(sizes, box);
      const auto extent = extent_of(sizes, box);
      ASSERT_EQ(extent, (FlatRange{inside.front(), inside.back() + 1}));
      for_each_range(element_count(sizes), [&](FlatRange range) {
        Numbers flat;
        std::int64_t last_end = -1;
        for_each_shared_run(sizes, box, dense_strides(box.sizes), range, [&](const SharedRun& run) {
          for (std::int64_t i = 0; i < run.count; ++i) {
            ASSERT_EQ(inside[static_cast<std::size_t>(run.stored + i)], run.flat + i);
            flat.push_back(run.flat + i);
          }
          ASSERT_GT(run.flat, last_end) << "two runs could be one";
          last_end = run.flat + run.count;
        });
        Numbers expected;
        std::ranges::copy_if(inside, std::back_inserter(expected),
                             [&](std::int64_t at) { return at >= range.begin && at < range.end; });
        ASSERT_EQ(flat, expected);
        ++cases;
      });
    }
  }
  EXPECT_GT(cases, 100'000);
}

TEST(SharedRuns, FollowTheStridesOfWhatIsStored) {
  // The box (2, 2) at (1, 1) of a tensor (3, 3), stored column by column.
  std::vector<Numbers> runs;
  for_each_shared_run({3, 3}, {{1, 1}, {2, 2}}, Numbers{1, 2}, {0, 9}, [&](const SharedRun& run) {
    runs.push_back({run.stored, run.flat, run.count});
  });
  EXPECT_EQ(runs, (std::vector<Numbers>{{0, 4, 1}, {2, 5, 1}, {1, 7, 1}, {3, 8, 1}}));
}

}  // namespace
}  // namespace accelerate::detail::formats
