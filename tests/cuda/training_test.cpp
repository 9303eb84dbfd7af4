// The training loop on a GPU: float16 with its factor on the loss, bfloat16, one rank with NCCL,
// two ranks on one GPU with Gloo.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "cuda/on_gpu.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

namespace F = torch::nn::functional;
using test::message_of;
using test::on_gpu;

class CudaTraining : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
};

struct LineImpl : torch::nn::Module {
  LineImpl() { weight = register_parameter("weight", torch::ones({1})); }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
  torch::Tensor weight;
};
TORCH_MODULE(Line);

AcceleratorOptions fp16(int steps = 1) {
  return {.mixed_precision = PrecisionType::kFp16,
          .gradient_accumulation_steps = steps,
          .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024, .growth_interval = 2}}};
}

TEST_F(CudaTraining, SkipsStepsWithInfiniteGradientsAndAdjustsTheFactor) {
  on_processes(1, on_gpu(), [] {
    Accelerator accelerator(fp16(/*steps=*/2));
    Line net;
    auto [model, optimizer] = accelerator.prepare(
        net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.5)));
    EXPECT_TRUE(net->weight.is_cuda());
    const auto device = accelerator.device();
    constexpr float kInf = std::numeric_limits<float>::infinity();
    // The table of the specification: two micro-steps each, the second pair with an infinity.
    std::string stepped;
    std::string skipped;
    std::vector<double> scales;
    for (const float x : {1.0F, 1.0F, kInf, 1.0F, 1.0F, 1.0F}) {
      auto accumulating = accelerator.accumulate(model);
      const float before = net->weight.item<float>();
      accelerator.backward(model(torch::full({1}, x, device)).sum());
      optimizer.step();
      optimizer.zero_grad();
      stepped += net->weight.item<float>() != before ? '1' : '0';
      skipped += optimizer.step_was_skipped() ? '1' : '0';
      scales.push_back(accelerator.scaler()->get_scale());
    }
    EXPECT_EQ(stepped, "010001");
    EXPECT_EQ(skipped, "000110");
    EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 1024, 512, 512, 512}));
    EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
    EXPECT_FLOAT_EQ(net->weight.item<float>(), 0) << "1 - 0.5 - 0.5: gradients are unscaled";
  });
}

TEST_F(CudaTraining, DividesAllOptimizersByTheFactorTheyWereScaledWith) {
  on_processes(1, on_gpu(), [] {
    Accelerator accelerator(fp16());
    Line a;
    Line b;
    auto [left, right, first, second] = accelerator.prepare(
        a, b, torch::optim::SGD(a->parameters(), torch::optim::SGDOptions(0.25)),
        SGD(b->parameters(), {.lr = 0.25}));
    const auto one = torch::ones({1}, accelerator.device());
    for (int step = 1; step <= 4; ++step) {
      accelerator.backward((left(one) + right(one)).sum());
      const auto norm = accelerator.clip_grad_norm_(left.parameters(), 100);
      EXPECT_FLOAT_EQ(norm.item<float>(), 1) << "unscaled before it is measured";
      first.step();
      second.step();
      first.zero_grad();
      second.zero_grad();
      EXPECT_FLOAT_EQ(a->weight.item<float>(), 1 - 0.25F * step);
      EXPECT_FLOAT_EQ(b->weight.item<float>(), 1 - 0.25F * step);
      EXPECT_EQ(accelerator.scaler()->get_scale(), step < 2   ? 1024
                                                   : step < 4 ? 2048
                                                              : 4096)
          << "the factor changes once per step, not once per optimizer";
    }
    // One optimizer rests: the factor changes at the next backward all the same.
    accelerator.backward((left(one) + right(one)).sum());
    first.step();
    accelerator.backward(left(one).sum());
    EXPECT_EQ(accelerator.scaler()->get_growth_tracker(), 1);
  });
}

TEST_F(CudaTraining, RefusesToClipWhatIsNotComplete) {
  on_processes(1, on_gpu(), [] {
    Accelerator accelerator(fp16(/*steps=*/2));
    Line net;
    auto model = accelerator.prepare(net);
    auto accumulating = accelerator.accumulate(model);
    accelerator.backward(model(torch::ones({1}, accelerator.device())).sum());
    EXPECT_NE(message_of<StateError>([&] {
                accelerator.clip_grad_norm_(model.parameters(), 1);
              }).find("sync_gradients"),
              std::string::npos);
  });
}

TEST_F(CudaTraining, SchedulersRestWhereAStepWasSkipped) {
  on_processes(1, on_gpu(), [] {
    Accelerator accelerator(fp16());
    Line net;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0));
    auto [model, optimizer, scheduler] = accelerator.prepare(
        net, sgd, LambdaLR(sgd, [](std::int64_t k) { return 1 - 0.05 * static_cast<double>(k); }));
    const auto run = [&, &model = model, &optimizer = optimizer, &scheduler = scheduler](float x) {
      accelerator.backward(model(torch::full({1}, x, accelerator.device())).sum());
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      return scheduler.get_last_lr()[0];
    };
    EXPECT_DOUBLE_EQ(run(1), 0.95);
    EXPECT_DOUBLE_EQ(run(std::nanf("")), 0.95);
    EXPECT_DOUBLE_EQ(run(1), 0.90);
  });
}

/// The losses of a small classifier over `steps` batches, on this rank's part of the data.
std::vector<float> losses(Accelerator& accelerator, int steps) {
  torch::manual_seed(3);
  const auto inputs = torch::randn({64, 32});
  const auto labels = inputs.slice(1, 0, 4).argmax(1);
  auto net = torch::nn::Sequential(nn::Linear(32, 64), torch::nn::GELU(), nn::Linear(64, 4));
  const int batch = 16 / accelerator.num_processes();
  auto [model, optimizer, loader] =
      accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-2}),
                          make_data_loader(std::pair{inputs, labels}, {.batch_size = batch}));
  std::vector<float> result;
  while (result.size() < static_cast<std::size_t>(steps)) {
    for (auto& [x, y] : loader) {
      EXPECT_TRUE(x.is_cuda());
      const auto loss = F::cross_entropy(model(x), y);
      EXPECT_EQ(loss.scalar_type(), torch::kFloat);
      accelerator.backward(loss);
      accelerator.clip_grad_norm_(model.parameters(), 5.0);
      optimizer.step();
      optimizer.zero_grad();
      result.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<float>());
    }
  }
  accelerator.free_memory(model, optimizer, loader);
  return result;
}

std::vector<float> losses_in(PrecisionType precision) {
  AcceleratorState::_reset_state();
  Accelerator accelerator({.mixed_precision = precision});
  return losses(accelerator, 40);
}

void expect_the_same_learning() {
  const auto full = losses_in(PrecisionType::kNo);
  EXPECT_LT(full.back(), full.front() / 4);
  for (const auto precision : {PrecisionType::kFp16, PrecisionType::kBf16}) {
    const auto mixed = losses_in(precision);
    for (std::size_t i = 0; i < full.size(); ++i) {
      EXPECT_NEAR(mixed[i], full[i], 0.05 * full[0]) << to_string(precision) << ", step " << i;
    }
  }
}

TEST_F(CudaTraining, LearnsInEveryPrecisionWithOneRankOfNccl) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    EXPECT_EQ(state.backend(), "nccl");
    expect_the_same_learning();
  });
}

TEST_F(CudaTraining, LearnsInEveryPrecisionWithTwoRanksOnOneGpu) {
  on_processes(2, on_gpu(), [] { expect_the_same_learning(); });
}

/// Each rank also computes the whole by itself.
void expect_what_one_rank_computes(const PartialState& state) {
  Accelerator accelerator;
  torch::manual_seed(0);
  auto net = nn::Linear(8, 3);
  auto copy = nn::Linear(8, 3);
  {
    const torch::NoGradGuard no_grad;
    copy->to(state.device());
    copy->weight.copy_(net->weight);
    copy->bias.copy_(net->bias);
  }
  const auto inputs = torch::randn({12, 8});
  auto [model, optimizer, loader] =
      accelerator.prepare(net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)),
                          make_data_loader(inputs, {.batch_size = 2}));
  torch::optim::SGD alone(copy->parameters(), torch::optim::SGDOptions(0.1));
  int round = 0;
  for (auto& x : loader) {
    accelerator.backward(model(x).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
    const auto whole = inputs.slice(0, 4 * round, 4 * round + 4).to(state.device());
    copy->forward(whole).pow(2).mean().backward();
    alone.step();
    alone.zero_grad();
    ++round;
  }
  EXPECT_EQ(round, 3);
  EXPECT_TRUE(torch::allclose(net->weight, copy->weight, 1e-5, 1e-6));
}

TEST_F(CudaTraining, TwoRanksOnOneGpuComputeWhatOneComputes) {
  on_processes(2, on_gpu(), [](PartialState& state) { expect_what_one_rank_computes(state); });
}

TEST_F(CudaTraining, TwoRanksOfNcclComputeWhatOneComputes) {
  // Ranks that name different hosts may share a GPU: see nccl_test.cpp.
  const auto outcomes = run_processes(
      2,
      {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}, {"NCCL_SOCKET_IFNAME", "lo"}},
       .processes_per_host = 1},
      [] {
        ::setenv("NCCL_HOSTID", std::getenv("RANK"), 1);
        PartialState state({.backend = "nccl"});
        EXPECT_EQ(state.backend(), "nccl");
        expect_what_one_rank_computes(state);
        state.wait_for_everyone();
      });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST_F(CudaTraining, MovesArgumentsAndOptimizerStateToTheDevice) {
  on_processes(2, on_gpu(), [] {
    torch::nn::Linear net(4, 2);
    torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
    net->forward(torch::ones({1, 4})).sum().backward();
    adamw.step();  // on the CPU
    Accelerator accelerator;
    auto [model, optimizer] = accelerator.prepare(net, adamw);
    optimizer.zero_grad();
    accelerator.backward(model(torch::ones({1, 4})).sum());  // as Python's DistributedDataParallel
    optimizer.step();
    EXPECT_TRUE(net->weight.is_cuda());
  });
}

TEST_F(CudaTraining, ActivationCheckpointsHaveTheBitsOfThePlainCall) {
  on_processes(1, on_gpu(), [] {
    Accelerator accelerator({.mixed_precision = PrecisionType::kBf16});
    torch::nn::Sequential block(torch::nn::Linear(64, 256), torch::nn::GELU(),
                                torch::nn::Dropout(0.5), torch::nn::Linear(256, 64));
    block->to(accelerator.device());
    const auto x = torch::randn({32, 64}, accelerator.device());
    const auto gradient = [&](bool checkpointed) {
      block->zero_grad();
      set_seed(3);
      const auto casting = accelerator.autocast();
      const auto y = checkpointed ? activation_checkpoint(block, x) : block->forward(x);
      accelerator.backward(y.to(torch::kFloat).pow(2).sum());
      return block->parameters()[0].grad().clone();
    };
    const auto plain = gradient(false);
    EXPECT_TRUE(torch::equal(gradient(true), plain));
  });
}

TEST_F(CudaTraining, MetricsDoNotWaitForTheDevice) {
  on_processes(1, on_gpu(), [](PartialState& state) {
    DeferredMetrics metrics;
    const auto device = state.device();
    // Work that takes a while, so that a wait would show.
    auto x = torch::randn({4096, 4096}, device);
    x.matmul(x).sum().item<float>();
    metrics.add("loss", x.sum());  // a kernel that is loaded on first use waits
    (void)metrics.read();
    for (int i = 0; i < 100; ++i) x = x.matmul(x) / 4096;
    const auto before = std::chrono::steady_clock::now();
    for (int i = 0; i < 10; ++i) metrics.add("loss", x.sum());
    const auto added = std::chrono::steady_clock::now() - before;
    (void)metrics.read();
    const auto read = std::chrono::steady_clock::now() - before;
    EXPECT_LT(added, read / 2);
  });
}

}  // namespace
}  // namespace accelerate
