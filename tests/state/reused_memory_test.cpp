#include "accelerate/detail/state/reused_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

namespace accelerate::detail::state {
namespace {

constexpr std::int64_t kMany = 1 << 20;  // floats

class ReusedMemoryTest : public testing::Test {
 protected:
  [[nodiscard]] at::Tensor floats(std::int64_t count) const {
    return memory_->empty({count}, torch::kFloat);
  }
  std::shared_ptr<ReusedMemory> memory_ = std::make_shared<ReusedMemory>();
};

TEST_F(ReusedMemoryTest, GivesATensorTheMemoryOfOneThatIsGone) {
  auto first = floats(kMany);
  const void* const place = first.data_ptr();
  first = at::Tensor();
  EXPECT_EQ(floats(kMany).data_ptr(), place);
  EXPECT_EQ(floats(kMany - 5).data_ptr(), place) << "a smaller one fits as well";
}

TEST_F(ReusedMemoryTest, NeverGivesOneBlockToTwo) {
  const auto first = floats(kMany);
  const auto view = floats(kMany).slice(0, 7, 9);
  EXPECT_NE(first.data_ptr(), view.storage().data_ptr().get());
  const auto third = floats(kMany);
  EXPECT_NE(third.storage().data_ptr().get(), view.storage().data_ptr().get());
}

TEST_F(ReusedMemoryTest, MakesTensorsLikeAnyOther) {
  auto tensor = memory_->empty({2, kMany}, at::TensorOptions(torch::kInt).requires_grad(false));
  EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{2, kMany}));
  EXPECT_EQ(tensor.scalar_type(), torch::kInt);
  EXPECT_TRUE(tensor.is_contiguous());
  tensor.fill_(3);
  tensor.resize_({3, kMany});
  EXPECT_EQ(tensor[1][kMany - 1].item<int>(), 3);
  EXPECT_EQ(memory_->empty({0}, torch::kFloat).numel(), 0);
  EXPECT_EQ(memory_->empty({}, torch::kFloat).dim(), 0);
}

TEST_F(ReusedMemoryTest, MayGoBeforeItsTensors) {
  auto tensor = floats(kMany);
  memory_.reset();
  tensor.fill_(1);
  EXPECT_EQ(tensor.sum().item<float>(), kMany);
}

/// Pages of this process that are in memory, in bytes.
std::int64_t resident() {
  std::int64_t pages = 0;
  std::int64_t total = 0;
  std::ifstream("/proc/self/statm") >> total >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

TEST_F(ReusedMemoryTest, HoldsNothingForLongThatIsOfNoUse) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep what is freed";
#endif
  constexpr std::int64_t kLarge = 64 << 20;
  const auto before = resident();
  {
    floats(kLarge / 4).fill_(1);
  }
  EXPECT_GT(resident(), before + kLarge / 2) << "kept for the next one";
  memory_->release();
  EXPECT_LT(resident(), before + kLarge / 2);

  {
    floats(kLarge / 4).fill_(1);
  }
  for (int i = 0; i < 100; ++i) floats(kMany / 2).fill_(1);
  EXPECT_LT(resident(), before + kLarge / 2) << "all the others could do without";
}

TEST_F(ReusedMemoryTest, ServesManyThreads) {
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 50; ++i) {
        auto tensor = floats(kMany / 2);
        tensor.fill_(thread);
        EXPECT_EQ(tensor[i].item<float>(), thread);
        EXPECT_EQ(tensor[-1].item<float>(), thread);
      }
    });
  }
}

}  // namespace
}  // namespace accelerate::detail::state
