#include "sharding/flat_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace accelerate::detail::sharding {
namespace {

TEST(FlatLayout, PutsParametersAndShardsOnAGridOf64Elements) {
  const std::vector<std::int64_t> sizes{200, 10};
  const FlatLayout layout(sizes, 3);
  EXPECT_EQ(layout.offset(0), 0);
  EXPECT_EQ(layout.offset(1), 256);
  EXPECT_EQ(layout.shard_size(), 128);
  EXPECT_EQ(layout.padded_size(), 384);
  EXPECT_EQ(layout.gaps(), (std::vector<Range>{{200, 256}, {266, 384}}));
  EXPECT_EQ(layout.part(0, 0), (Range{0, 128}));
  EXPECT_EQ(layout.part(0, 1), (Range{128, 200}));
  EXPECT_EQ(layout.part(0, 2).size(), 0);
  EXPECT_EQ(layout.part(1, 0).size(), 0);
  EXPECT_EQ(layout.part(1, 2), (Range{0, 10}));
  EXPECT_EQ(layout.place(1, 2), 0);
}

TEST(FlatLayout, GivesEachElementToOneProcess) {
  const std::vector<std::int64_t> sizes{1, 63, 64, 65, 1000, 4096, 7};
  for (std::int64_t processes = 1; processes <= 9; ++processes) {
    const FlatLayout layout(sizes, processes);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(layout.offset(i) % 64, 0);
      std::int64_t next = 0;
      for (std::int64_t rank = 0; rank < processes; ++rank) {
        const auto part = layout.part(i, rank);
        if (part.size() == 0) continue;
        EXPECT_EQ(part.begin, next);
        EXPECT_EQ(rank * layout.shard_size() + layout.place(i, rank),
                  layout.offset(i) + part.begin);
        next = part.end;
      }
      EXPECT_EQ(next, sizes[i]) << processes << " processes";
    }
  }
}

}  // namespace
}  // namespace accelerate::detail::sharding
