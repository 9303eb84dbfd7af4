// Captured steps on a GPU: the numbers of the plain loop.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/command.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
using Batch = std::pair<torch::Tensor, torch::Tensor>;

struct Settings {
  PrecisionType precision = PrecisionType::kNo;
  std::int64_t accumulation = 1;
  double dropout = 0;
  double init_scale = 65536;
  /// The batch whose scaled gradients are infinite in float16, and its loss is not; -1: none.
  int overflow_at = -1;
};

struct Result {
  std::vector<double> losses = {};
  std::vector<double> rates = {};
  std::vector<bool> skipped = {};
  std::vector<torch::Tensor> parameters = {};
  std::int64_t graphs = 0;
};

/// 200 steps with a warm-up schedule and clipping.
Result train(const Settings& settings, bool captured) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  GradientState::_reset_state();
  AcceleratorOptions options;
  options.mixed_precision = settings.precision;
  options.gradient_accumulation_steps = settings.accumulation;
  options.kwargs_handlers = {
      GradScalerKwargs{.init_scale = settings.init_scale, .growth_interval = 20}};
  Accelerator accelerator(options);
  torch::manual_seed(11);
  const auto x = torch::randn({1600, 16});
  const auto y = x.sum(1, /*keepdim=*/true).sin();
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(),
                            torch::nn::Dropout(settings.dropout), torch::nn::Linear(64, 1));
  // A recorded step has the learning rate as a float32 tensor: let the eager one have it too.
  auto adamw = AdamW(net->parameters(), {.lr = 1e-2, .capturable = !captured});
  auto warm = LinearLR(adamw, {.start_factor = 0.1, .total_iters = 30});
  auto data = make_data_loader(std::pair{x, y}, {.batch_size = 8});
  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(net, std::move(adamw), std::move(data), std::move(warm));
  const auto body = [&, &model = model, &optimizer = optimizer,
                     &scheduler = scheduler](Batch& batch) {
    const auto accumulating = accelerator.accumulate(model);
    const auto loss = (model(batch.first) - batch.second).pow(2).mean();
    accelerator.backward(loss);
    if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    return loss;
  };
  auto step = accelerator.capture(body);
  Result result;
  for (auto& batch : loader) {
    if (std::ssize(result.losses) == settings.overflow_at) batch.second.fill_(1e5);
    result.losses.push_back((captured ? step(batch) : body(batch)).template item<double>());
    result.rates.push_back(scheduler.get_last_lr().front());
    result.skipped.push_back(accelerator.optimizer_step_was_skipped());
  }
  result.graphs = step.num_graphs();
  for (const auto& parameter : net->parameters())
    result.parameters.push_back(parameter.detach().cpu());
  return result;
}

void expect_same_run(const Settings& settings) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto expected = train(settings, /*captured=*/false);
  const auto found = train(settings, /*captured=*/true);
  ASSERT_EQ(found.losses.size(), 200u);
  for (std::size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-6 * (1 + expected.losses[i])) << i;
  }
  EXPECT_EQ(found.rates, expected.rates);
  EXPECT_EQ(found.skipped, expected.skipped);
  for (std::size_t i = 0; i < found.parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found.parameters[i], expected.parameters[i], 1e-5, 1e-6)) << i;
  }
  EXPECT_EQ(found.graphs, settings.accumulation > 1 ? 2 : 1);
}

TEST(CapturedSteps, HaveTheLossesOfTheLoop) { expect_same_run({}); }
TEST(CapturedSteps, HaveThemInBf16) { expect_same_run({.precision = PrecisionType::kBf16}); }
TEST(CapturedSteps, DrawTheDropoutOfTheLoop) { expect_same_run({.dropout = 0.25}); }
TEST(CapturedSteps, AccumulateAsTheLoop) { expect_same_run({.accumulation = 3}); }

TEST(CapturedSteps, SkipStepsOfFloat16AndMendTheFactor) {
  // The first factors overflow, and the factor grows into an overflow again later.
  const Settings settings{.precision = PrecisionType::kFp16, .init_scale = 1e30};
  expect_same_run(settings);
  if (!torch::cuda::is_available()) return;
  const auto run = train(settings, /*captured=*/true);
  EXPECT_TRUE(run.skipped.front());
  EXPECT_FALSE(run.skipped.back());
}

TEST(CapturedSteps, SkipAStepThatOverflowsInTheMiddleOfARun) {
  const Settings settings{
      .precision = PrecisionType::kFp16, .init_scale = 1024, .overflow_at = 100};
  expect_same_run(settings);
  if (!torch::cuda::is_available()) return;
  const auto run = train(settings, /*captured=*/true);
  EXPECT_TRUE(run.skipped[100]);
  EXPECT_FALSE(run.skipped[99]);
  EXPECT_FALSE(run.skipped[101]);
}

TEST(CapturedSteps, DrawTheDropoutOfTheLoopInFloat16) {
  expect_same_run({.precision = PrecisionType::kFp16, .dropout = 0.25, .init_scale = 1024});
}

/// A model with dropout that is called with tensors of its own.
struct SmallRun {
  explicit SmallRun(AcceleratorOptions options = {}) : accelerator(fresh(std::move(options))) {
    torch::manual_seed(5);
    net = torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::Tanh(),
                                torch::nn::Dropout(0.25), torch::nn::Linear(64, 1));
    std::tie(model, optimizer) = accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-2}));
  }
  static AcceleratorOptions fresh(AcceleratorOptions options) {
    AcceleratorState::_reset_state(/*reset_partial_state=*/true);
    GradientState::_reset_state();
    return options;
  }
  torch::Tensor operator()(torch::Tensor& x) {
    const auto loss = (model(x) - x.sum(1, /*keepdim=*/true)).pow(2).mean();
    accelerator.backward(loss);
    accelerator.clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  }
  [[nodiscard]] torch::Tensor batch(std::int64_t index, std::int64_t size = 8) const {
    const auto x = torch::arange(size * 16, torch::kFloat).reshape({size, 16});
    return ((x + static_cast<double>(index)) * 0.37).sin().to(accelerator.device());
  }

  Accelerator accelerator;
  torch::nn::Sequential net = nullptr;
  PreparedModel<torch::nn::Sequential> model;
  AcceleratedOptimizer optimizer;
};

TEST(CapturedSteps, GoOnFromALoadedState) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const test::Folder folder;
  SmallRun run;
  auto step = run.accelerator.capture([&](torch::Tensor& x) { return run(x); });
  const auto ten_steps = [&] {
    std::vector<double> losses;
    for (std::int64_t i = 0; i < 10; ++i) {
      auto x = run.batch(i);
      losses.push_back(step(x).template item<double>());
    }
    return losses;
  };
  (void)ten_steps();
  run.accelerator.save_state(folder.path() / "state");
  const auto first = ten_steps();
  run.accelerator.load_state(folder.path() / "state");
  const auto second = ten_steps();
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_NEAR(second[i], first[i], 1e-6 * (1 + first[i])) << i;
  }
  EXPECT_EQ(step.num_graphs(), 1);
}

TEST(CapturedSteps, TakeTurnsWithTwoShapes) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto train = [](bool captured) {
    SmallRun run;
    auto step = run.accelerator.capture([&](torch::Tensor& x) { return run(x); });
    std::vector<double> losses;
    for (std::int64_t i = 0; i < 100; ++i) {
      auto x = run.batch(i, i % 3 == 0 ? 5 : 8);
      losses.push_back((captured ? step(x) : run(x)).template item<double>());
    }
    EXPECT_EQ(step.num_graphs(), captured ? 2 : 0);
    return losses;
  };
  const auto expected = train(false);
  const auto found = train(true);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-6 * (1 + expected[i])) << i;
  }
}

TEST(CapturedSteps, AreRecordedAgainAfterAParameterWasReplaced) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto train = [](bool captured) {
    SmallRun run;
    auto step = run.accelerator.capture([&](torch::Tensor& x) { return run(x); });
    std::vector<double> losses;
    for (std::int64_t i = 0; i < 40; ++i) {
      if (i == 20) {
        run.model.replace_parameter("0.weight", run.net->parameters()[0].detach() * 0.5);
      }
      auto x = run.batch(i);
      losses.push_back((captured ? step(x) : run(x)).template item<double>());
    }
    return losses;
  };
  const auto expected = train(false);
  const auto found = train(true);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-6 * (1 + expected[i])) << i;
  }
}

TEST(CapturedSteps, RefuseMomentumThatASchedulerChanges) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  SmallRun run;
  auto cycle = OneCycleLR(run.optimizer.optimizer(), {.max_lr = 0.01, .total_steps = 100});
  auto scheduler = run.accelerator.prepare(std::move(cycle));
  auto step = run.accelerator.capture([&](torch::Tensor& x) {
    const auto loss = run(x);
    scheduler.step();
    return loss;
  });
  const auto message = message_of<UnsupportedError>([&] {
    for (std::int64_t i = 0; i < 20; ++i) {
      auto x = run.batch(i);
      (void)step(x);
    }
  });
  EXPECT_NE(message.find("betas of AdamW changes from step to step"), std::string::npos) << message;
  EXPECT_NE(message.find("cycle_momentum"), std::string::npos) << message;
}

TEST(CapturedSteps, NameWhatCannotBeRecorded) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  Accelerator accelerator;
  const auto refusal = [&](auto body) {
    auto step = accelerator.capture(body, {.warmup = 1});
    auto x = torch::ones({8}, accelerator.device());
    (void)step(x);
    const auto message = message_of<UnsupportedError>([&] { (void)step(x); });
    auto next = accelerator.capture([](torch::Tensor& one) { return one + 1; }, {.warmup = 1});
    (void)next(x);
    EXPECT_EQ(next(x).sum().template item<float>(), 16) << "the device is usable after " << message;
    EXPECT_NE(torch::rand({8}, x.device()).sum().template item<float>(), 0) << message;
    return message;
  };
  EXPECT_NE(refusal([](torch::Tensor& x) { return x * x.sum().item<float>(); }).find("aten::item"),
            std::string::npos);
  EXPECT_NE(refusal([](torch::Tensor& x) { return x.nonzero(); }).find("aten::nonzero"),
            std::string::npos);
  EXPECT_NE(refusal([](torch::Tensor& x) {
              return x + torch::rand({8}).to(x.device());
            }).find("on the CPU"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate
