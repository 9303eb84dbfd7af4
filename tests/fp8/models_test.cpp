// Models that multiply in 8 bits, on one process: which layers, by which recipe, and how they
// train.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "accelerator/runs.h"
#include "core/captured_log.h"
#include "core/text.h"
#include "examples/gpt_data.h"
#include "examples/gpt_model.h"
#include "fp8/delayed_scaling.h"
#include "support/has.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::anew;
using test::CapturedLog;
using test::has;
using test::message_of;
using Names = std::vector<std::string>;
namespace F = torch::nn::functional;

AcceleratorOptions in_8_bits(std::vector<KwargsHandler> handlers = {}) {
  return anew({.mixed_precision = PrecisionType::kFp8, .kwargs_handlers = std::move(handlers)});
}

/// Linear layers of LibTorch and of ours; `narrow` has a feature count that no kernel takes.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(16, 32));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    middle = register_module("middle", nn::Linear(32, 32));
    narrow = register_module("narrow", torch::nn::Linear(32, 24));
    back = register_module("back", torch::nn::Linear(24, 32));
    plain = register_module("plain", torch::nn::Linear(32, 48));
    last = register_module("last", torch::nn::Linear(48, 16));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto hidden = middle(norm(torch::relu(first(x))));
    hidden = torch::relu(back(torch::relu(narrow(hidden))));
    return last(checkpointed ? activation_checkpoint(plain, hidden) : plain(hidden));
  }
  bool checkpointed = false;
  torch::nn::Linear first = nullptr, narrow = nullptr, back = nullptr, plain = nullptr,
                    last = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  nn::Linear middle = nullptr;
};
TORCH_MODULE(Net);

torch::Tensor input(int step = 0) {
  torch::manual_seed(100 + step);
  return torch::randn({12, 16});
}

// ---- which layers -------------------------------------------------------------------------------

class Fp8Models : public test::WithFolder {};

TEST_F(Fp8Models, ConvertWithoutTheFirstTheLastAndWhatNoKernelTakes) {
  Net net;
  const auto weight = net->middle->weight;
  EXPECT_FALSE(has_fp8_layers(*net));
  convert_model_to_fp8_ao(*net);
  EXPECT_EQ(fp8_layers(*net), (Names{"middle", "plain"}));
  EXPECT_TRUE(has_ao_layers(*net));
  EXPECT_FALSE(has_transformer_engine_layers(*net));
  EXPECT_TRUE(net->middle->weight.is_same(weight));
  EXPECT_EQ(net->named_parameters().size(), Net()->named_parameters().size());

  to_high_precision(*net);
  EXPECT_FALSE(has_fp8_layers(*net));
  EXPECT_TRUE(net->forward(input()).equal(Net()->forward(input())));
}

TEST_F(Fp8Models, AFilterReplacesTheRule) {
  Net net;
  convert_model_to_fp8_ao(*net, std::nullopt, [](const torch::nn::Module&, const std::string& fqn) {
    return fqn == "first" || fqn == "narrow";
  });
  EXPECT_EQ(fp8_layers(*net), (Names{"first", "narrow"}));
  EXPECT_EQ(find_first_last_linear_layers(*net),
            (std::pair<std::optional<std::string>, std::optional<std::string>>("first", "last")));
  EXPECT_FALSE(filter_linear_layers(*net->narrow, "narrow", {}));
  EXPECT_TRUE(filter_linear_layers(*net->middle, "middle", {"first"}));
  EXPECT_FALSE(filter_linear_layers(*net->middle, "middle", {"middle"}));

  // Parity: in a conversion it looks at the model, where Python looks at the layer.
  Net other;
  convert_model_to_fp8_ao(*other, std::nullopt, &filter_first_and_last_linear_layers);
  EXPECT_EQ(fp8_layers(*other), (Names{"middle", "plain"}));
}

TEST_F(Fp8Models, AWeightThatAnUnselectedLayerSharesStaysAsItIs) {
  Net net;
  net->last->weight.set_data(torch::randn({48, 32}));
  net->unregister_module("last");
  auto tied = torch::nn::Linear(32, 48);
  tied->weight = net->plain->weight;
  net->register_module("tied", tied);
  convert_model_to_fp8_ao(*net);
  EXPECT_EQ(fp8_layers(*net), (Names{"middle"}));
}

TEST_F(Fp8Models, OtherUsesOfAWeightAreNotTouched) {
  Net net;
  convert_model_to_fp8_ao(*net);
  const auto& weight = net->middle->weight;
  Net plain;
  EXPECT_TRUE((weight * 2).equal(plain->middle->weight * 2));
  EXPECT_TRUE(input().new_ones({3, 32}).mm(weight).equal(
      input().new_ones({3, 32}).mm(plain->middle->weight)));
}

TEST_F(Fp8Models, WithoutALayerThatFitsSayWhatLayersAre) {
  CapturedLog log;
  torch::nn::Sequential net(torch::nn::Linear(3, 5));
  convert_model_to_fp8_ao(*net);
  EXPECT_TRUE(has(detail::join(log.messages(), "\n"), "no layer of the model is converted"));
}

// ---- which recipe -------------------------------------------------------------------------------

TEST_F(Fp8Models, FollowARecipeElseTheVariableElseAo) {
  const auto backend = [](const AcceleratorOptions& options) {
    return Accelerator(options).fp8_backend();
  };
  EXPECT_EQ(backend(in_8_bits()), FP8BackendType::kAo);
  EXPECT_EQ(backend(in_8_bits({TERecipeKwargs{}})), FP8BackendType::kTe);
  EXPECT_EQ(backend(in_8_bits({FP8RecipeKwargs{}})), FP8BackendType::kTe);
  EXPECT_EQ(backend(in_8_bits({AORecipeKwargs{}})), FP8BackendType::kAo);
  EXPECT_EQ(backend(anew()), FP8BackendType::kNo);
  {
    const auto patched = patch_environment(
        {{"ACCELERATE_FP8_BACKEND", "te"}, {"ACCELERATE_MIXED_PRECISION", "fp8"}});
    EXPECT_EQ(backend(anew()), FP8BackendType::kTe);
  }
  const auto patched = patch_environment({{"ACCELERATE_FP8_BACKEND", "MSAMP"}});
  EXPECT_TRUE(has({message_of<UnsupportedError>([&] { backend(in_8_bits()); })},
                  "The FP8 backend MSAMP is not supported"));
}

TEST_F(Fp8Models, RefuseRecipesThatContradict) {
  const auto message = [](const AcceleratorOptions& options) {
    return message_of<ConfigError>([&] { Accelerator accelerator(options); });
  };
  EXPECT_EQ(message(in_8_bits({AORecipeKwargs{}, TERecipeKwargs{}})),
            "kwargs_handlers has 2 recipes for fp8. Give one.");
  EXPECT_TRUE(has({message(in_8_bits({TERecipeKwargs{.fp8_format = FP8Format::kE5m2}}))},
                  "no kernel multiplies two operands of that format"));
  EXPECT_TRUE(has({message(in_8_bits({AORecipeKwargs{
                      .config = Float8LinearConfig{.recipe = "rowwise",
                                                   .enable_fsdp_float8_all_gather = true}}}))},
                  "only supports tensorwise scaling"));
  EXPECT_TRUE(
      has({message(anew({.kwargs_handlers = {TERecipeKwargs{}}}))}, "not fp8. Take it out"));
  EXPECT_TRUE(has({message_of<UnsupportedError>([&] {
                    Accelerator accelerator(
                        in_8_bits({TERecipeKwargs{.use_mxfp8_block_scaling = true}}));
                  })},
                  "MXFP8 block scaling is not available"));
}

TEST_F(Fp8Models, DelayedScalesTakeOneModelWithOneOptimizer) {
  Accelerator accelerator(in_8_bits({TERecipeKwargs{}}));
  Net net, other;
  auto sgd = SGD(net->parameters(), {.lr = 0.1});
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)accelerator.prepare(net); }),
            "You must pass a model and an optimizer together to `accelerate.prepare()` when using "
            "TransformerEngine.");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)accelerator.prepare(net, other, sgd); }),
            "You can't use multiple models (2) or optimizers (1) with TransformerEngine.");
  (void)accelerator.prepare(make_data_loader(torch::arange(4)));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  EXPECT_EQ(fp8_layers(*net), (Names{"first", "middle", "plain", "last"}));
  EXPECT_TRUE(has_transformer_engine_layers(*net));
}

TEST_F(Fp8Models, PreparedModelsComputeAllElseUnderAutocast) {
  Accelerator accelerator(in_8_bits());
  Net net;
  auto model = accelerator.prepare(net);
  EXPECT_EQ(accelerator.mixed_precision(), PrecisionType::kFp8);
  EXPECT_EQ(fp8_layers(*net), (Names{"middle", "plain"}));
  const auto result = model(input());
  EXPECT_EQ(result.scalar_type(), torch::kFloat);
  // Autocast computes the rest in bfloat16.
  EXPECT_EQ(model->middle(input().new_ones({2, 32})).scalar_type(), torch::kBFloat16);
}

TEST_F(Fp8Models, OfTheProgramKeepTheirLayersThroughPrepare) {
  Accelerator accelerator(anew());
  Net net;
  convert_model_to_fp8_ao(*net, Float8LinearConfig{.recipe = "rowwise"});
  auto model = accelerator.prepare(net);
  EXPECT_EQ(fp8_layers(*net), (Names{"middle", "plain"}));
  model.replace_parameter("middle.weight", torch::ones({32, 32}));
  EXPECT_EQ(fp8_layers(*net), (Names{"middle", "plain"}));
}

// ---- training -----------------------------------------------------------------------------------

/// A model in training, and its parameters after some steps.
struct Training {
  explicit Training(const AcceleratorOptions& options, bool checkpointed = false)
      : accelerator(options) {
    net->checkpointed = checkpointed;
    auto prepared = accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-2}));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
  }
  double step(int number) {
    const auto accumulating = accelerator.accumulate(model);
    const auto x = input(number);
    const auto loss = (model(x) - x.roll(1, 1)).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss.template item<double>();
  }
  void steps(int from, int to) {
    for (int i = from; i < to; ++i) step(i);
  }

  Net net;
  Accelerator accelerator;
  PreparedModel<Net> model;
  AcceleratedOptimizer optimizer;
};

std::vector<KwargsHandler> each_recipe(std::size_t which) {
  switch (which) {
    case 0:
      return {AORecipeKwargs{}};
    case 1:
      return {AORecipeKwargs{.config = Float8LinearConfig{.recipe = "rowwise_with_gw_hp"}}};
    case 2:
      return {TERecipeKwargs{.amax_history_len = 4}};
    default:
      return {TERecipeKwargs{.fp8_format = FP8Format::kE4m3,
                             .override_linear_precision = std::array{false, true, true}}};
  }
}

TEST_F(Fp8Models, LearnWithEveryRecipe) {
  const auto loss_of = [](const AcceleratorOptions& options) {
    Training run(options);
    run.steps(0, 30);
    return run.step(0);
  };
  const double start = Training(anew()).step(0);
  const double in_16_bits = loss_of(anew({.mixed_precision = PrecisionType::kBf16}));
  for (std::size_t i = 0; i < 4; ++i) {
    const double loss = loss_of(in_8_bits(each_recipe(i)));
    EXPECT_LT(loss, 0.7 * start) << i;
    EXPECT_NEAR(loss, in_16_bits, 0.1 * in_16_bits) << i;
    EXPECT_NE(loss, in_16_bits) << i;
  }
}

TEST_F(Fp8Models, ActivationCheckpointsReuseTheScalesOfTheFirstForward) {
  for (std::size_t i = 0; i < 4; ++i) {
    Training plain(in_8_bits(each_recipe(i)));
    plain.steps(0, 5);
    Training checkpointed(in_8_bits(each_recipe(i)), /*checkpointed=*/true);
    checkpointed.steps(0, 5);
    EXPECT_EQ(test::distance(plain.net, checkpointed.net), 0) << i;
  }
}

TEST_F(Fp8Models, ResumeWithTheBitsOfARunThatWasNotInterrupted) {
  for (std::size_t i = 0; i < 4; ++i) {
    const auto folder = path_ / std::to_string(i);
    Training whole(in_8_bits(each_recipe(i)));
    whole.steps(0, 3);
    (void)whole.accelerator.save_state(folder);
    whole.steps(3, 6);
    Training resumed(in_8_bits(each_recipe(i)));
    resumed.accelerator.load_state(folder);
    resumed.steps(3, 6);
    EXPECT_EQ(test::distance(whole.net, resumed.net), 0) << i;
    EXPECT_EQ(std::filesystem::exists(folder / "fp8_scaling_0.bin"), i >= 2);
  }
}

TEST_F(Fp8Models, AnIntervalOfDelayedScalesCountsForGradientsToo) {
  using detail::fp8::DelayedScaling;
  Training run(in_8_bits({TERecipeKwargs{.interval = 2}}));
  run.steps(0, 4);
  const auto scales =
      run.model._core()->delayed_scaling->scales().view({-1, DelayedScaling::kRoles});
  for (const auto role :
       {DelayedScaling::kInput, DelayedScaling::kWeight, DelayedScaling::kGradient}) {
    EXPECT_TRUE(scales.select(1, role).ne(1).all().item<bool>()) << role;
  }
}

TEST_F(Fp8Models, WithDelayedScalesEvaluateInHighPrecisionUnlessAskedTo) {
  for (const bool asked : {false, true}) {
    Training run(in_8_bits({TERecipeKwargs{.use_autocast_during_eval = asked}}));
    run.steps(0, 2);
    run.model.eval();
    const torch::NoGradGuard no_grad;
    const auto in_eval = run.model(input());
    to_high_precision(*run.net);
    EXPECT_EQ(in_eval.equal(run.model(input())), !asked);
  }
}

TEST_F(Fp8Models, NanWeightsAreAnErrorThatNamesTheLayer) {
  for (const std::size_t i : {0, 1, 2}) {
    Training run(in_8_bits(each_recipe(i)));
    {
      const torch::NoGradGuard no_grad;
      run.net->middle->weight[0][0] = std::nan("");
    }
    EXPECT_TRUE(has({message_of<StateError>([&] { run.step(0); })},
                    "the weight of the layer 'middle' has NaN or infinite values"));
  }
}

TEST_F(Fp8Models, WhatDelayedScalesClampIsCounted) {
  Training run(in_8_bits({TERecipeKwargs{.amax_history_len = 1}}));
  run.model(input());
  EXPECT_EQ(clamped_fp8_values(*run.net).front().second, 0);
  run.model(input() * 100);  // the scale is that of the step before
  EXPECT_GT(clamped_fp8_values(*run.net).front().second, 0);
  EXPECT_EQ(clamped_fp8_values(*run.net).front().first, "first");
}

TEST_F(Fp8Models, DebugModeCountsWhatDelayedScalesClamp) {
  const auto patched = patch_environment({{"ACCELERATE_DEBUG_MODE", "1"}});
  PartialState::_reset_state();
  CapturedLog log;
  Training run(in_8_bits({TERecipeKwargs{.amax_history_len = 1}}));
  run.model(input());
  EXPECT_EQ(clamped_fp8_values(*run.net).front().second, 0);
  run.model(input() * 100);  // the scale is that of the step before
  EXPECT_GT(clamped_fp8_values(*run.net).front().second, 0);
  EXPECT_EQ(clamped_fp8_values(*run.net).front().first, "first");
  EXPECT_TRUE(has(detail::join(log.messages(), "\n"),
                  "values of the input of the layer 'first' are beyond"));
}

TEST_F(Fp8Models, InputsWithoutAScaleAreAnErrorThatNamesTheLayer) {
  for (const double value : {HUGE_VAL, std::nan("")}) {
    for (const std::size_t i : {0, 1}) {
      Training run(in_8_bits(each_recipe(i)));
      auto x = input();
      x[3][5] = value;
      EXPECT_TRUE(has({message_of<StateError>([&] { run.model(x); })},
                      "fp8: the input of the layer 'middle' has NaN or infinite values"));
    }
    // Delayed scales clamp what is infinite, and pass NaN on.
    Training run(in_8_bits(each_recipe(2)));
    auto x = input();
    x[3][5] = value;
    const auto y = run.model(x);
    EXPECT_EQ(y.isfinite().all().item<bool>(), value == HUGE_VAL);
    EXPECT_EQ(clamped_fp8_values(*run.net).front().second, value == HUGE_VAL ? 1 : 0);
  }
}

/// The loss of a GPT after some steps on made text.
double gpt_loss(const AcceleratorOptions& options, int steps) {
  Accelerator accelerator(options);
  set_seed(11);
  examples::Gpt gpt(examples::GptConfig::tiny());
  auto [model, optimizer] = accelerator.prepare(gpt, AdamW(gpt->parameters(), {.lr = 3e-3}));
  const auto tokens = examples::encode(examples::make_text(600, 3));
  double sum = 0;
  constexpr int kLast = 5;
  for (int step = 0; step < steps; ++step) {
    const auto x = tokens.slice(0, step * 256, step * 256 + 512).view({8, 64});
    const auto y = tokens.slice(0, step * 256 + 1, step * 256 + 513).view({8, 64});
    const auto loss = F::cross_entropy(model(x).flatten(0, 1), y.flatten());
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    if (step >= steps - kLast) sum += loss.item<double>();
  }
  return sum / kLast;
}

TEST_F(Fp8Models, AGptLearnsAsInBfloat16) {
  constexpr int kSteps = 40;
  const double in_16_bits = gpt_loss(anew({.mixed_precision = PrecisionType::kBf16}), kSteps);
  EXPECT_LT(in_16_bits, 3.5);  // it began at 5.5
  for (std::size_t i = 0; i < 3; ++i) {
    const double loss = gpt_loss(in_8_bits(each_recipe(i)), kSteps);
    EXPECT_NEAR(loss, in_16_bits, 0.02 * in_16_bits) << i;
  }
}

}  // namespace
}  // namespace accelerate
