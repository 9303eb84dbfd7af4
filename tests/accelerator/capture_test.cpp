// Captured steps: on the CPU as it is, and with graphs that run the step again as a GPU would.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <regex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/fake_graphs.h"
#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::anew;
using test::FakeGraphs;
using test::memory_of;
using test::message_of;
using test::Small;
using Batch = std::pair<torch::Tensor, torch::Tensor>;
using test::Tensors;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("drop", drop);
    register_module("second", second);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(drop(torch::tanh(first(x)))).squeeze(1);
  }
  torch::nn::Linear first{3, 8}, second{8, 1};
  torch::nn::Dropout drop{0.25};
};
TORCH_MODULE(Net);

struct RunOptions {
  bool captured = false;
  bool fake = false;
  std::int64_t accumulation = 1;
  std::int64_t samples = 80;  // batches of 4, twice
  CaptureOptions capture = {};
};

struct RunResult {
  std::vector<float> losses = {};
  std::vector<double> rates = {};
  Tensors parameters = {};
  int warm_ups = 0, records = 0, replays = 0;
  std::int64_t graphs = 0;
};

/// Two epochs with dropout, clipping, a schedule and accumulation.
RunResult train(const RunOptions& options) {
  Accelerator accelerator(anew({.gradient_accumulation_steps = options.accumulation}));
  torch::manual_seed(7);
  const auto x = torch::randn({options.samples, 3});
  const auto y = x.sum(1).sin();
  Net net;
  auto adamw = AdamW(net->parameters(), {.lr = 0.05});
  auto cosine = CosineAnnealingLR(adamw, {.t_max = 20});
  auto data = make_data_loader(std::pair{x, y}, {.batch_size = 4});
  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(net, std::move(adamw), std::move(data), std::move(cosine));
  const auto parameters = net->parameters();
  std::unique_ptr<FakeGraphs> fake;
  if (options.fake) {
    fake = std::make_unique<FakeGraphs>(
        [&, &optimizer = optimizer] { return memory_of(parameters, optimizer); });
  }

  const auto body = [&, &model = model, &optimizer = optimizer,
                     &scheduler = scheduler](Batch& batch) {
    const auto accumulating = accelerator.accumulate(model);
    const auto loss = (model(batch.first) - batch.second).pow(2).mean();
    accelerator.backward(loss);
    if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 0.5);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    return loss;
  };
  auto step = accelerator.capture(body, options.capture);
  RunResult result;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : loader) {
      const auto loss = options.captured ? step(batch) : body(batch);
      result.losses.push_back(loss.template item<float>());
      result.rates.push_back(scheduler.get_last_lr().front());
    }
  }
  result.parameters = parameters;
  result.graphs = step.num_graphs();
  if (fake) {
    result.warm_ups = fake->warm_ups;
    result.records = fake->records;
    result.replays = fake->replays;
  }
  return result;
}

void expect_same(const RunResult& found, const RunResult& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.rates, expected.rates);
  for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_TRUE(found.parameters[i].equal(expected.parameters[i])) << i;
  }
}

class CaptureTest : public test::Stateless {};

TEST_F(CaptureTest, RunsTheStepAsItIsOnACpu) {
  const auto expected = train({});
  const auto found = train({.captured = true});
  expect_same(found, expected);
  EXPECT_EQ(found.graphs, 0);
  ASSERT_EQ(expected.losses.size(), 40u);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
}

TEST_F(CaptureTest, ReplaysGiveTheLossesOfTheLoop) {
  const auto found = train({.captured = true, .fake = true});
  expect_same(found, train({}));
  EXPECT_EQ(found.warm_ups, 3);
  EXPECT_EQ(found.records, 1);
  EXPECT_EQ(found.replays, 37);
  EXPECT_EQ(found.graphs, 1);
}

TEST_F(CaptureTest, AccumulationTakesTwoGraphs) {
  // 20 batches by 3: the last 2 of an epoch end a step too.
  const auto found = train({.captured = true, .fake = true, .accumulation = 3});
  expect_same(found, train({.accumulation = 3}));
  EXPECT_EQ(found.records, 2);
  EXPECT_EQ(found.warm_ups, 6);
  EXPECT_EQ(found.replays, 34);
}

TEST_F(CaptureTest, NewShapesAreRecordedAndOldOnesMakeRoom) {
  // 19 batches of 4 samples and one of 2: seen once per epoch, it is never recorded.
  const auto rare = train({.captured = true, .fake = true, .samples = 78});
  expect_same(rare, train({.samples = 78}));
  EXPECT_EQ(rare.records, 1);
  const CaptureOptions at_once{.warmup = 1, .max_graphs = 8};
  const auto both = train({.captured = true, .fake = true, .samples = 78, .capture = at_once});
  expect_same(both, train({.samples = 78}));
  EXPECT_EQ(both.records, 2);
  EXPECT_EQ(both.graphs, 2);
  const test::CapturedLog log;
  const CaptureOptions one{.warmup = 1, .max_graphs = 1};
  const auto evicted = train({.captured = true, .fake = true, .samples = 78, .capture = one});
  expect_same(evicted, train({.samples = 78}));
  EXPECT_EQ(evicted.records, 2) << "the second one took the place of the first";
  EXPECT_EQ(evicted.graphs, 1) << "that of the last batch";
  ASSERT_EQ(log.messages().size(), 1u);
  EXPECT_NE(log.messages()[0].find("more than max_graphs = 1 sets of shapes"), std::string::npos);
}

/// Trains a model whose layers multiply in 8 bits.
RunResult train_in_8_bits(const KwargsHandler& recipe, bool captured) {
  Accelerator accelerator(
      anew({.mixed_precision = PrecisionType::kFp8, .kwargs_handlers = {recipe}}));
  torch::manual_seed(7);
  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::Linear(32, 16),
                            torch::nn::Linear(16, 16));
  auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.05}));
  FakeGraphs fake([&, &optimizer = optimizer] { return memory_of(net->parameters(), optimizer); });
  const auto body = [&, &model = model, &optimizer = optimizer](torch::Tensor& x) {
    const auto loss = (model(x) - x).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  };
  auto step = accelerator.capture(body, {.warmup = 2});
  RunResult result;
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(static_cast<std::uint64_t>(100 + i));
    auto x = torch::randn({8, 16});
    result.losses.push_back((captured ? step(x) : body(x)).item<float>());
  }
  result.parameters = net->parameters();
  result.replays = fake.replays;
  return result;
}

TEST_F(CaptureTest, StepsIn8BitsAreRecorded) {
  const auto found = train_in_8_bits(AORecipeKwargs{}, true);
  expect_same(found, train_in_8_bits(AORecipeKwargs{}, false));
  EXPECT_EQ(found.replays, 3);
  EXPECT_EQ(train_in_8_bits(TERecipeKwargs{}, true).replays, 3);
}

TEST_F(CaptureTest, RefusesScalesThatAreComputedEveryFewSteps) {
  const auto message = message_of<UnsupportedError>(
      [] { static_cast<void>(train_in_8_bits(TERecipeKwargs{.interval = 2}, true)); });
  EXPECT_NE(message.find("the fp8 recipe has an interval of 2 steps"), std::string::npos)
      << message;
  EXPECT_NE(message.find("Set interval to 1"), std::string::npos) << message;
}

TEST_F(CaptureTest, ResultsOutliveTheNextReplayAndAreDetached) {
  Small small;
  FakeGraphs fake([&] { return small.memory(); });
  auto step =
      small.accelerator.capture([&](torch::Tensor& x) { return small.train(x); }, {.warmup = 1});
  Tensors losses;
  for (int i = 1; i <= 4; ++i) {
    auto x = torch::full({1}, static_cast<float>(i));
    losses.push_back(step(x));
    x.fill_(100);  // the batch is the program's
  }
  // w: 1, 0.5, -0.5, -2
  const std::vector<float> expected{1, 1, -1.5, -8};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(losses[i].item<float>(), expected[i]) << i;
    EXPECT_FALSE(losses[i].requires_grad()) << i;
  }
  EXPECT_EQ(fake.replays, 3);
}

TEST_F(CaptureTest, TakesSeveralArgumentsAndReturnsTreesOrNothing) {
  Small small;
  const FakeGraphs fake;
  auto pair = small.accelerator.capture(
      [](const torch::Tensor& a, const Tensors& more) {
        return std::pair{a + more[0], a * more[1]};
      },
      {.warmup = 1});
  for (int i = 0; i < 3; ++i) {
    const auto [sum, product] =
        pair(torch::full({2}, i), Tensors{torch::ones(2), torch::full({2}, 2)});
    EXPECT_TRUE(sum.equal(torch::full({2}, i + 1)));
    EXPECT_TRUE(product.equal(torch::full({2}, 2 * i)));
  }
  int calls = 0;
  auto nothing = small.accelerator.capture([&] { ++calls; }, {.warmup = 1});
  for (int i = 0; i < 3; ++i) nothing();
  EXPECT_EQ(calls, 4) << "warm-up, recording, and two replays of the fake";
}

TEST_F(CaptureTest, NamesTheOperatorThatCannotBeRecorded) {
  Small small;
  FakeGraphs fake([&] { return small.memory(); });
  const auto body = [&](torch::Tensor& x) {
    const auto loss = small.train(x);
    if (loss.item<float>() > 1e6) throw std::runtime_error("diverged");
    return loss;
  };
  auto step = small.accelerator.capture(body, {.warmup = 1});
  auto x = torch::ones({1});
  (void)step(x);
  const auto before = small.w.item<float>();
  const auto message = message_of<UnsupportedError>([&] { (void)step(x); });
  EXPECT_NE(message.find("capture_test.cpp"), std::string::npos) << message;
  EXPECT_NE(message.find("the step cannot be recorded: aten::item waits for the device: item()"),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("fallback_to_eager"), std::string::npos) << message;
  EXPECT_EQ(small.w.item<float>(), before);

  const test::CapturedLog log;
  auto patient = small.accelerator.capture(body, {.warmup = 1, .fallback_to_eager = true});
  for (int i = 0; i < 4; ++i) (void)patient(x);
  EXPECT_EQ(small.w.item<float>(), before - 4 * 0.5f);
  ASSERT_EQ(log.messages().size(), 1u);
  EXPECT_NE(log.messages()[0].find("It runs as it is."), std::string::npos);
  EXPECT_EQ(patient.num_graphs(), 0);
}

struct Refusing : torch::autograd::Function<Refusing> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors gradients) {
    TORCH_CHECK(!refuses, "not while a step is recorded");
    return gradients;
  }
  static inline bool refuses = false;
};

TEST_F(CaptureTest, NamesTheLastOperatorBeforeAnErrorOfABackwardNode) {
  Accelerator accelerator(anew({}));
  const auto w = torch::ones({1}).requires_grad_();
  const FakeGraphs fake([&] { return Tensors{w}; });
  auto step = accelerator.capture(
      [&](torch::Tensor& x) { accelerator.backward(Refusing::apply(w * x).sum()); }, {.warmup = 1});
  auto x = torch::ones({1});
  step(x);
  Refusing::refuses = true;
  const auto message = message_of<UnsupportedError>([&] { step(x); });
  Refusing::refuses = false;
  EXPECT_TRUE(std::regex_search(
      message,
      std::regex("cannot be recorded: aten::[a-z_]+ failed: not while a step is recorded")))
      << message;
}

TEST_F(CaptureTest, RefusesAFirstGradientAfterTheWarmUp) {
  Accelerator accelerator(anew({}));
  const auto a = torch::ones({1}).requires_grad_();
  const auto b = torch::ones({3}).requires_grad_();
  auto optimizer = accelerator.prepare(AdamW(Tensors{a, b}, {.lr = 0.5}));
  const FakeGraphs fake([&] { return memory_of({a, b}, optimizer); });
  bool uses_both = false;
  auto step = accelerator.capture(
      [&](torch::Tensor& x) {
        auto loss = (a * x).sum();
        if (uses_both) loss = loss + (b * x).sum();
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      },
      {.warmup = 1});
  auto x = torch::ones({1});
  step(x);
  uses_both = true;
  const auto message = message_of<UnsupportedError>([&] { step(x); });
  EXPECT_NE(message.find("a parameter of shape [3] has its first gradient"), std::string::npos)
      << message;
}

TEST_F(CaptureTest, NamesResultsWhoseShapeDependsOnValues) {
  Small small;
  const FakeGraphs fake;
  auto step =
      small.accelerator.capture([](torch::Tensor& x) { return x.nonzero(); }, {.warmup = 1});
  auto x = torch::ones({2});
  (void)step(x);
  const auto message = message_of<UnsupportedError>([&] { (void)step(x); });
  EXPECT_NE(message.find("aten::nonzero has a result whose shape depends on values"),
            std::string::npos)
      << message;
}

TEST_F(CaptureTest, RefusesOptimizersThatLiveOnTheHost) {
  Accelerator accelerator(anew());
  test::Line net;
  auto sgd = torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1));
  auto optimizer = accelerator.prepare(sgd);
  const FakeGraphs fake;
  auto step = accelerator.capture([](torch::Tensor& x) { return x + 1; });
  auto x = torch::ones({1});
  for (int i = 0; i < 2; ++i) {  // the second time too
    const auto message = message_of<UnsupportedError>([&] { (void)step(x); });
    EXPECT_NE(message.find("accelerate::AdamW"), std::string::npos) << message;
  }
}

TEST_F(CaptureTest, PassesErrorsOfTheProgramOn) {
  Small small;
  const FakeGraphs fake;
  bool fails = false;
  auto step = small.accelerator.capture(
      [&](torch::Tensor& x) {
        if (fails) throw std::runtime_error("no such label");
        return small.train(x);
      },
      {.warmup = 1});
  auto x = torch::ones({1});
  (void)step(x);
  fails = true;
  EXPECT_EQ(message_of<std::runtime_error>([&] { (void)step(x); }), "no such label");
  EXPECT_EQ(step.num_graphs(), 0);
}

TEST_F(CaptureTest, ModesOfModelsHaveGraphsOfTheirOwn) {
  Accelerator accelerator(anew());
  auto model = accelerator.prepare(torch::nn::Dropout(1.0));
  const FakeGraphs fake;
  auto step = accelerator.capture([&](torch::Tensor& x) { return model(x); }, {.warmup = 1});
  auto x = torch::ones({4});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step(x).sum().item<float>(), 0);
  model.eval();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step(x).sum().item<float>(), 4);
  EXPECT_EQ(step.num_graphs(), 2);
}

TEST_F(CaptureTest, FollowsTheDynamoPlugin) {
  const auto cudagraphs = [](TorchDynamoPlugin plugin) {
    plugin.backend = DynamoBackend::kCudagraphs;
    return AcceleratorOptions{.dynamo_plugin = plugin};
  };
  auto x = torch::ones({1}), longer = torch::ones({2});
  {
    Small small(cudagraphs({}));
    const FakeGraphs fake;
    const test::CapturedLog log;
    auto step = small.accelerator.capture(
        [](torch::Tensor& one) { return torch::full({}, one.item<float>()); }, {.warmup = 1});
    for (int i = 0; i < 3; ++i) EXPECT_EQ(step(x).item<float>(), 1);
    EXPECT_EQ(log.messages().size(), 1u);
  }
  {
    Small small(cudagraphs({.fullgraph = true}));
    const FakeGraphs fake;
    auto step = small.accelerator.capture(
        [](torch::Tensor& one) { return torch::full({}, one.item<float>()); }, {.warmup = 1});
    (void)step(x);
    EXPECT_THROW((void)step(x), UnsupportedError);
  }
  {
    Small small(cudagraphs({.dynamic = false}));
    const FakeGraphs fake;
    auto step = small.accelerator.capture([](torch::Tensor& one) { return one + 1; });
    (void)step(x);
    EXPECT_NE(message_of<ArgumentError>([&] {
                (void)step(longer);
              }).find("dynamic of the TorchDynamoPlugin"),
              std::string::npos);
  }
  {
    Small small(cudagraphs({.disable = true}));
    FakeGraphs fake;
    auto step =
        small.accelerator.capture([](torch::Tensor& one) { return one + 1; }, {.warmup = 1});
    for (int i = 0; i < 3; ++i) (void)step(x);
    EXPECT_EQ(fake.records, 0);
  }
}

TEST_F(CaptureTest, OptionsOfPythonsCompilerHaveNoEffectAndSaySo) {
  const test::CapturedLog log;
  const auto make = [](TorchDynamoPlugin plugin) {
    const Accelerator accelerator(anew({.dynamo_plugin = plugin}));
  };
  make({.mode = "max-autotune"});  // as in Python: without a backend nothing is compiled
  make({.backend = DynamoBackend::kEager});
  EXPECT_TRUE(log.messages().empty());
  for (int i = 0; i < 2; ++i) {
    make({.backend = DynamoBackend::kCudagraphs,
          .mode = "max-autotune",
          .use_regional_compilation = true});
  }
  ASSERT_EQ(log.messages().size(), 2u);
  EXPECT_NE(log.messages()[0].find("mode of the TorchDynamoPlugin is 'max-autotune', which has no "
                                   "effect"),
            std::string::npos);
  EXPECT_NE(log.messages()[1].find("use_regional_compilation of the TorchDynamoPlugin"),
            std::string::npos);
}

TEST_F(CaptureTest, OptionsOfRecordedStepsHaveNoEffectElsewhereAndSaySo) {
  const test::CapturedLog log;
  const auto make = [](TorchDynamoPlugin plugin) {
    const Accelerator accelerator(anew({.dynamo_plugin = plugin}));
  };
  make({.fullgraph = true, .dynamic = false});
  {
    // The launcher writes each of its flags.
    const auto patched = patch_environment(
        {{"accelerate_dynamo_use_fullgraph", "False"}, {"accelerate_dynamo_use_dynamic", "False"}});
    make({.backend = DynamoBackend::kEager});
  }
  EXPECT_TRUE(log.messages().empty());
  make({.backend = DynamoBackend::kEager, .fullgraph = true, .dynamic = false});
  ASSERT_EQ(log.messages().size(), 2u);
  EXPECT_EQ(
      log.messages()[0],
      "[RANK 0] fullgraph of the TorchDynamoPlugin has no effect with the backend EAGER: it is for "
      "steps that are recorded. Choose CUDAGRAPHS, or leave it out.");
  EXPECT_EQ(log.messages()[1].find("dynamic of the TorchDynamoPlugin"), 9u);
}

TEST_F(CaptureTest, APluginThatComesTooLateIsRefused) {
  const AcceleratorOptions given{.cpu = true, .dynamo_backend = DynamoBackend::kCudagraphs};
  {
    const Accelerator first(anew());
    EXPECT_EQ(message_of<ConfigError>([&] { const Accelerator second(given); }),
              "The accelerator state is already set up without this dynamo_plugin and cannot be "
              "changed. Pass it to the first `Accelerator`, or leave it out.");
    EXPECT_NO_THROW(Accelerator({.cpu = true, .dynamo_backend = DynamoBackend::kNo}));
  }
  const Accelerator first(anew(given));
  EXPECT_NO_THROW(Accelerator{given}) << "the same again";
  const auto patched = patch_environment(
      {{"accelerate_dynamo_use_fullgraph", "True"}, {"accelerate_dynamo_backend", "EAGER"}});
  EXPECT_NO_THROW(Accelerator({.cpu = true})) << "variables speak to the first one";
  EXPECT_EQ(first.state().dynamo_plugin()->backend, DynamoBackend::kCudagraphs);
}

TEST_F(CaptureTest, CompileRegionsPointHere) {
  const test::Line net;
  for (const auto& message :
       {message_of<UnsupportedError>([&] { compile_regions(net); }),
        message_of<UnsupportedError>([&] { compile_regions_deepspeed(net); })}) {
    EXPECT_NE(message.find("compile_regions"), std::string::npos);
    EXPECT_NE(message.find("Accelerator::capture"), std::string::npos);
  }
}

TEST_F(CaptureTest, InductorNeedsACompiledModel) {
  const auto message = message_of<UnsupportedError>(
      [] { const Accelerator none(anew({.dynamo_backend = DynamoBackend::kInductor})); });
  EXPECT_NE(message.find("INDUCTOR needs a compiled model: options of the TorchDynamoPlugin have "
                         "no 'aoti_package'"),
            std::string::npos)
      << message;
  const TorchDynamoPlugin plugin{.backend = DynamoBackend::kInductor,
                                 .options = Value(Value::Dict{{"aoti_package", "none.pt2"}})};
  const Accelerator some(anew({.dynamo_plugin = plugin}));
  EXPECT_NE(message_of<CheckpointError>([&] {
              const CompiledModel none(plugin);
            }).find("There is no compiled model 'none.pt2'"),
            std::string::npos);
}

TEST_F(CaptureTest, RefusesCountsBelowOne) {
  Small small;
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)small.accelerator.capture([] {}, {.max_graphs = 0});
            }).find("max_graphs is 0"),
            std::string::npos);
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)small.accelerator.capture([] {}, {.warmup = 0});
            }).find("warmup is 0"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate
