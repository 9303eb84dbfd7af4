// Weights in host memory and on disk that compute on a GPU.
#include <ATen/autocast_mode.h>
#include <accelerate/accelerate.h>
#include <accelerate/big_modeling.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/on_gpu.h"
#include "lazy/trigger.h"
#include "offload/lazy_params.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::has;
using test::message_of;
using test::on_gpu;

struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(std::int64_t width = 1024, int depth = 12) {
    for (int i = 0; i < depth; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer->forward(x));
    return norm->forward(x);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Deep);

Deep deep() {
  torch::manual_seed(7);
  return Deep();
}
torch::Tensor input() {
  torch::manual_seed(3);
  return torch::randn({64, 1024}).cuda();
}

class CudaOffload : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
};

void expect_trains_as_resident(Deep& net, const std::function<torch::Tensor(torch::Tensor)>& run) {
  auto resident = deep();
  resident->to(torch::kCUDA);
  torch::optim::SGD ours(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD theirs(resident->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    const auto result = run(input());
    const auto expected = resident->forward(input());
    ASSERT_TRUE(result.equal(expected)) << step;
    result.pow(2).mean().backward();
    expected.pow(2).mean().backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      ASSERT_TRUE(net->parameters()[i].grad().equal(resident->parameters()[i].grad())) << i;
    }
    ours.step();
    theirs.step();
  }
}

TEST_F(CudaOffload, WeightsInHostMemoryTrainAsResidentOnes) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    for (const std::int64_t depth : {0, 1, 3}) {
      auto net = deep();
      const auto model =
          cpu_offload(net, {.execution_device = state.device(), .lazy = {.prefetch_depth = depth}});
      EXPECT_TRUE(net->layers[0]->weight.is_cuda());
      expect_trains_as_resident(net, [&](const torch::Tensor& x) { return model(x); });
      EXPECT_GT(model.stats().writebacks, 0);
    }
  });
}

TEST_F(CudaOffload, TheMemoryIsThatOfTheRing) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    auto net = deep();
    const auto model = cpu_offload(net, {.execution_device = state.device()});
    const torch::NoGradGuard no_grad;
    const auto x = input();
    for (int i = 0; i < 3; ++i) model(x);
    const auto stats = model.stats();
    EXPECT_EQ(stats.peak_resident_bytes, 2 * (1024 * 1024 + 1024) * 4);
    EXPECT_GT(stats.prefetch_hits, 20);
  });
}

TEST_F(CudaOffload, WeightsOnDiskHaveTheSameBits) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    const test::Folder folder;
    auto net = deep();
    const auto model = disk_offload(
        net, folder.path(), {.execution_device = state.device(), .lazy = {.writable = true}});
    expect_trains_as_resident(net, [&](const torch::Tensor& x) { return model(x); });
  });
}

TEST_F(CudaOffload, InputsAndOutputsStayOnTheCallersDevice) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    auto net = deep();
    const auto model = cpu_offload(net, {.execution_device = state.device()});
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(model(torch::randn({4, 1024})).is_cpu());
    EXPECT_TRUE(model(torch::randn({4, 1024}).cuda()).is_cuda());
    model.remove_hooks();
    EXPECT_TRUE(net->layers[3]->weight.is_cpu()) << "where it was before";
  });
}

TEST_F(CudaOffload, RemoveHooksPutsAllBackToWhereItWas) {
  on_processes(1, on_gpu(), [](PartialState&) {
    const auto expect_on_cpu = [](const Deep& net) {
      for (const auto& tensor : net->parameters()) EXPECT_TRUE(tensor.is_cpu());
      for (const auto& tensor : net->buffers()) EXPECT_TRUE(tensor.is_cpu());
    };
    DeviceMap map;
    for (int i = 0; i < 12; ++i) {
      map.set("layer" + std::to_string(i), i < 6 ? MapDevice(0) : MapDevice("cpu"));
    }
    map.set("norm", 0);
    const torch::NoGradGuard no_grad;
    auto net = deep();
    net->eval();
    const auto expected = net->forward(input().cpu());
    const auto model = dispatch_model(net, map);
    EXPECT_TRUE(net->layers[0]->weight.is_cuda());
    EXPECT_TRUE(model.main_device().is_cuda());
    EXPECT_TRUE(has(message_of<StateError>([&] { model.to(torch::kCPU); }), "remove_hooks()"));
    model(input());
    model.remove_hooks();
    expect_on_cpu(net);
    EXPECT_TRUE(model.main_device().is_cpu());
    EXPECT_TRUE(model(input().cpu()).equal(expected));
    model.to(torch::kCUDA);
    EXPECT_TRUE(net->layers[11]->weight.is_cuda());
    EXPECT_TRUE(model(input().cpu()).is_cpu()) << "the main device is the GPU now";
    EXPECT_TRUE(net->forward(input()).is_cuda());

    // Also where the last tensor cannot be placed.
    auto half = deep();
    set_module_tensor_to_device(*half, "norm.weight", torch::kMeta);
    EXPECT_THROW((void)dispatch_model(half, map), StateError);
    for (const auto& layer : half->layers) EXPECT_TRUE(layer->weight.is_cpu());
  });
}

TEST_F(CudaOffload, Bf16AutocastHasTheSameBits) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    const auto run = [](const auto& forward) {
      at::autocast::set_autocast_enabled(at::kCUDA, true);
      at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
      auto y = forward(input());
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCUDA, false);
      return y;
    };
    auto net = deep();
    auto resident = deep();
    resident->to(torch::kCUDA);
    const auto model = cpu_offload(net, {.execution_device = state.device()});
    EXPECT_TRUE(run([&](const torch::Tensor& x) {
                  return model(x);
                }).equal(run([&](const torch::Tensor& x) { return resident->forward(x); })));
  });
}

TEST_F(CudaOffload, RecurrentWeightsInOneFlatStorageWork) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    const auto make = [] {
      torch::manual_seed(2);
      torch::nn::LSTM lstm(torch::nn::LSTMOptions(16, 12).num_layers(2));
      lstm->to(torch::kCUDA);
      return lstm;
    };
    auto lstm = make();
    auto resident = make();
    const auto model = cpu_offload(lstm, {.execution_device = state.device()});
    const auto x = torch::randn({10, 3, 16}, torch::kCUDA);
    const auto ours = std::get<0>(lstm->forward(x));
    const auto theirs = std::get<0>(resident->forward(x));
    EXPECT_TRUE(ours.equal(theirs));
    model.offload_now();
    ours.pow(2).sum().backward();
    theirs.pow(2).sum().backward();
    for (std::size_t i = 0; i < lstm->parameters().size(); ++i) {
      EXPECT_TRUE(lstm->parameters()[i].grad().equal(resident->parameters()[i].grad())) << i;
    }
  });
}

TEST_F(CudaOffload, AMapMixesTheGpuHostMemoryAndDisk) {
  on_processes(1, on_gpu(), [](PartialState&) {
    const test::Folder folder;
    auto net = deep();
    DeviceMap map;
    for (int i = 0; i < 12; ++i) {
      map.set("layer" + std::to_string(i), i % 3 == 0   ? MapDevice(0)
                                           : i % 3 == 1 ? MapDevice("cpu")
                                                        : MapDevice("disk"));
    }
    map.set("norm", 0);
    const auto model =
        dispatch_model(net, map, {.offload_dir = folder.path(), .lazy = {.writable = true}});
    EXPECT_FALSE(is_offloaded(net->layers[0]->weight));
    EXPECT_TRUE(is_offloaded(net->layers[1]->weight));
    expect_trains_as_resident(net, [&](const torch::Tensor& x) { return model(x); });
  });
}

TEST_F(CudaOffload, ACheckpointIsLoadedOntoTheGpuWithinABudget) {
  on_processes(1, on_gpu(), [](PartialState&) {
    const test::Folder folder;
    save_model(state_dict(*deep()), folder.path() / "checkpoint");
    auto resident = deep();
    resident->to(torch::kCUDA);
    resident->eval();
    auto net = init_empty_weights([] { return Deep(); });
    const auto model =
        load_checkpoint_and_dispatch(net, folder.path() / "checkpoint",
                                     {.device_map = "sequential",
                                      .max_memory = MaxMemory{{0, "20MB"}, {"cpu", "30MB"}},
                                      .offload_folder = folder.path() / "spill"});
    net->eval();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(model(input()).equal(resident->forward(input())));
  });
}

// Two devices that compute: activations follow the weights, forward and backward.
TEST_F(CudaOffload, ArgumentsFollowTheWeightsBetweenDevices) {
  on_processes(1, on_gpu(), [](PartialState&) {
    torch::nn::Linear first(8, 8);
    torch::nn::Linear second(8, 8);
    second->to(torch::kCUDA);
    detail::offload::LazyParams engine{LazyOptions{}};
    for (const auto& layer : {first, second}) {
      for (const auto& item : layer->named_parameters()) {
        engine.manage_resident({{item.key(), item.value()}});
      }
    }
    const detail::lazy::OneDevicePerOperator scope;
    const auto x = torch::randn({4, 8});
    const auto hidden = first->forward(x);
    const auto there = second->forward(hidden);
    EXPECT_TRUE(there.is_cuda());
    const auto sum = hidden + there;  // a residual connection
    EXPECT_TRUE(sum.is_cuda());
    const auto back = first->forward(sum);
    EXPECT_TRUE(back.is_cpu());
    back.sum().backward();
    EXPECT_TRUE(first->weight.grad().is_cpu());
    EXPECT_TRUE(second->weight.grad().is_cuda());
  });
}

}  // namespace
}  // namespace accelerate
