#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <sys/personality.h>
#include <sys/utsname.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "modeling/outline.h"
#include "support/fake_gpu.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::Line;
using test::LineImpl;
using test::message_of;
namespace F = torch::nn::functional;

class AcceleratorTest : public test::Stateless {};

/// y = 2x for x = 1 to n.
auto line_data(int n, int batch_size) {
  const auto x = torch::arange(1, n + 1, torch::kFloat);
  return make_data_loader(std::pair{x, 2 * x}, {.batch_size = batch_size});
}

AcceleratorOptions on_cpu(AcceleratorOptions options = {}) {
  options.cpu = true;
  return options;
}

TEST_F(AcceleratorTest, RunsThePageThatAUserWrites) {
  Accelerator accelerator(
      on_cpu({.mixed_precision = PrecisionType::kBf16, .gradient_accumulation_steps = 4}));
  set_seed(42);

  auto net =
      torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 3));
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(2e-2));
  const auto inputs = torch::randn({96, 8});
  const auto labels = inputs.slice(1, 0, 3).argmax(1);
  auto data = make_data_loader(std::pair{inputs, labels}, {.batch_size = 16, .shuffle = true});
  auto schedule = CosineAnnealingLR(adamw, {.t_max = 100});

  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(net, std::move(adamw), std::move(data), std::move(schedule));
  double first = 0;
  double last = 0;
  for (int epoch = 0; epoch < 20; ++epoch) {
    for (auto& [x, y] : loader) {
      auto accumulating = accelerator.accumulate(model);
      auto loss = F::cross_entropy(model(x), y);
      EXPECT_EQ(loss.scalar_type(), torch::kFloat);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      last = loss.item<double>();
      if (first == 0) first = last;
    }
  }
  EXPECT_LT(last, first / 2);
  // Six batches are two steps: the fourth batch and the last one.
  EXPECT_EQ(scheduler.scheduler().last_epoch(), 40);
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), scheduler.get_last_lr()[0]);
}

TEST_F(AcceleratorTest, KeepsOrderAndTypesOfWhatIsPrepared) {
  Accelerator accelerator(on_cpu());
  Line net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
  LambdaLR schedule(sgd, [](std::int64_t k) { return 1.0 / (k + 1); });
  auto [scheduler, number, loader, optimizer, model, nothing] = accelerator.prepare(
      schedule, 7, line_data(6, 2), sgd, std::shared_ptr<LineImpl>(net.ptr()), nullptr);
  static_assert(std::same_as<decltype(scheduler), AcceleratedScheduler>);
  static_assert(std::same_as<decltype(number), int>);
  static_assert(std::same_as<decltype(optimizer), AcceleratedOptimizer>);
  static_assert(std::same_as<decltype(model), PreparedModel<std::shared_ptr<LineImpl>>>);
  static_assert(std::same_as<decltype(nothing), std::nullptr_t>);
  EXPECT_EQ(number, 7);
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(&optimizer.optimizer(), &sgd) << "an lvalue is referred to";
  EXPECT_EQ(&scheduler.scheduler(), &schedule);
  EXPECT_EQ(accelerator.unwrap_model(model), net.ptr());
  EXPECT_EQ(accelerator.unwrap_model(net).ptr(), net.ptr());

  // One object is returned by itself; what is prepared comes back as it is.
  const auto again = accelerator.prepare(model);
  EXPECT_EQ(again._core(), model._core());
  EXPECT_EQ(accelerator.prepare(net.ptr())._core(), model._core());
  EXPECT_EQ(accelerator.prepare(optimizer)._core(), optimizer._core());
  EXPECT_EQ(accelerator.prepare(sgd)._core(), optimizer._core());
  EXPECT_EQ(accelerator.prepare(scheduler)._core(), scheduler._core());
  EXPECT_EQ(accelerator.prepare(loader)._core(), loader._core());

  struct Pinned {
    Pinned() = default;
    Pinned(const Pinned&) = delete;
  } pinned;
  auto&& [same, text] = accelerator.prepare(pinned, std::string("text"));
  EXPECT_EQ(&same, &pinned) << "what cannot be copied is passed on by reference";
  EXPECT_EQ(text, "text");
}

TEST_F(AcceleratorTest, FollowsAnOptimizerThatWasMoved) {
  Accelerator accelerator(on_cpu());
  Line net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0));
  LambdaLR schedule(sgd, [](std::int64_t k) { return 1 - 0.1 * static_cast<double>(k); });
  // In two calls, and the schedule first in neither.
  auto optimizer = accelerator.prepare(std::move(sgd));
  auto scheduler = accelerator.prepare(std::move(schedule));
  scheduler.step();
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.9);

  // A schedule can be built on what is prepared, too.
  auto other = accelerator.prepare(ExponentialLR(optimizer, {.gamma = 0.5}));
  other.step();
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.45);
}

TEST_F(AcceleratorTest, TakesLibTorchsOwnSchedulers) {
  Accelerator accelerator(on_cpu());
  Line net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0));
  torch::optim::StepLR step_lr(sgd, 1, 0.5);
  torch::optim::ReduceLROnPlateauScheduler plateau(
      sgd, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
  auto [optimizer, scheduler, on_plateau] = accelerator.prepare(sgd, step_lr, plateau);
  scheduler.step();
  scheduler.step();
  EXPECT_DOUBLE_EQ(sgd.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_NE(message_of<Error>([&] { (void)scheduler.get_last_lr(); }).find("LibTorch"),
            std::string::npos);
  EXPECT_NE(message_of<Error>([&] { on_plateau.step(); }).find("metric"), std::string::npos);
  EXPECT_NE(message_of<Error>([&] { scheduler.step(1.0); }).find("metric"), std::string::npos);
  on_plateau.step(1.0);
  on_plateau.step(2.0);
  EXPECT_NEAR(sgd.param_groups()[0].options().get_lr(), 0.05, 1e-8);
}

TEST_F(AcceleratorTest, CountsBatchesAsPythonDoes) {
  // Three steps, eight batches: the table of the specification.
  const auto run = [](bool with_dataloader) {
    forget();
    Accelerator accelerator(on_cpu({.gradient_accumulation_plugin = GradientAccumulationPlugin{
                                        .num_steps = 3, .sync_with_dataloader = with_dataloader}}));
    Line net;
    auto [model, loader] = accelerator.prepare(net, line_data(8, 1));
    std::string synced;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for ([[maybe_unused]] auto& batch : loader) {
        auto accumulating = accelerator.accumulate(model);
        synced += accelerator.sync_gradients() ? '1' : '0';
        if (epoch == 1 && synced.size() == 11) break;
      }
    }
    return synced;
  };
  EXPECT_EQ(run(true),
            "00100101"
            "001");
  EXPECT_EQ(run(false),
            "00100100"
            "100");
}

TEST_F(AcceleratorTest, DividesTheLossByTheStepsOfAccumulation) {
  Accelerator accelerator(on_cpu({.gradient_accumulation_steps = 2}));
  Line net;
  auto [model, optimizer, loader] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05)), line_data(6, 2));
  std::vector<double> weights;
  for (auto& [x, y] : loader) {
    accelerator.accumulate(
        [&, x = x, y = y] {
          const auto loss = torch::mse_loss(model(x), y);
          const double value = loss.item<double>();
          accelerator.backward(loss);
          EXPECT_EQ(loss.item<double>(), value) << "the caller's loss keeps its value";
          optimizer.step();
          optimizer.zero_grad();
        },
        model);
    weights.push_back(net->weight.item<double>());
  }
  ASSERT_EQ(weights.size(), 3);
  EXPECT_EQ(weights[0], 0);
  EXPECT_NEAR(weights[1], 1.5, 1e-6);
  EXPECT_NEAR(weights[2], 2.2625, 1e-6) << "a short last window is divided by two as well";
}

TEST_F(AcceleratorTest, TakesOptimizersOfUsersThatAreNotFused) {
  // LBFGS has no fused step and needs a closure.
  Accelerator accelerator(on_cpu());
  Line net;
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::LBFGS(net->parameters(), 1.0));
  const auto x = torch::arange(1, 5, torch::kFloat);
  const auto loss = optimizer.step([&, &model = model, &optimizer = optimizer] {
    optimizer.zero_grad();
    auto result = torch::mse_loss(model(x), 2 * x);
    accelerator.backward(result);
    return result;
  });
  EXPECT_NEAR(net->weight.item<double>(), 2, 1e-3);
  EXPECT_TRUE(loss.defined());
}

TEST_F(AcceleratorTest, ComputesInTheChosenPrecision) {
  Accelerator accelerator(on_cpu({.mixed_precision = PrecisionType::kBf16}));
  auto net = std::make_shared<torch::nn::LinearImpl>(4, 4);
  auto model = accelerator.prepare(net);
  const auto x = torch::ones({2, 4});
  EXPECT_EQ(model(x).scalar_type(), torch::kFloat);
  EXPECT_EQ(model->forward(x).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(net->forward(x).scalar_type(), torch::kFloat) << "the scope ends with the expression";
  {
    const auto scope = accelerator.autocast();
    EXPECT_EQ(torch::mm(x, x.t()).scalar_type(), torch::kBFloat16);
    const auto island = accelerator.autocast(AutocastKwargs{.enabled = false});
    EXPECT_EQ(torch::mm(x, x.t()).scalar_type(), torch::kFloat);
  }
  EXPECT_EQ(torch::mm(x, x.t()).scalar_type(), torch::kFloat);
}

TEST_F(AcceleratorTest, ConvertsWhateverForwardReturns) {
  struct ManyImpl : torch::nn::Module {
    std::tuple<torch::Tensor, std::map<std::string, torch::Tensor>> forward(const torch::Tensor& x,
                                                                            bool twice,
                                                                            torch::Tensor* seen) {
      *seen = torch::mm(x, x);
      return {twice ? *seen * 2 : *seen, {{"half", *seen}, {"index", torch::arange(3)}}};
    }
  };
  Accelerator accelerator(on_cpu({.mixed_precision = PrecisionType::kBf16}));
  const auto model = accelerator.prepare(std::make_shared<ManyImpl>());
  torch::Tensor seen;
  const auto [first, rest] = model(torch::ones({3, 3}), true, &seen);
  EXPECT_EQ(seen.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(first.scalar_type(), torch::kFloat);
  EXPECT_EQ(rest.at("half").scalar_type(), torch::kFloat);
  EXPECT_EQ(rest.at("index").scalar_type(), torch::kLong);
}

TEST_F(AcceleratorTest, TrainsInFloat32WhereACpuHasNoFloat16) {
  Accelerator accelerator(on_cpu({.mixed_precision = PrecisionType::kFp16}));
  EXPECT_EQ(accelerator.mixed_precision(), PrecisionType::kFp16);
  EXPECT_EQ(accelerator.scaler(), nullptr);
  Line net;
  auto [model, optimizer] =
      accelerator.prepare(net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)));
  accelerator.backward(model(torch::ones({1})).sum());
  optimizer.step();
  EXPECT_FLOAT_EQ(net->weight.item<float>(), -0.1F);
  EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
}

TEST_F(AcceleratorTest, ClipsByNormAndByValue) {
  Accelerator accelerator(on_cpu());
  torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
  auto model = accelerator.prepare(net);
  const auto gradient_of = [&](float a, float b) {
    net->zero_grad();
    accelerator.backward(model(torch::tensor({{a, b}})).sum());
    return net->weight.grad();
  };
  auto gradient = gradient_of(3, 4);
  const auto norm = accelerator.clip_grad_norm_(model.parameters(), 1.0);
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_FLOAT_EQ(norm.item<float>(), 5);
  EXPECT_NEAR(gradient.norm().item<float>(), 1, 1e-5);
  gradient = gradient_of(3, -4);
  accelerator.clip_grad_value_(net->weight, 0.5);
  EXPECT_TRUE(torch::equal(gradient, torch::tensor({{0.5F, -0.5F}})));
}

TEST_F(AcceleratorTest, SaysWhatIsWrongWithALoss) {
  Accelerator accelerator(on_cpu());
  Line net;
  auto model = accelerator.prepare(net);
  const auto x = torch::ones({3});
  EXPECT_NE(message_of<Error>([&] { accelerator.backward(torch::Tensor()); }).find("not defined"),
            std::string::npos);
  EXPECT_NE(message_of<Error>([&] { accelerator.backward(x.sum()); }).find("does not depend"),
            std::string::npos);
  EXPECT_NE(message_of<Error>([&] { accelerator.backward(model(x)); }).find("[3]"),
            std::string::npos);
  accelerator.backward(model(x), {.gradient = torch::ones({3}), .retain_graph = true});
  EXPECT_EQ(net->weight.grad().item<float>(), 3);
}

TEST_F(AcceleratorTest, RefusesOptionsThatContradictEachOther) {
  const auto message = [](const AcceleratorOptions& options) {
    return message_of<Error>([&] { Accelerator accelerator(on_cpu(options)); });
  };
  EXPECT_NE(message({.gradient_accumulation_steps = 2,
                     .gradient_accumulation_plugin = GradientAccumulationPlugin{.num_steps = 4}})
                .find("gradient_accumulation_plugin"),
            std::string::npos);
  EXPECT_NE(message({.gradient_accumulation_steps = 0}).find("is 0"), std::string::npos);
  EXPECT_NE(message({.dynamo_backend = DynamoBackend::kNo, .dynamo_plugin = TorchDynamoPlugin{}})
                .find("dynamo_plugin"),
            std::string::npos);
  EXPECT_NE(message({.dynamo_backend = DynamoBackend::kInductor}).find("INDUCTOR"),
            std::string::npos);
  EXPECT_EQ(message({.kwargs_handlers = {AORecipeKwargs{}}}),
            "A recipe for fp8 is in kwargs_handlers, but mixed_precision is 'no', not fp8. Take it "
            "out.");
  EXPECT_NE(message({.kwargs_handlers = {GradScalerKwargs{}, GradScalerKwargs{}}})
                .find("GradScalerKwargs"),
            std::string::npos);
  EXPECT_NE(message({.project_config = ProjectConfiguration{.save_on_preemption = true}})
                .find("save_on_preemption needs a name"),
            std::string::npos);
  EXPECT_NE(message({.parallelism_config = ParallelismConfig{.tp_size = 2}}).find("tp_size"),
            std::string::npos);
  EXPECT_NE(message({.split_batches = false, .dataloader_config = {.split_batches = true}})
                .find("split_batches"),
            std::string::npos);
  EXPECT_FALSE(AcceleratorState::initialized()) << "nothing is left behind";
}

TEST_F(AcceleratorTest, ChecksPluginsThatHaveNoEffectToo) {
  const auto message = [](const AcceleratorOptions& options) {
    return message_of<ConfigError>([&] { Accelerator accelerator(on_cpu(options)); });
  };
  EXPECT_EQ(message({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 7}}),
            "fsdp_version is 7. Choose 1 or 2.");
  EXPECT_EQ(message({.deepspeed_plugin = DeepSpeedPlugin{.zero_stage = 9}}),
            "zero_stage is 9. Choose 0, 1, 2 or 3.");
  EXPECT_EQ(message({.deepspeed_plugins = {{"a", {}}, {"b", {.zero_stage = 9}}}}),
            "zero_stage is 9. Choose 0, 1, 2 or 3.");
  EXPECT_NE(message({.torch_tp_plugin = TorchTensorParallelPlugin{.tp_size = 0}}).find("tp_size"),
            std::string::npos);
  EXPECT_NE(message({.megatron_lm_plugin = MegatronLMPlugin{.tp_degree = 0}}).find("tp_degree"),
            std::string::npos);
  EXPECT_FALSE(AcceleratorState::initialized());
}

TEST_F(AcceleratorTest, RefusesKeysOfADeepSpeedFileThatItDoesNotKnow) {
  const Value::Dict file{{"zero_optimization", Value::Dict{{"stage", 2}}}, {"fp61", 1}};
  EXPECT_NE(message_of<ConfigError>([&] {
              Accelerator accelerator(
                  on_cpu({.deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = file}}));
            }).find("'fp61' in the DeepSpeed configuration is not known here"),
            std::string::npos);
  EXPECT_FALSE(AcceleratorState::initialized());
}

/// Whatever a failed construction asked for, the next one is as the first.
TEST_F(AcceleratorTest, LeavesNothingBehindWhenItsConstructionFails) {
  const auto fails = [](AcceleratorOptions options) {
    options.mixed_precision = PrecisionType::kBf16;
    options.gradient_accumulation_steps = options.gradient_accumulation_plugin ? 1 : 2;
    EXPECT_THROW(Accelerator{on_cpu(options)}, ConfigError);
    EXPECT_FALSE(AcceleratorState::initialized());
    EXPECT_FALSE(PartialState::initialized());
    EXPECT_FALSE(GradientState::initialized());
    const Accelerator next(on_cpu({.mixed_precision = PrecisionType::kNo}));
    EXPECT_EQ(next.mixed_precision(), PrecisionType::kNo);
    EXPECT_EQ(next.gradient_accumulation_steps(), 1);
    EXPECT_EQ(next.state().parallelism_config(), nullptr);
    forget();
  };
  fails({.parallelism_config = ParallelismConfig{.dp_replicate_size = 3}});
  fails({.project_config = ProjectConfiguration{.total_limit = 0}});
  fails({.gradient_accumulation_plugin = GradientAccumulationPlugin{.num_steps = 0}});
}

TEST_F(AcceleratorTest, KeepsTheStateThatWasThereBeforeAFailedConstruction) {
  const PartialState partial({.cpu = true});
  EXPECT_THROW(Accelerator(on_cpu({.parallelism_config = {{.dp_replicate_size = 3}}})),
               ConfigError);
  EXPECT_TRUE(PartialState::initialized());
  EXPECT_FALSE(AcceleratorState::initialized());

  const Accelerator first(
      on_cpu({.mixed_precision = PrecisionType::kBf16, .gradient_accumulation_steps = 3}));
  EXPECT_THROW(Accelerator(on_cpu({.gradient_accumulation_steps = 4,
                                   .parallelism_config = {{.dp_replicate_size = 3}}})),
               ConfigError);
  EXPECT_EQ(first.mixed_precision(), PrecisionType::kBf16);
  EXPECT_EQ(first.gradient_accumulation_steps(), 3);
}

TEST_F(AcceleratorTest, NamesTheVariableWhoseStepsAreNone) {
  for (const std::string text : {"-3", "0"}) {
    const auto patched = patch_environment({{"accelerate_gradient_accumulation_steps", text}});
    EXPECT_EQ(message_of<ConfigError>([] { Accelerator accelerator(on_cpu()); }),
              "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is '" + text +
                  "', but a step takes one batch at least. Set it to 1 or more.");
  }
  const auto patched = patch_environment({{"accelerate_gradient_accumulation_steps", "abc"}});
  EXPECT_EQ(message_of<ConfigError>([] { Accelerator accelerator(on_cpu()); }),
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'abc', which is not a whole number.");
  EXPECT_FALSE(AcceleratorState::initialized());
}

TEST_F(AcceleratorTest, RefusesAParallelismConfigThatComesTooLate) {
  const AcceleratorOptions options = on_cpu({.parallelism_config = ParallelismConfig{}});
  {
    const Accelerator first(on_cpu());
    EXPECT_EQ(message_of<ConfigError>([&] { Accelerator second(options); }),
              "The accelerator state is already set up without this parallelism_config and cannot "
              "be changed. Pass it to the first `Accelerator`, or leave it out.");
    EXPECT_NE(message_of<ConfigError>([] {
                Accelerator second(on_cpu({.parallelism_config = {{.dp_replicate_size = 7}}}));
              }).find("multiply to 7"),
              std::string::npos);
  }
  forget();
  const Accelerator first(options);
  EXPECT_NO_THROW(Accelerator{options}) << "the same again asks for nothing new";
  EXPECT_NO_THROW(Accelerator{on_cpu()});
}

TEST_F(AcceleratorTest, TakesTheStepsOfTheEnvironmentFirst) {
  const auto patched = patch_environment({{"accelerate_gradient_accumulation_steps", "5"}});
  Accelerator accelerator(on_cpu({.gradient_accumulation_steps = 2}));
  EXPECT_EQ(accelerator.gradient_accumulation_steps(), 5);
  accelerator.set_gradient_accumulation_steps(3);
  EXPECT_EQ(GradientState().num_steps(), 3);
}

TEST_F(AcceleratorTest, LeavesTheStepsOfAnEarlierOneAlone) {
  Accelerator first(on_cpu({.gradient_accumulation_steps = 4}));
  Accelerator second(on_cpu());
  EXPECT_EQ(second.gradient_accumulation_steps(), 4);
  Accelerator third(on_cpu({.gradient_accumulation_steps = 2}));
  EXPECT_EQ(first.gradient_accumulation_steps(), 2);
  Accelerator fourth(on_cpu({.gradient_accumulation_steps = 1}));
  EXPECT_EQ(first.gradient_accumulation_steps(), 1) << "it was given";
  EXPECT_NE(message_of<Error>([] {
              Accelerator other(on_cpu({.mixed_precision = PrecisionType::kBf16}));
            }).find("mixed_precision"),
            std::string::npos);
}

TEST_F(AcceleratorTest, ForgetsWhatItIsToldTo) {
  Accelerator accelerator(on_cpu({.gradient_accumulation_steps = 2}));
  Line net;
  std::weak_ptr<LineImpl> alive = net.ptr();
  auto [model, optimizer, loader] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)), line_data(4, 1));
  (void)accelerator.accumulate(model);
  net = nullptr;
  accelerator.free_memory(model, optimizer, loader);
  EXPECT_TRUE(alive.expired());
  EXPECT_NE(message_of<Error>([&, &optimizer = optimizer] { optimizer.step(); }).find("empty"),
            std::string::npos);
  EXPECT_NE(message_of<Error>([&, &model = model] { (void)model.parameters(); }).find("empty"),
            std::string::npos);
  // Counting begins anew.
  Line other;
  auto prepared = accelerator.prepare(other);
  {
    auto scope = accelerator.accumulate(prepared);
    EXPECT_FALSE(accelerator.sync_gradients());
  }
  {
    auto scope = accelerator.accumulate(prepared);
    EXPECT_TRUE(accelerator.sync_gradients());
  }
}

TEST_F(AcceleratorTest, ReplacesAParameterAndWhatIsKnownOfIt) {
  struct PointsImpl : torch::nn::Module {
    PointsImpl() {
      means = register_parameter("means", torch::arange(6, torch::kFloat).view({3, 2}));
    }
    torch::Tensor forward() { return means.pow(2).sum(); }
    torch::Tensor means;
  };
  Accelerator accelerator(on_cpu());
  auto points = std::make_shared<PointsImpl>();
  auto [model, optimizer] = accelerator.prepare(points, AdamW(points->parameters(), {.lr = 0.1}));
  accelerator.backward(model());
  optimizer.step();
  auto& adamw = dynamic_cast<AdamW&>(optimizer.optimizer());
  const auto before = adamw.state_of(points->means);
  ASSERT_EQ(before[1].first, "exp_avg");

  const auto kept = torch::tensor({2, 0, 0, 2});
  model.replace_parameter("means", points->means.detach().index_select(0, kept),
                          {.state = [&](const std::string&, const torch::Tensor& old) {
                            return old.index_select(0, kept);
                          }});
  EXPECT_EQ(points->means.size(0), 4) << "the member is the parameter";
  EXPECT_EQ(model.parameters()[0].size(0), 4);
  const auto after = adamw.state_of(points->means);
  EXPECT_TRUE(torch::equal(after[1].second, before[1].second.index_select(0, kept)));
  EXPECT_EQ(after[0].second.item<float>(), 1) << "the count of steps goes on";
  accelerator.backward(model());
  optimizer.step();

  EXPECT_NE(message_of<Error>([&, &model = model] {
              model.replace_parameter("means", torch::zeros({1, 2}),
                                      {.state = ReplacedState::kKeep});
            }).find("shape"),
            std::string::npos);
  EXPECT_EQ(points->means.size(0), 4) << "nothing has changed";
  model.replace_parameter("means", torch::zeros({1, 2}));
  EXPECT_TRUE(adamw.state_of(points->means).empty());
  EXPECT_NE(message_of<Error>([&, &model = model] {
              model.replace_parameter("mean", torch::zeros({1}));
            }).find("means"),
            std::string::npos);
}

TEST_F(AcceleratorTest, SaysWhyAMemberIsNotThere) {
  Accelerator accelerator(on_cpu());
  EXPECT_NE(message_of<Error>([&] { accelerator.lomo_backward(torch::ones(1), 0.1); }).find("LOMO"),
            std::string::npos);
  EXPECT_NE(message_of<Error>([&] { (void)accelerator.pipeline_parallel_rank(); }).find("pipeline"),
            std::string::npos);
  EXPECT_NE(message_of<Error>([&] {
              (void)accelerator.tensor_parallel_rank();
            }).find("parallelism_config"),
            std::string::npos);
}

TEST_F(AcceleratorTest, DoesNothingWhereNothingWasConfigured) {
  const test::CapturedLog log;
  Accelerator accelerator(on_cpu());
  accelerator.init_trackers("project", {{"rate", 0.1}});
  accelerator.log({{"loss", 0.5}}, 3);
  auto& tracker = accelerator.get_tracker("tensorboard");
  tracker.log({{"loss", 0.5}});
  tracker.finish();
  const auto loader = line_data(2, 1);
  EXPECT_EQ(accelerator.deepspeed_ulysses_dl_adapter(loader, Line())._core(), loader._core());
  EXPECT_TRUE(log.messages().empty());
  auto ids = torch::arange(4);
  {
    const auto split =
        accelerator.maybe_context_parallel({.buffers = {ids}, .buffer_seq_dims = {0}});
    EXPECT_EQ(ids.size(0), 4);
  }
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_NE(log.messages()[0].find("Context parallel training is not enabled"), std::string::npos);
  accelerator.end_training();
}

TEST_F(AcceleratorTest, ReachesTheStateAndItsPlugins) {
  Accelerator accelerator(on_cpu());
  accelerator.state().set_device();
  EXPECT_FALSE(accelerator.is_fsdp2());
  EXPECT_FALSE(accelerator.is_composable_parallelism_enabled());
  EXPECT_EQ(accelerator.deepspeed_plugin(), nullptr);
  EXPECT_EQ(accelerator.parallelism_config(), nullptr);
  EXPECT_EQ(accelerator.torch_device_mesh(), nullptr);
  EXPECT_EQ(accelerator.state().fsdp_plugin(), nullptr);
  EXPECT_EQ(accelerator.state().torch_tp_plugin(), nullptr);
  EXPECT_EQ(accelerator.state().megatron_lm_plugin(), nullptr);
  EXPECT_NE(accelerator.state().dynamo_plugin(), nullptr);
  EXPECT_THROW((void)accelerator.state().get_deepspeed_plugin("student"), StateError);
  EXPECT_THROW(accelerator.state().select_deepspeed_plugin("student"), StateError);
  EXPECT_THROW((void)accelerator.data_parallel_rank(), StateError);
}

TEST_F(AcceleratorTest, RefusesBf16OnAGpuWithoutIt) {
  const test::FakeGpu volta({.major = 7, .minor = 0});
  EXPECT_EQ(message_of<UnsupportedError>(
                [] { const Accelerator accelerator({.mixed_precision = PrecisionType::kBf16}); }),
            "mixed_precision is bf16, which cuda does not compute in: that takes compute "
            "capability 8.0. Use fp16 or no.");
  const Accelerator on_the_cpu(on_cpu({.mixed_precision = PrecisionType::kBf16}));
  EXPECT_EQ(on_the_cpu.mixed_precision(), PrecisionType::kBf16);
}

TEST_F(AcceleratorTest, RecordsTheCurrentGpuOfAProcessAlone) {
  struct OneGpu final : test::FakeGpu {
    using FakeGpu::FakeGpu;
    std::string pci_bus_id(int index) const override {
      asked = index;
      return "";
    }
    mutable int asked = -2;
  };
  const OneGpu gpu({.major = 9, .minor = 0});
  const auto folder = std::filesystem::path(testing::TempDir()) / "records_the_current_gpu";
  const auto patched = patch_environment({{"ACCELERATE_MONITOR", "1"}});
  const Accelerator accelerator({.project_dir = folder});
  EXPECT_EQ(accelerator.device().str(), "cuda");
  EXPECT_EQ(gpu.asked, 0);
  std::filesystem::remove_all(folder);
}

TEST_F(AcceleratorTest, MakesEveryStepOfACycleThatCountsTheBatchesInBetween) {
  Accelerator accelerator(on_cpu({.gradient_accumulation_plugin = GradientAccumulationPlugin{
                                      .num_steps = 2, .adjust_scheduler = true}}));
  Line net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  OneCycleLR cycle(sgd, {.max_lr = 0.1, .total_steps = 4});
  auto [model, optimizer, scheduler] = accelerator.prepare(net, std::move(sgd), std::move(cycle));
  for (int batch = 1; batch <= 10; ++batch) {
    const auto accumulating = accelerator.accumulate(model);
    accelerator.backward(model(torch::ones({1})).sum());
    optimizer.step();
    scheduler.step();
    EXPECT_EQ(scheduler.scheduler().last_epoch(), std::min(batch / 2, 4)) << batch;
  }
}

TEST_F(AcceleratorTest, LeavesModelsThatAreSpreadOverDevicesWhereTheyAre) {
  Accelerator accelerator(on_cpu());
  const auto inner = std::make_shared<LineImpl>();
  const auto net = std::make_shared<torch::nn::ModuleListImpl>();
  net->push_back(inner);
  EXPECT_FALSE(accelerator.verify_device_map(net));
  detail::modeling::set_device_map(inner, DeviceMap{{"", 0}});
  EXPECT_FALSE(accelerator.verify_device_map(net));  // one device
  detail::modeling::set_device_map(inner, DeviceMap{{"first", "meta"}, {"second", "cpu"}});
  EXPECT_TRUE(accelerator.verify_device_map(net));
  set_module_tensor_to_device(*inner, "weight", torch::kMeta);
  const auto model = accelerator.prepare(net);  // moving a tensor off the meta device would throw
  EXPECT_TRUE(accelerator.verify_device_map(model));
}

TEST_F(AcceleratorTest, TellsWhatIsTheCase) {
  Accelerator accelerator(on_cpu({.dataloader_config = {.dispatch_batches = false,
                                                        .use_seedable_sampler = true,
                                                        .data_seed = 7},
                                  .project_dir = "project",
                                  .project_config = ProjectConfiguration{.iteration = 3}}));
  EXPECT_EQ(accelerator.num_processes(), 1);
  EXPECT_EQ(accelerator.device().type(), torch::kCPU);
  EXPECT_FALSE(accelerator.use_distributed());
  EXPECT_FALSE(accelerator.multi_device());
  EXPECT_TRUE(accelerator.should_save_model());
  EXPECT_TRUE(accelerator.even_batches());
  accelerator.set_even_batches(false);
  EXPECT_FALSE(accelerator.even_batches());
  EXPECT_TRUE(accelerator.use_seedable_sampler());
  EXPECT_EQ(accelerator.data_seed(), 7);
  EXPECT_EQ(accelerator.dispatch_batches(), false);
  EXPECT_EQ(accelerator.project_dir(), "project");
  EXPECT_EQ(accelerator.logging_dir(), "project");
  EXPECT_EQ(accelerator.save_iteration(), 3);
  EXPECT_EQ(accelerator.fp8_backend(), FP8BackendType::kNo);
  EXPECT_FALSE(accelerator.check_trigger());
  accelerator.set_trigger();
  EXPECT_TRUE(accelerator.check_trigger());
  EXPECT_FALSE(accelerator.check_trigger());
  EXPECT_TRUE(accelerator.agree_to_stop(true));
  EXPECT_FALSE(accelerator.agree_to_stop(false));
  const auto names = accelerator.get_state_dict(torch::nn::Linear(1, 1)).keys();
  EXPECT_EQ(names, (std::vector<std::string>{"weight", "bias"}));
}

TEST_F(AcceleratorTest, GivesTheModelToTheFunctionThatTakesWrappersOff) {
  Accelerator accelerator(on_cpu());
  const Line net;
  const auto model = accelerator.prepare(net);
  static_assert(std::same_as<decltype(extract_model_from_parallel(model)), Line>);
  EXPECT_EQ(extract_model_from_parallel(model).ptr(), net.ptr());
  EXPECT_EQ(extract_model_from_parallel(model, {.recursive = true}).ptr(), net.ptr());
  EXPECT_EQ(extract_model_from_parallel(accelerator.prepare(net.ptr())), net.ptr());
  EXPECT_THROW((void)extract_model_from_parallel(PreparedModel<Line>()), StateError);
}

TEST_F(AcceleratorTest, WarnsOfAnOldKernel) {
  const auto before = ::personality(0xffffffff);
  ::personality(static_cast<unsigned>(before) | UNAME26);
  utsname system{};
  const bool looks_old = ::uname(&system) == 0 && std::string(system.release).starts_with("2.6");
  const test::CapturedLog log;
  const Accelerator accelerator(on_cpu());
  ::personality(static_cast<unsigned>(before));
  if (!looks_old) GTEST_SKIP() << "this system does not show another kernel version";
  EXPECT_TRUE(std::ranges::any_of(log.messages(), [](const std::string& message) {
    return message.find("The kernel of this machine has version 2.6.") != std::string::npos;
  }));
}

TEST_F(AcceleratorTest, WantsAFlagForEachObject) {
  Accelerator accelerator(on_cpu());
  Line net;
  EXPECT_NE(message_of<Error>([&] {
              (void)accelerator.prepare(DevicePlacement{true}, net, 1);
            }).find("1 flags for 2 objects"),
            std::string::npos);
  auto [model, number] = accelerator.prepare(DevicePlacement{false, true}, net, 1);
  EXPECT_EQ(model.device().type(), torch::kCPU);
}

}  // namespace
}  // namespace accelerate
