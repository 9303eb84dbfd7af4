// What load_and_quantize_model makes of files and options, and packed weights beside parameters of
// other dtypes.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "core/captured_log.h"
#include "core/text.h"
#include "examples/gpt_model.h"
#include "quantization/nets.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::Adapted;
using test::CapturedLog;
using test::eight_bits;
using test::four_bits;
using test::has;
using test::ids;
using test::message_of;
using test::Net;
using test::OneLayer;
using test::reference;
using test::seeded_net;

struct Loading : testing::Test {
  test::Folder folder;
};

// -- files ----------------------------------------------------------------------------------------

TEST_F(Loading, CodesThatAFileKeepsAsFloatsAreBytes) {
  const auto stored = reference("nf4.safetensors");
  for (const auto dtype : {torch::kBFloat16, torch::kHalf, torch::kFloat}) {
    StateDict viewed;
    for (const auto& part : stored) viewed.insert(part.key(), part.value());
    viewed["fc.weight"] = viewed["fc.weight"].flatten().view(dtype).unsqueeze(1);
    save_model(viewed, folder.path());
    auto config = four_bits();
    config.torch_dtype = FloatType::kFp16;
    config.skip_modules.emplace();
    auto net = init_empty_weights([] { return OneLayer(); });
    static_cast<void>(load_and_quantize_model(net, config, {.weights_location = folder.path()}));
    EXPECT_TRUE(torch::equal(state_dict(*net)["fc.weight"], stored["fc.weight"])) << dtype;
  }
}

TEST_F(Loading, CodesAreNoValuesOfLayersThatAreNotQuantized) {
  for (const auto& kind : {four_bits(), eight_bits()}) {
    auto config = kind;
    config.skip_modules.emplace();
    auto quantized = seeded_net();
    static_cast<void>(load_and_quantize_model(quantized, config));
    const auto state = state_dict(*quantized);
    const auto path = folder.path() / (config.load_in_4bit ? "four" : "eight");
    save_model(state, path);
    const std::string expected = detail::str("is quantized to ", config.load_in_4bit ? 4 : 8,
                                             " bits in the file, and the model keeps it in ");
    // The head is skipped by default.
    auto empty = init_empty_weights([] { return Net(); });
    EXPECT_TRUE(has(message_of<FormatError>([&] {
                      static_cast<void>(
                          load_and_quantize_model(empty, kind, {.weights_location = path}));
                    }),
                    "'head.weight' " + expected + "float32"));
    auto plain = seeded_net();
    EXPECT_TRUE(has(message_of<FormatError>([&] { load_checkpoint_in_model(*plain, path); }),
                    "'first.weight' " + expected));
    EXPECT_TRUE(has(message_of<FormatError>([&] { load_state_dict(*plain, state, false); }),
                    "'first.weight' " + expected));
    EXPECT_TRUE(torch::equal(plain->forward(ids()), seeded_net()->forward(ids())));
  }
}

TEST_F(Loading, ProgressBarsCountWeightsThatAreQuantized) {
  const auto make = [] { return torch::nn::Sequential(torch::nn::Linear(4096, 2048)); };  // 34 MB
  save_model(state_dict(*make()), folder.path());
  auto net = init_empty_weights(make);
  auto config = eight_bits();
  config.skip_modules.emplace();
  testing::internal::CaptureStderr();
  static_cast<void>(
      load_and_quantize_model(net, config, {.weights_location = folder.path(), .progress = true}));
  EXPECT_TRUE(has(testing::internal::GetCapturedStderr(), "loading: 100%"));
}

// -- options --------------------------------------------------------------------------------------

TEST_F(Loading, OptionsForModelsOnTheMetaDeviceAreNotDroppedInSilence) {
  auto net = seeded_net();
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(load_and_quantize_model(net, four_bits(),
                                                              {.weights_location = folder.path()}));
                  }),
                  "but the model has weights already, which would be quantized. Build it under "
                  "init_empty_weights"));
  const CapturedLog log;
  static_cast<void>(load_and_quantize_model(
      net, four_bits(), {.device_map = "auto", .offload_folder = folder.path(), .strict = true}));
  EXPECT_TRUE(has(detail::join(log.messages(), "\n"),
                  "load_and_quantize_model: device_map, offload_folder, strict of the options have "
                  "no effect, because the model is loaded already"));
}

// -- dtypes ---------------------------------------------------------------------------------------

/// Whose other parameters become float16.
std::vector<BnbQuantizationConfig> with_defaults() {
  return {{.load_in_8bit = true}, {.load_in_4bit = true}};
}

TEST_F(Loading, AdaptersStayInFloat32) {
  for (const auto& config : with_defaults()) {
    Adapted net;
    save_model(state_dict(*net), folder.path());
    auto trained = nn::mark_only_lora_as_trainable(*net);
    static_cast<void>(load_and_quantize_model(net, config));
    EXPECT_EQ(net->head->weight.scalar_type(), torch::kHalf);
    AdamW optimizer(trained, {.lr = 1e-5});
    const auto before = trained[1].clone();
    net->first(torch::randn({4, 64})).square().sum().backward();
    optimizer.step();
    for (const auto& one : trained) EXPECT_EQ(one.scalar_type(), torch::kFloat);
    EXPECT_FALSE(torch::equal(trained[1], before));

    auto empty = init_empty_weights([] { return Adapted(); });
    nn::mark_only_lora_as_trainable(*empty);
    static_cast<void>(load_and_quantize_model(empty, config, {.weights_location = folder.path()}));
    EXPECT_EQ(empty->head->weight.scalar_type(), torch::kHalf);
    for (const auto& item : nn::lora_state_dict(*empty)) {
      EXPECT_EQ(item.value().scalar_type(), torch::kFloat) << item.key();
    }
  }
}

TEST_F(Loading, OffloadedBiasesAreBroughtBeforeTheyAreConverted) {
  auto int8 = eight_bits();
  int8.torch_dtype = FloatType::kFp16;
  auto nf4 = four_bits();
  nf4.torch_dtype = FloatType::kBf16;
  for (const auto& config : {int8, nf4}) {
    auto net = seeded_net();
    static_cast<void>(load_and_quantize_model(net, config));
    auto first = net->first;
    const auto x = torch::randn({5, 64});
    const std::vector<std::function<torch::Tensor()>> uses{
        [&] { return first(x); }, [&] { return torch::linear(x, first->weight, first->bias); },
        [&] { return torch::linear(x.view({1, 5, 64}), first->weight, first->bias); },
        // Not a product of ours, with another offloaded parameter.
        [&] { return first->weight.t() + first->bias; }};
    for (const auto& use : uses) {
      const auto expected = use();
      const auto model = cpu_offload(net, {.lazy = {.manage_on_cpu = true}});
      EXPECT_TRUE(torch::equal(use(), expected));
    }
  }
}

TEST_F(Loading, BiasesOfOneElementAreAddedToAllOutputs) {
  const auto weight = torch::randn({48, 128});
  const auto [packed, state] = quant::quantize_4bit(weight, {.quant_type = "nf4"});
  const auto int8 = quant::int8_vectorwise_quant(weight);
  const auto values = quant::dequantize_4bit(packed, state);
  const auto strided = torch::randn({48, 2}).select(1, 0);
  for (const std::int64_t rows : {1, 20}) {
    const auto x = torch::randn({rows, 128});
    for (const auto& bias : {torch::tensor(0.5F), strided}) {
      EXPECT_TRUE(torch::allclose(quant::linear_4bit(x, packed, state, bias),
                                  torch::linear(x, values) + bias, 1e-4, 1e-4));
      EXPECT_TRUE(torch::allclose(quant::int8_linear(x, int8, bias),
                                  quant::int8_linear(x, int8) + bias, 1e-3, 1e-3));
    }
  }
  auto bias = torch::tensor(0.5F).requires_grad_();
  quant::linear_4bit(torch::randn({3, 128}), packed, state, bias).sum().backward();
  EXPECT_EQ(bias.grad().item<float>(), 3 * 48);
}

TEST_F(Loading, LayersTakeTheBiasesThatLibTorchTakes) {
  auto net = seeded_net();
  const auto model = load_and_quantize_model(net, four_bits());
  const auto& weight = net->first->weight;
  const auto values = weight.clone();
  const auto x = torch::randn({3, 64});
  for (const auto& bias : {torch::tensor(0.5F), torch::tensor({0.25F}), torch::randn({3, 128}),
                           torch::randn({3, 1})}) {
    EXPECT_TRUE(torch::allclose(torch::addmm(bias, x, weight.t()),
                                torch::addmm(bias, x, values.t()), 1e-4, 1e-4));
    if (bias.dim() > 1) continue;
    EXPECT_TRUE(torch::allclose(torch::linear(x, weight, bias), torch::linear(x, values) + bias,
                                1e-4, 1e-4));
  }
}

// -- memory ---------------------------------------------------------------------------------------

TEST_F(Loading, AModelTakesAsMuchLessMemoryAsInPython) {
  const examples::GptConfig shape{
      .vocab = 2048, .block = 128, .layers = 8, .heads = 4, .width = 128};
  const auto bytes = [](const torch::nn::Module& model) {
    double sum = 0;
    for (const auto& part : state_dict(model)) sum += static_cast<double>(part.value().nbytes());
    return sum;
  };
  examples::Gpt gpt(shape);
  const auto in_float16 = bytes(*gpt) / 2;
  static_cast<void>(load_and_quantize_model(gpt, {.load_in_8bit = true}));
  EXPECT_GE(in_float16 / bytes(*gpt), 1.54);
  examples::Gpt other(shape);
  static_cast<void>(load_and_quantize_model(other, {.load_in_4bit = true}));
  EXPECT_GE(in_float16 / bytes(*other), 2.1);
}

}  // namespace
}  // namespace accelerate
