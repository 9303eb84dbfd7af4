// What a GPU adds: one rank with NCCL, several ranks on one GPU with Gloo, collectives on its
// tensors.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <string>
#include <vector>

#include "cuda/on_gpu.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::on_gpu;

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
};

std::vector<float> to_vector(const torch::Tensor& tensor) {
  const auto flat = tensor.cpu().to(torch::kFloat).contiguous().flatten();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

TEST_F(Cuda, AProgramThatIsAloneComputesOnTheGpuWithoutAGroup) {
  on_processes(1,
               {.environment = {{"ACCELERATE_USE_CPU", std::nullopt},
                                {"RANK", std::nullopt},
                                {"WORLD_SIZE", std::nullopt},
                                {"LOCAL_RANK", std::nullopt},
                                {"LOCAL_WORLD_SIZE", std::nullopt}},
                .rendezvous = false},
               [](PartialState& state) {
                 EXPECT_EQ(state.distributed_type(), DistributedType::kNo);
                 EXPECT_EQ(state.device().str(), "cuda");
                 EXPECT_FALSE(state.process_group());
                 const auto x = torch::ones({2, 2}, state.device());
                 EXPECT_EQ(x.matmul(x).sum().item<float>(), 8);
               });
}

TEST_F(Cuda, FreeMemoryCountsWhatTheCacheHoldsUnused) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  (void)torch::ones({1}, torch::kCUDA);
  const auto free = [] { return std::int64_t{get_max_memory().get(MapDevice(0), 0)}; };
  const auto before = free();
  {
    const auto tensor = torch::empty({kBytes}, torch::dtype(torch::kByte).device(torch::kCUDA));
    EXPECT_LE(free(), before - kBytes / 2);
  }
  EXPECT_GT(free(), before - kBytes / 2);  // in the cache, not with the driver
}

TEST_F(Cuda, OneRankUsesNccl) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    EXPECT_EQ(state.distributed_type(), DistributedType::kMultiGpu);
    EXPECT_EQ(state.backend(), "nccl");
    EXPECT_EQ(state.device().str(), "cuda:0");
    ASSERT_TRUE(state.process_group());
    state.wait_for_everyone();
    EXPECT_EQ(to_vector(gather(torch::arange(3, state.device()))), (std::vector<float>{0, 1, 2}));
  });
}

TEST_F(Cuda, TwoRanksOnOneGpuUseGlooAndSaySo) {
  const auto outcomes = run_processes(2, on_gpu(), [](PartialState& state) {
    if (torch::cuda::device_count() >= 2) GTEST_SKIP() << "every rank has its own GPU here";
    EXPECT_EQ(state.distributed_type(), DistributedType::kMultiGpu);
    EXPECT_EQ(state.backend(), "gloo");
    EXPECT_EQ(state.device().str(), "cuda:0");
    const int rank = state.process_index();
    const auto mine = torch::full({2}, rank, torch::TensorOptions(state.device()));
    EXPECT_EQ(to_vector(gather(mine)), (std::vector<float>{0, 0, 1, 1}));
    EXPECT_TRUE(gather(mine).is_cuda());
    EXPECT_EQ(to_vector(reduce(mine.to(torch::kFloat), Reduction::kSum)),
              (std::vector<float>{1, 1}));
    EXPECT_EQ(to_vector(broadcast(mine.clone(), 1)), (std::vector<float>{1, 1}));
    state.wait_for_everyone();
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_TRUE(outcomes[0].output_contains("2 processes on this host share 1 GPU"))
      << outcomes[0].output;
}

TEST_F(Cuda, TreesOfGpuTensorsOfSeveralDtypesAreGatheredTogether) {
  on_processes(2, on_gpu(), [](PartialState& state) {
    const int rank = state.process_index();
    const auto on_device = torch::TensorOptions(state.device());
    const std::map<std::string, torch::Tensor> tree = {
        {"half", torch::full({2, 3}, rank + 0.5, on_device.dtype(torch::kHalf))},
        {"flag", torch::full({1}, rank == 1, on_device.dtype(torch::kBool))},
        {"scalar", torch::tensor(rank, on_device.dtype(torch::kLong))}};
    const auto gathered = gather(tree);
    EXPECT_EQ(gathered.at("half").sizes(), (std::vector<int64_t>{4, 3}));
    EXPECT_EQ(gathered.at("half").dtype(), torch::kHalf);
    EXPECT_EQ(to_vector(gathered.at("flag")), (std::vector<float>{0, 1}));
    EXPECT_EQ(to_vector(gathered.at("scalar")), (std::vector<float>{0, 1}));
    for (const auto& [name, tensor] : gathered) EXPECT_TRUE(tensor.is_cuda()) << name;

    const auto padded = pad_across_processes(torch::ones({rank + 1}, on_device), {.pad_index = 7});
    EXPECT_EQ(to_vector(padded),
              rank == 0 ? (std::vector<float>{1, 7}) : (std::vector<float>{1, 1}));
    EXPECT_EQ(gather_object(std::vector<std::string>{std::to_string(rank)}),
              (std::vector<std::string>{"0", "1"}));
  });
}

TEST_F(Cuda, AskingForNcclWithMoreRanksThanGpusNamesBothCounts) {
  const auto outcomes = run_processes(2, on_gpu(), [] {
    if (torch::cuda::device_count() >= 2) GTEST_SKIP() << "every rank has its own GPU here";
    try {
      PartialState state({.backend = "nccl"});
      FAIL() << "two ranks took one GPU";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("2"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("1"), std::string::npos) << error.what();
    }
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST_F(Cuda, CpuCanBeForcedWhereAGpuIs) {
  on_processes(2, on_gpu(), [] {
    PartialState state({.cpu = true});
    EXPECT_TRUE(state.device().is_cpu());
    EXPECT_EQ(state.backend(), "gloo");
    EXPECT_EQ(gather(torch::ones({1})).numel(), 2);
  });
}

TEST_F(Cuda, SeedsReachTheGpuAndRandomStatesAreShared) {
  on_processes(2, on_gpu(), [](PartialState& state) {
    set_seed(7, {.device_specific = true});
    synchronize_rng_states(std::vector{RNGType::kCuda});
    const auto drawn = gather(torch::rand({1}, state.device()));
    EXPECT_EQ(drawn[0].item<float>(), drawn[1].item<float>());
  });
}

TEST_F(Cuda, ReleasedMemoryIsGivenBack) {
  PartialState state;
  auto x = torch::ones({1 << 20}, torch::kCUDA);
  release_memory(x);
  EXPECT_FALSE(x.defined());
}

TEST(WithoutAGpu, TheSameBinaryRunsOnTheCpu) {
  on_processes(
      2, {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}, {"CUDA_VISIBLE_DEVICES", ""}}},
      [](PartialState& state) {
        EXPECT_FALSE(is_cuda_available());
        EXPECT_TRUE(state.device().is_cpu());
        EXPECT_EQ(state.backend(), "gloo");
        EXPECT_EQ(gather(torch::ones({1})).numel(), 2);
      });
}

}  // namespace
}  // namespace accelerate
