// Sharded training on a GPU: one rank with NCCL, two ranks on one GPU with Gloo.
#include <accelerate/accelerate.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "core/text.h"
#include "cuda/on_gpu.h"
#include "sharding/sharded_run.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using detail::str;
using test::expect_equal;
using test::OffloadTarget;
using test::on_gpu;
using test::run;
using test::sharded;
using test::ShardLevel;
using test::TinyGpt;

constexpr ShardLevel kLevels[] = {ShardLevel::kOptimizer, ShardLevel::kGradients,
                                  ShardLevel::kParameters};

class CudaSharding : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
};

void expect_the_bits_of_data_parallelism() {
  const auto wanted = run({.steps = 6});
  EXPECT_TRUE(wanted.parameters.front().is_cuda());
  EXPECT_NE(wanted.losses.back(), wanted.losses.front());
  for (const auto level : kLevels) {
    const auto what = str("level ", static_cast<int>(level));
    expect_equal(run({.spec = sharded(level), .steps = 6}), wanted, what);
    expect_equal(run({.spec = sharded(level, 0), .steps = 6}), wanted, what + ", no prefetch");
  }
}

void expect_close(const std::vector<torch::Tensor>& values,
                  const std::vector<torch::Tensor>& wanted, ShardLevel level) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(torch::allclose(values[i], wanted[i], 1e-5, 1e-6))
        << "level " << static_cast<int>(level) << ", parameter " << i;
  }
}

// The host rounds some steps in another way.
TEST_F(CudaSharding, OffloadedShardsTrainAsDataParallelismDoes) {
  for (const int ranks : {1, 2}) {
    on_processes(ranks, on_gpu(), [] {
      const auto wanted = run({.step = test::Step::kMomentum, .steps = 6});
      for (const auto level : kLevels) {
        auto spec = sharded(level);
        spec.offload = {.parameters = OffloadTarget::kCpu, .optimizer = OffloadTarget::kCpu};
        const auto result = run({.spec = spec, .step = test::Step::kMomentum, .steps = 6});
        expect_close(result.parameters, wanted.parameters, level);
      }
    });
  }
}

TEST_F(CudaSharding, OneRankOfNcclHasTheBitsOfDataParallelism) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    EXPECT_EQ(state.backend(), "nccl");
    expect_the_bits_of_data_parallelism();
  });
}

TEST_F(CudaSharding, TwoRanksOnOneGpuHaveTheBitsOfDataParallelism) {
  on_processes(2, on_gpu(), [] { expect_the_bits_of_data_parallelism(); });
}

TEST_F(CudaSharding, AccumulatesAndClipsAsDataParallelismDoes) {
  on_processes(2, on_gpu(), [] {
    const auto wanted = run({.step = test::Step::kMomentum, .batches = 3, .max_norm = 0.1});
    for (const auto level : kLevels) {
      const auto result = run(
          {.spec = sharded(level), .step = test::Step::kMomentum, .batches = 3, .max_norm = 0.1});
      expect_close(result.parameters, wanted.parameters, level);
    }
  });
}

torch::Tensor words_of(const Accelerator& accelerator, int step) {
  torch::manual_seed(10 * step + accelerator.process_index());
  return torch::randint(test::kWords, {4, 9}, torch::kLong).to(accelerator.device());
}

/// A program with AdamW whose accelerator decides how it is trained.
struct Program {
  explicit Program(AcceleratorOptions options) : accelerator(on_device(std::move(options))) {
    torch::manual_seed(3);
    net = TinyGpt();
    auto prepared = accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-2}));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
  }
  static AcceleratorOptions on_device(AcceleratorOptions options) {
    auto result = test::anew(std::move(options));
    result.cpu = false;
    return result;
  }
  double train(int step) {
    const auto words = words_of(accelerator, step);
    const auto scores = model(words.slice(1, 0, 8)).reshape({-1, test::kWords});
    const auto loss = torch::nn::functional::cross_entropy(scores.to(torch::kFloat),
                                                           words.slice(1, 1).reshape(-1));
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss.item<double>();
  }
  std::vector<double> train(int first, int end) {
    std::vector<double> losses;
    for (int step = first; step < end; ++step) losses.push_back(train(step));
    return losses;
  }

  Accelerator accelerator;
  TinyGpt net{nullptr};
  PreparedModel<TinyGpt> model;
  AcceleratedOptimizer optimizer;
};

TEST_F(CudaSharding, Float16SkipsAStepOnAllRanksIfOneOverflows) {
  on_processes(2, on_gpu(), [] {
    Program program(
        {.mixed_precision = PrecisionType::kFp16,
         .kwargs_handlers = {GradScalerKwargs{.init_scale = 0x1p40, .backoff_factor = 0x1p-30}},
         .parallelism_config = ParallelismConfig{.dp_shard_size = 2}});
    ASSERT_NE(program.accelerator.scaler(), nullptr);
    EXPECT_EQ(program.net->head->weight.scalar_type(), torch::kHalf);
    const auto first = program.train(0);
    EXPECT_TRUE(program.optimizer.step_was_skipped());
    EXPECT_EQ(program.train(0), first) << "the skipped step has changed nothing";
    EXPECT_FALSE(program.optimizer.step_was_skipped());
    for (int i = 0; i < 10; ++i) (void)program.train(0);
    EXPECT_LT(program.train(0), first);
  });
}

TEST_F(CudaSharding, ADeepSpeedConfigurationOffloadsTheOptimizerOfOneRank) {
  on_processes(1, on_gpu(), [] {
    using Dict = Value::Dict;
    const auto train = [](const Dict& zero) {
      const Dict tree{{"train_micro_batch_size_per_gpu", 4}, {"zero_optimization", zero}};
      Program program({.deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = tree}});
      auto losses = program.train(0, 4);
      const auto& master = program.optimizer.param_groups()[0].params()[0];
      return std::pair(std::move(losses), master.device());
    };
    for (const int stage : {2, 3}) {
      const auto [wanted, device] = train(Dict{{"stage", stage}});
      EXPECT_TRUE(device.is_cuda());
      const auto [losses, host] =
          train(Dict{{"stage", stage}, {"offload_optimizer", Dict{{"device", "cpu"}}}});
      EXPECT_TRUE(host.is_cpu());
      ASSERT_EQ(losses.size(), wanted.size());
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_NEAR(losses[i], wanted[i], 1e-4) << "stage " << stage << ", step " << i;
      }
    }
  });
}

TEST_F(CudaSharding, ASavedRunGoesOnAsIfItHadNotStopped) {
  const test::SharedFolder folder;
  auto options = folder.options();
  options.environment.emplace_back("ACCELERATE_USE_CPU", std::nullopt);
  on_processes(2, options, [&] {
    for (const auto type : {StateDictType::kFullStateDict, StateDictType::kShardedStateDict}) {
      const AcceleratorOptions plugin{.fsdp_plugin = FullyShardedDataParallelPlugin{
                                          .fsdp_version = 2, .state_dict_type = type}};
      const auto state = folder.path() / std::to_string(static_cast<int>(type));
      Program saved(plugin);
      (void)saved.train(0, 3);
      saved.accelerator.save_state(state);
      const auto wanted = saved.train(3, 6);
      Program resumed(plugin);
      (void)resumed.train(10, 12);
      resumed.accelerator.load_state(state);
      const auto losses = resumed.train(3, 6);
      for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(losses[i], wanted[i], 1e-5);
    }
  });
}

// Each rank may use 1.4 GB for a model of 100 million parameters, which takes 1.6 GB with its
// gradients and AdamW's state.
TEST_F(CudaSharding, TrainsWhatDoesNotFitIntoTheMemoryOfARank) {
  const test::SharedFolder folder;
  const auto total_file = folder.path() / "total";
  auto options = folder.options();
  options.environment.emplace_back("ACCELERATE_USE_CPU", std::nullopt);
  on_processes(1, options, [&](PartialState& state) {
    const auto info = c10::getDeviceAllocator(at::kCUDA)->getMemoryInfo(state.device().index());
    std::ofstream(total_file) << info.second;
  });
  double total = 1e12;
  std::ifstream(total_file) >> total;
  options.environment.emplace_back("PYTORCH_CUDA_ALLOC_CONF",
                                   str("per_process_memory_fraction:", 1.4e9 / total));
  on_processes(2, options, [] {
    const auto train = [](std::optional<FullyShardedDataParallelPlugin> plugin) {
      auto wanted = test::anew({.fsdp_plugin = std::move(plugin)});
      wanted.cpu = false;
      Accelerator accelerator(wanted);
      torch::manual_seed(3);
      TinyGpt net(2048);
      auto [model, optimizer] = accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-3}));
      const auto words = torch::randint(
          test::kWords, {4, 9}, torch::TensorOptions(torch::kLong).device(accelerator.device()));
      std::vector<double> losses;
      for (int step = 0; step < 4; ++step) {
        const auto scores = model(words.slice(1, 0, 8)).reshape({-1, test::kWords});
        const auto loss =
            torch::nn::functional::cross_entropy(scores, words.slice(1, 1).reshape(-1));
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        losses.push_back(loss.item<double>());
      }
      return losses;
    };
    const auto losses = train(FullyShardedDataParallelPlugin{
        .fsdp_version = 2,
        .auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap,
        .cpu_offload = true,
        .transformer_cls_names_to_wrap = std::vector<std::string>{"Block"}});
    EXPECT_LT(losses.back(), losses.front());
    EXPECT_ANY_THROW((void)train(std::nullopt));
  });
}

}  // namespace
}  // namespace accelerate
