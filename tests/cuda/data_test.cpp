// Batches that travel to the GPU while it computes: right values, in order, nothing used too early.
#include <accelerate/accelerate.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/on_gpu.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::on_gpu;

struct Named {
  torch::Tensor rows;
  std::vector<std::string> names;
  torch::Tensor sparse;
};
constexpr auto tensor_tree_fields(std::type_identity<Named>) {
  return std::tuple{field("rows", &Named::rows), field("names", &Named::names),
                    field("sparse", &Named::sparse)};
}

class CudaData : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
};

PrepareDataLoaderOptions to_gpu() {
  return {.device = torch::Device("cuda:0"), .put_on_device = true};
}

/// Keeps the GPU busy for some milliseconds.
void queue_work(torch::Tensor& matrix) {
  for (int i = 0; i < 4; ++i) matrix = matrix.mm(matrix).tanh();
}

// The host is far ahead of the GPU here: whatever is read or written too early is seen in the sums.
TEST_F(CudaData, BatchesAreWholeWhenTheyAreUsedAndStayWholeUntilTheyWere) {
  constexpr std::int64_t kRows = 64 * 200;
  constexpr std::int64_t kColumns = 4096;
  const auto data = torch::arange(kRows).unsqueeze(1).expand({kRows, kColumns}).contiguous();
  for (const std::int64_t workers : {0, 2}) {
    const auto loader = prepare_data_loader(
        make_data_loader(data, {.batch_size = 64, .num_workers = workers}), to_gpu());
    auto matrix = torch::rand({2048, 2048}, torch::kCUDA);
    std::vector<torch::Tensor> sums;
    for (auto& batch : loader) {
      EXPECT_TRUE(batch.is_cuda());
      queue_work(matrix);
      sums.push_back(batch.sum());
      batch.zero_();  // its memory goes back with the next batch
    }
    ASSERT_EQ(sums.size(), 200U);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto first = static_cast<std::int64_t>(i) * 64;
      EXPECT_EQ(sums[i].item<std::int64_t>(), (first * 64 + 63 * 32) * kColumns) << "batch " << i;
    }
  }
}

TEST_F(CudaData, AStreamOfTheCallersOwnWaitsForTheCopyToo) {
  const auto data = torch::arange(640'000).view({640, 1000});
  const auto loader = prepare_data_loader(make_data_loader(data, {.batch_size = 64}), to_gpu());
  const c10::impl::VirtualGuardImpl driver(c10::DeviceType::CUDA);
  const c10::StreamGuard own(driver.getStreamFromGlobalPool(torch::Device("cuda:0")));
  auto matrix = torch::rand({2048, 2048}, torch::kCUDA);
  torch::Tensor sum = torch::zeros({}, torch::TensorOptions(torch::kLong).device(torch::kCUDA));
  for (auto& batch : loader) {
    queue_work(matrix);
    sum += batch.sum();
  }
  EXPECT_EQ(sum.item<std::int64_t>(), 640'000LL * 639'999 / 2);
}

TEST_F(CudaData, WhatIsNoPlainTensorComesAlong) {
  std::vector<std::int64_t> indices{0, 1, 2, 3};
  const auto collate = [](const std::vector<std::int64_t>& samples) {
    Named batch;
    batch.rows = torch::tensor(samples);
    for (const auto sample : samples) batch.names.push_back(std::to_string(sample));
    batch.sparse = torch::eye(2).to_sparse();
    return batch;
  };
  const auto loader =
      prepare_data_loader(make_data_loader(indices, {.batch_size = 2}, collate), to_gpu());
  std::vector<std::string> names;
  for (auto& batch : loader) {
    EXPECT_TRUE(batch.rows.is_cuda());
    EXPECT_TRUE(batch.sparse.is_cuda());
    EXPECT_EQ(batch.sparse.to_dense().sum().item<float>(), 2);
    names.insert(names.end(), batch.names.begin(), batch.names.end());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"0", "1", "2", "3"}));
}

TEST_F(CudaData, AFailureComesInItsTurn) {
  for (const std::int64_t workers : {0, 2}) {
    const auto sample = [](std::int64_t i) {
      if (i == 7) throw std::runtime_error("sample 7 is torn");
      return torch::full({3}, i);
    };
    const auto loader = prepare_data_loader(
        make_data_loader(FunctionDataset(20, sample), {.batch_size = 2, .num_workers = workers}),
        to_gpu());
    for (int pass = 0; pass < 2; ++pass) {
      int seen = 0;
      try {
        for (auto& batch : loader) seen += static_cast<int>(batch.size(0));
        FAIL() << "nothing was thrown";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("sample 7 is torn"), std::string::npos)
            << error.what();
      }
      EXPECT_EQ(seen, 6);
    }
  }
}

TEST_F(CudaData, ThePositionIsThatOfTheBatchInHand) {
  const auto data = torch::arange(40);
  const auto make = [&] {
    return prepare_data_loader(make_data_loader(data, {.batch_size = 4, .num_workers = 2}),
                               to_gpu());
  };
  for (int stop = 1; stop < 10; ++stop) {
    auto loader = make();
    int seen = 0;
    DataLoaderState state;
    for ([[maybe_unused]] auto& batch : loader) {
      EXPECT_EQ(loader.end_of_dataloader(), seen == 9);
      if (++seen == stop) {
        state = loader.state_dict();
        break;
      }
    }
    auto resumed = make();
    resumed.load_state_dict(state);
    std::int64_t next = stop * 4;
    for (auto& batch : resumed) {
      EXPECT_EQ(batch[0].item<std::int64_t>(), next);
      next += 4;
    }
    EXPECT_EQ(next, 40) << "stopped after " << stop;
  }
}

// Pages once taken are used again, epoch by epoch. How many batches are there at once depends on
// how far the host is ahead of the GPU: at most those of an epoch.
TEST_F(CudaData, MemoryDoesNotGrowWithTheEpochs) {
  const auto data = torch::rand({64, 1 << 18});  // 1 MiB a row
  const auto loader = prepare_data_loader(make_data_loader(data, {.batch_size = 8}), to_gpu());
  const auto pass = [&] {
    for (auto& batch : loader) (void)batch.sum();
    torch::cuda::synchronize();
  };
  const auto stats = [] { return c10::getDeviceAllocator(torch::kCUDA)->getDeviceStats(0); };
  pass();
  const auto before = stats();
  EXPECT_GT(before.reserved_bytes[0].current, 0);
  for (int epoch = 0; epoch < 40; ++epoch) pass();
  const auto after = stats();
  const auto of_epoch = static_cast<std::int64_t>(data.nbytes());
  // The allocator takes pages in larger pieces.
  EXPECT_LE(after.reserved_bytes[0].current, before.reserved_bytes[0].current + 2 * of_epoch);
  EXPECT_EQ(after.allocated_bytes[0].current, before.allocated_bytes[0].current);
}

TEST_F(CudaData, DispatchedBatchesTravelAheadToo) {
  on_processes(2, on_gpu(), [](PartialState& state) {
    const auto data = torch::arange(800 * 512).view({800, 512});
    const auto loader = prepare_data_loader(make_data_loader(data, {.batch_size = 4}),
                                            {.put_on_device = true, .dispatch_batches = true});
    auto matrix = torch::rand({1024, 1024}, state.device());
    std::vector<torch::Tensor> firsts;
    for (auto& batch : loader) {
      EXPECT_TRUE(batch.is_cuda());
      queue_work(matrix);
      firsts.push_back(batch.sum());
    }
    ASSERT_EQ(firsts.size(), 100U);
    for (std::size_t i = 0; i < firsts.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) * 8 + state.process_index() * 4;
      const auto first = row * 512;
      const std::int64_t count = 4 * 512;
      EXPECT_EQ(firsts[i].item<std::int64_t>(), first * count + count * (count - 1) / 2);
    }
  });
}

}  // namespace
}  // namespace accelerate
