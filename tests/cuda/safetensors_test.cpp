// safetensors files read onto the GPU through pinned memory, and written from it.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "cuda/on_gpu.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::on_gpu;

class CudaSafetensors : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
  ~CudaSafetensors() override { std::filesystem::remove(path_); }

  std::filesystem::path path_ =
      std::filesystem::temp_directory_path() / ("cuda_safetensors." + std::to_string(::getpid()));
};

// 400 MB: more chunks than there are buffers, and many small tensors in one.
StateDict example() {
  StateDict tensors;
  for (int i = 0; i < 10; ++i) {
    tensors.insert("large." + std::to_string(i), torch::arange(5'000'000 + i, torch::kLong));
  }
  for (int i = 0; i < 1000; ++i) {
    tensors.insert("small." + std::to_string(i), torch::full({7}, i, torch::kHalf));
  }
  tensors.insert("scalar", torch::scalar_tensor(3.5, torch::kDouble));
  tensors.insert("empty", torch::empty({0, 4}));
  return tensors;
}

TEST_F(CudaSafetensors, AllTensorsArriveOnTheGpu) {
  on_processes(1, on_gpu(), [this](PartialState& state) {
    const auto tensors = example();
    safetensors::save_file(tensors, path_);
    const auto loaded = safetensors::load_file(path_, state.device());
    ASSERT_EQ(loaded.size(), tensors.size());
    for (const auto& item : tensors) {
      const auto& tensor = loaded[item.key()];
      ASSERT_EQ(tensor.device(), state.device());
      ASSERT_TRUE(tensor.cpu().equal(item.value())) << item.key();
    }
  });
}

TEST_F(CudaSafetensors, ReadsSlicesAndIntoTensorsThatExist) {
  on_processes(1, on_gpu(), [this](PartialState& state) {
    const auto tensors = example();
    safetensors::save_file(tensors, path_);
    const auto file = safetensors::File::open(path_);
    const auto& expected = tensors["large.3"];
    EXPECT_TRUE(file.get("large.3", state.device()).cpu().equal(expected));
    EXPECT_TRUE(file.get_slice("large.3", {{10, 20}}, state.device())
                    .cpu()
                    .equal(expected.slice(0, 10, 20)));
    const auto same = torch::zeros_like(expected, state.device());
    file.read_into("large.3", same);
    EXPECT_TRUE(same.cpu().equal(expected));
    const auto converted =
        torch::zeros(expected.sizes(), torch::TensorOptions(torch::kDouble).device(state.device()));
    file.read_into("large.3", converted);
    EXPECT_TRUE(converted.cpu().equal(expected.to(torch::kDouble)));
  });
}

TEST_F(CudaSafetensors, AFileThatWasCutIsAnErrorOfEveryReader) {
  on_processes(1, on_gpu(), [this](PartialState& state) {
    safetensors::save_file(example(), path_);
    const auto file = safetensors::File::open(path_);
    std::filesystem::resize_file(path_, 200'000'000);
    EXPECT_THROW((void)file.get_tensors(state.device()), CheckpointError);
  });
}

TEST_F(CudaSafetensors, TensorsOnTheGpuAreSavedAsThoseOnTheCpu) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    StateDict on_gpu_tensors;
    StateDict on_cpu_tensors;
    for (const auto& item : example()) {
      on_cpu_tensors.insert(item.key(), item.value());
      on_gpu_tensors.insert(item.key(), item.value().to(state.device()));
    }
    EXPECT_EQ(safetensors::serialize(on_gpu_tensors), safetensors::serialize(on_cpu_tensors));
  });
}

}  // namespace
}  // namespace accelerate
