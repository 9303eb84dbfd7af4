// Models with weights in few bits: what operators, state dictionaries, stores and files see.
#include <ATen/autocast_mode.h>
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <concepts>
#include <filesystem>
#include <string>
#include <vector>

#include "core/captured_log.h"
#include "modeling/outline.h"
#include "quantization/nets.h"
#include "support/command.h"
#include "support/fake_gpu.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::Adapted;
using test::eight_bits;
using test::four_bits;
using test::has;
using test::ids;
using test::message_of;
using test::Net;
using test::OneLayer;
using test::reference;
using test::seeded_net;

struct Quantized : testing::Test {
  Net net = seeded_net();
  Net plain = seeded_net();
  test::Folder folder;
};

// -- operators ------------------------------------------------------------------------------------

TEST_F(Quantized, ModelComputesWithTheValuesOfItsWeights) {
  const auto model = load_and_quantize_model(net, four_bits());
  EXPECT_TRUE(has_4bit_bnb_layers(*net));
  const auto& weight = net->first->weight;
  EXPECT_EQ(weight.sizes(), (std::vector<std::int64_t>{128, 64}));
  EXPECT_FALSE(weight.requires_grad());
  EXPECT_FALSE(net->first->bias.requires_grad());
  const auto [packed, state] = quant::quantize_4bit(plain->first->weight, {.quant_type = "nf4"});
  const auto values = quant::dequantize_4bit(packed, state);
  EXPECT_TRUE(torch::equal(weight.clone(), values));
  {
    const torch::NoGradGuard no_grad;
    plain->first->weight.copy_(values);
    plain->second->weight.copy_(net->second->weight);
  }
  EXPECT_TRUE(torch::allclose(model(ids()), plain->forward(ids()), 1e-4, 1e-4));
  // Two dimensions with a bias are another operator than three, and without a bias.
  const auto x = torch::randn({5, 64});
  EXPECT_TRUE(torch::allclose(net->first(x), plain->first(x), 1e-4, 1e-4));
  EXPECT_TRUE(torch::allclose(net->first(x.view({1, 5, 64})), plain->first(x.view({1, 5, 64})),
                              1e-4, 1e-4));
  const auto z = torch::randn({5, 128});
  EXPECT_TRUE(torch::allclose(net->second(z), plain->second(z), 1e-4, 1e-4));
  EXPECT_TRUE(torch::allclose(torch::linear(x, weight), torch::linear(x, values), 1e-4, 1e-4));
}

TEST_F(Quantized, WeightIsReadByAnyOperator) {
  const auto model = load_and_quantize_model(net, four_bits());
  const auto& weight = net->first->weight;
  const auto values = weight.clone();
  EXPECT_TRUE(torch::equal(weight + 0, values));
  EXPECT_TRUE(torch::equal(weight.to(torch::kDouble), values.to(torch::kDouble)));
  EXPECT_TRUE(torch::equal(weight[3], values[3]) || torch::equal(weight[3] + 0, values[3]));
  EXPECT_TRUE(torch::equal(weight.narrow(1, 2, 5).t() + 0, values.narrow(1, 2, 5).t()));
  EXPECT_TRUE(torch::equal(torch::cat({weight, weight}), torch::cat({values, values})));
  EXPECT_NEAR(weight.norm().item<double>(), values.norm().item<double>(), 1e-3);
  EXPECT_TRUE(has(message_of<c10::Error>([&] { static_cast<void>(weight.data_ptr<float>()); }),
                  "The weight 'first.weight' is kept in 4 bits: its bytes cannot be touched."));
}

TEST_F(Quantized, WeightCannotBeWrittenOrConverted) {
  const auto model = load_and_quantize_model(net, four_bits());
  const torch::NoGradGuard no_grad;
  const std::string expected =
      "The weight 'first.weight' is kept in 4 bits and cannot be moved, "
      "converted or written to.";
  EXPECT_TRUE(has(message_of<StateError>([&] { net->first->weight.add_(1); }), expected));
  EXPECT_TRUE(has(message_of<StateError>([&] { net->to(torch::kHalf); }), expected));
  net->to(torch::kCPU);  // changes nothing
  EXPECT_TRUE(has_4bit_bnb_layers(*net));
}

TEST_F(Quantized, ModelGivesGradientsToItsInputsAlone) {
  const auto model = load_and_quantize_model(net, four_bits());
  const auto x = torch::randn({2, 3, 64}, torch::requires_grad());
  const auto g = torch::randn({2, 3, 128});
  (net->first(x) * g).sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), g.matmul(net->first->weight.clone()), 1e-4, 1e-4));
  EXPECT_FALSE(net->first->weight.grad().defined());
}

TEST_F(Quantized, LayerReturnsTheDtypeOfItsInputUnderAutocast) {
  auto config = four_bits();
  config.bnb_4bit_compute_dtype = FloatType::kBf16;
  config.torch_dtype = FloatType::kFp32;
  const auto model = load_and_quantize_model(net, config);
  const auto x = torch::randn({5, 64});
  const auto outside = net->first(x);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto inside = net->first(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(inside.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(inside, outside));
}

TEST_F(Quantized, PackedBytesGoWithTheModel) {
  std::weak_ptr<torch::nn::Module> layer;
  torch::Tensor codes;
  {
    const auto model = load_and_quantize_model(seeded_net(), four_bits());
    layer = model->first.ptr();
    codes = state_dict(*model.holder())["first.weight"];
  }
  EXPECT_TRUE(layer.expired());
  EXPECT_EQ(codes.use_count(), 1);
}

// -- which layers ---------------------------------------------------------------------------------

bool is_packed(const torch::nn::Linear& layer) {
  torch::nn::Sequential alone(layer);
  return state_dict(*alone)["0.weight"].scalar_type() == torch::kByte;
}

TEST_F(Quantized, ModelKeepsItsHeadAndTakesTheDtype) {
  auto config = four_bits();
  config.torch_dtype = FloatType::kBf16;
  config.keep_in_fp32_modules = {{"norm"}};
  EXPECT_EQ(get_keys_to_not_convert(*net), std::vector<std::string>{"head"});
  const auto model = load_and_quantize_model(net, config);
  EXPECT_TRUE(is_packed(net->first));
  EXPECT_TRUE(is_packed(net->second));
  EXPECT_FALSE(is_packed(net->head));
  EXPECT_EQ(net->head->weight.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(net->first->weight.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(net->embedding->weight.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(net->norm->weight.scalar_type(), torch::kFloat);
}

TEST_F(Quantized, LayersOfSkipModulesStay) {
  auto config = four_bits();
  config.skip_modules = {{"second"}};
  const auto model = load_and_quantize_model(net, config);
  EXPECT_TRUE(is_packed(net->first));
  EXPECT_FALSE(is_packed(net->second));
  EXPECT_TRUE(is_packed(net->head));
}

TEST(GetKeysToNotConvert, NamesTiedWeightsAndTheLastModule) {
  auto net = seeded_net();
  tie_parameters(*net, {"embedding.weight", "head.weight"});
  EXPECT_EQ(get_keys_to_not_convert(*net), (std::vector<std::string>{"embedding", "head", "head"}));
}

TEST_F(Quantized, TiedLayersStayAlsoWhereTheyAreNotSkipped) {
  tie_parameters(*net, {"embedding.weight", "head.weight"});
  auto config = four_bits();
  config.skip_modules.emplace();
  const auto model = load_and_quantize_model(net, config);
  EXPECT_TRUE(is_packed(net->first));
  EXPECT_FALSE(is_packed(net->head));
}

TEST(LoadAndQuantizeModel, NamesTheLayerWhoseWeightsAreNotFinite) {
  auto net = seeded_net();
  torch::NoGradGuard no_grad;
  net->second->weight[0][0] = INFINITY;
  EXPECT_TRUE(
      has(message_of<ArgumentError>(
              [&] { static_cast<void>(load_and_quantize_model(net, four_bits())); }),
          "The layer 'second.weight' cannot be quantized. quantize_4bit: the tensor has values "
          "that are infinite or NaN"));
}

TEST(LoadAndQuantizeModel, WarnsOfAModelWithoutLinearLayers) {
  const test::CapturedLog log;
  torch::nn::Sequential net(torch::nn::Conv1d(2, 3, 1), torch::nn::ReLU());
  const auto x = torch::randn({1, 2, 5});
  const auto expected = net->forward(x);
  auto config = four_bits();
  EXPECT_TRUE(torch::equal(load_and_quantize_model(net, config)->forward(x), expected));
  EXPECT_FALSE(has_4bit_bnb_layers(*net));
  EXPECT_TRUE(std::ranges::any_of(log.messages(), [](const std::string& message) {
    return message.find("no linear modules were found in your model") != message.npos;
  }));
}

TEST(LoadAndQuantizeModel, RefusesThresholdsThatAreNoMagnitude) {
  for (const double threshold : {-1.0, std::nan("")}) {
    auto config = eight_bits();
    config.llm_int8_threshold = threshold;
    EXPECT_TRUE(has(
        message_of<ConfigError>([&] { static_cast<void>(load_and_quantize_model(Net(), config)); }),
        "llm_int8_threshold is "));
  }
}

TEST(LoadAndQuantizeModel, RefusesWhatContradictsItself) {
  EXPECT_TRUE(has(message_of<ConfigError>([] {
                    static_cast<void>(load_and_quantize_model(Net(), BnbQuantizationConfig{}));
                  }),
                  "load_in_4bit and load_in_8bit are both false"));
  EXPECT_TRUE(has(message_of<ArgumentError>([] {
                    const auto empty = init_empty_weights([] { return Net(); });
                    static_cast<void>(load_and_quantize_model(empty, four_bits()));
                  }),
                  "`weights_location` needs to be the folder or file"));
}

// -- files ----------------------------------------------------------------------------------------

void expect_like_bitsandbytes(const std::string& name, const BnbQuantizationConfig& given,
                              double tolerance) {
  auto config = given;
  config.skip_modules.emplace();
  const auto expected = reference("outputs.pt");
  // Ours of the same weights have the names, shapes and bytes of theirs.
  OneLayer loaded;
  load_state_dict(*loaded, [&] {
    StateDict state;
    state.insert("fc.weight", expected["weight"]);
    state.insert("fc.bias", expected["bias"]);
    return state;
  }());
  const auto ours = load_and_quantize_model(loaded, config);
  const auto theirs = reference(name + ".safetensors");
  const auto own = state_dict(*loaded);
  EXPECT_EQ(own.size(), theirs.size());
  for (const auto& part : theirs) {
    ASSERT_TRUE(own.contains(part.key())) << part.key();
    if (name == "fp4" && part.key() == "fc.weight") continue;  // two codes of zero
    const auto differ = own[part.key()].ne(part.value()).sum().item<std::int64_t>();
    // Its CPU build rounds 8-bit codes next to midpoints in another way.
    const bool is_int8_codes = part.value().scalar_type() == torch::kChar;
    EXPECT_LE(differ, is_int8_codes ? 3 : 0) << part.key();
  }
  // A model on the meta device takes their file as it is, and computes what their layer does.
  auto empty = init_empty_weights([] { return OneLayer(); });
  const auto model = load_and_quantize_model(
      empty, config,
      {.weights_location = test::reference_path("quantization/" + name + ".safetensors")});
  EXPECT_TRUE(torch::equal(state_dict(*empty)["fc.weight"], theirs["fc.weight"]));
  const auto x = expected["inputs"].clone().requires_grad_(name != "int8");
  const auto y = model(name == "int8" ? x.to(torch::kHalf).to(torch::kFloat) : x);
  EXPECT_TRUE(torch::allclose(y, expected[name], tolerance, tolerance));
  EXPECT_TRUE(torch::allclose(ours(x), y, 1e-4, 10 * tolerance));
  if (name == "int8") return;
  y.square().sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), expected[name + "_gradient"], 1e-4, 1e-3));
}

TEST(Files, OfBitsandbytesAreReadAndWrittenInFourBits) {
  expect_like_bitsandbytes("nf4", four_bits("nf4"), 1e-4);
  expect_like_bitsandbytes("fp4", four_bits("fp4"), 1e-4);
  auto config = four_bits("nf4");
  config.bnb_4bit_use_double_quant = true;
  expect_like_bitsandbytes("nf4_double", config, 1e-4);
}

TEST(Files, OfBitsandbytesAreReadAndWrittenInEightBits) {
  // Its CPU build has 6.200124e-05 for 1/127^2, and does not pass through float16.
  expect_like_bitsandbytes("int8", eight_bits(), 3e-3);
}

TEST_F(Quantized, ModelIsSavedAndLoadedAgain) {
  for (const auto& config : {four_bits(), eight_bits()}) {
    const auto path = folder.path() / (config.load_in_4bit ? "four" : "eight");
    auto original = seeded_net();
    const auto model = load_and_quantize_model(original, config);
    save_model(state_dict(*original), path, {.max_shard_size = "8KB"});
    auto empty = init_empty_weights([] { return Net(); });
    const auto again = load_and_quantize_model(empty, config, {.weights_location = path});
    EXPECT_TRUE(torch::equal(again(ids()), model(ids())));
    // Into a model that is quantized already, by both ways of loading.
    torch::manual_seed(99);
    Net other;
    const auto third = load_and_quantize_model(other, config);
    EXPECT_FALSE(torch::equal(third(ids()), model(ids())));
    const auto report = load_checkpoint_in_model(*other, path, {.strict = true});
    EXPECT_TRUE(report.missing_keys.empty() && report.unexpected_keys.empty());
    EXPECT_TRUE(torch::equal(third(ids()), model(ids())));
    Net fourth;
    const auto fifth = load_and_quantize_model(fourth, config);
    load_state_dict(*fourth, state_dict(*original));
    EXPECT_TRUE(torch::equal(fifth(ids()), model(ids())));
  }
}

TEST_F(Quantized, ModelOnTheMetaDeviceIsQuantizedWhileItIsLoaded) {
  save_model(state_dict(*plain), folder.path());
  for (const auto& config : {four_bits(), eight_bits()}) {
    auto original = seeded_net();
    const auto expected = load_and_quantize_model(original, config);
    auto empty = init_empty_weights([] { return Net(); });
    const auto model = load_and_quantize_model(empty, config, {.weights_location = folder.path()});
    EXPECT_TRUE(torch::equal(model(ids()), expected(ids())));
    EXPECT_EQ(model.hf_device_map(), (DeviceMap{{"", "cpu"}}));
  }
}

TEST_F(Quantized, ModelOnTheMetaDeviceTakesOtherNames) {
  StateDict renamed;
  for (const auto& part : state_dict(*plain)) renamed.insert("model." + part.key(), part.value());
  save_model(renamed, folder.path());
  const auto expected = load_and_quantize_model(net, four_bits());
  auto empty = init_empty_weights([] { return Net(); });
  const auto load = [&](const KeyMapping& mapping) {
    return load_and_quantize_model(
        empty, four_bits(),
        {.weights_location = folder.path(), .strict = true, .key_mapping = mapping});
  };
  EXPECT_THROW(static_cast<void>(load({})), StateDictMismatch);
  empty = init_empty_weights([] { return Net(); });
  EXPECT_TRUE(torch::equal(load(KeyMapping().strip_prefix("model."))(ids()), expected(ids())));
}

TEST_F(Quantized, LayerIsNamedWhoseWeightsInTheCheckpointAreNotFinite) {
  {
    const torch::NoGradGuard no_grad;
    plain->second->weight[2][3] = NAN;
  }
  save_model(state_dict(*plain), folder.path());
  auto empty = init_empty_weights([] { return Net(); });
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(load_and_quantize_model(empty, four_bits(),
                                                              {.weights_location = folder.path()}));
                  }),
                  "The layer 'second.weight' cannot be quantized."));
}

TEST_F(Quantized, FilesThatAreCutOffAreRefused) {
  static_cast<void>(load_and_quantize_model(net, four_bits()));
  save_model(state_dict(*net), folder.path());
  const auto file = folder / "model.safetensors";
  for (const auto size : {std::filesystem::file_size(file) - 1, std::uintmax_t{100}}) {
    std::filesystem::resize_file(file, size);
    auto empty = init_empty_weights([] { return Net(); });
    EXPECT_TRUE(has(message_of<CheckpointError>([&] {
                      static_cast<void>(load_and_quantize_model(
                          empty, four_bits(), {.weights_location = folder.path()}));
                    }),
                    "model.safetensors"));
  }
}

TEST_F(Quantized, StateOfARunIsSavedAndLoadedAgain) {
  for (const auto& config : {four_bits(), eight_bits()}) {
    const auto path = folder.path() / (config.load_in_4bit ? "four" : "eight");
    const auto run = [&](int seed, const auto& use) {
      torch::manual_seed(static_cast<std::uint64_t>(seed));
      Net own;
      Accelerator accelerator({.cpu = true});
      auto [model, optimizer] =
          accelerator.prepare(load_and_quantize_model(own, config),
                              accelerate::AdamW(own->head->parameters(), {.lr = 0.1}));
      use(accelerator, model);
      auto y = model(ids()).detach();
      AcceleratorState::_reset_state(true);
      return y;
    };
    const auto expected = run(1, [&](auto& accelerator, auto& model) {
      static_cast<void>(accelerator.save_state(path / "state"));
      accelerator.save_model(model, path / "model");
    });
    EXPECT_FALSE(torch::equal(run(2, [](auto&, auto&) {}), expected));
    EXPECT_TRUE(torch::equal(
        run(3, [&](auto& accelerator, auto&) { accelerator.load_state(path / "state"); }),
        expected));
    auto empty = init_empty_weights([] { return Net(); });
    EXPECT_TRUE(torch::equal(
        load_and_quantize_model(empty, config, {.weights_location = path / "model"})(ids()),
        expected));
  }
}

TEST_F(Quantized, FilesThatDoNotFitAreRefusedByName) {
  const auto model = load_and_quantize_model(net, eight_bits());
  const auto error = [&](const std::function<void(StateDict&)>& spoil) {
    StateDict state;
    for (const auto& part : state_dict(*net)) state.insert(part.key(), part.value().clone());
    spoil(state);
    return message_of<CheckpointError>([&] { load_state_dict(*net, state); });
  };
  EXPECT_TRUE(has(error([](auto& s) { s.erase("first.SCB"); }), "its file has no 'first.SCB'"));
  EXPECT_TRUE(has(error([](auto& s) { s["first.weight_format"].fill_(2); }),
                  "its weight_format is 2, a layout of old GPU kernels"));
  EXPECT_TRUE(has(error([](auto& s) { s["first.SCB"] = s["first.SCB"].slice(0, 1); }),
                  "its SCB has 127 elements"));
  EXPECT_TRUE(
      has(error([](auto& s) { s["first.weight"] = s["first.weight"].to(torch::kByte); }),
          "The weight 'first.weight' is Byte in the file, and the model keeps it in 8 bits"));
  EXPECT_TRUE(has(error([](auto& s) { s["first.SCB"][3] = NAN; }),
                  "its SCB has values that are infinite or NaN"));
  EXPECT_TRUE(has(error([](auto& s) { s.insert("first.weight.absmax", torch::zeros({128})); }),
                  "it is in 8 bits, and its file has the unknown member 'first.weight.absmax'"));
  EXPECT_TRUE(has(error([](auto& s) { s.erase("first.weight"); }), "Missing key(s)"));
}

// -- stores ---------------------------------------------------------------------------------------

TEST_F(Quantized, PackedBytesTravelFromHostMemoryAndDisk) {
  for (const auto& config : {four_bits(), eight_bits()}) {
    auto original = seeded_net();
    static_cast<void>(load_and_quantize_model(original, config));
    const auto expected = original->forward(ids());
    const auto codes = state_dict(*original)["first.weight"].clone();
    {
      const auto model = cpu_offload(original, {.lazy = {.manage_on_cpu = true}});
      EXPECT_TRUE(torch::equal(model(ids()), expected));
      EXPECT_GT(model.stats().fills, 0);
      // 1/8 or 1/4 of float32, and scales.
      const auto logical = (64 * 128 + 128 * 64) * 4;
      const auto others = (16 * 64 + 128 + 64 + 64 + 64 * 16 + 16) * 4;
      EXPECT_LT(model.stats().managed_bytes, others + logical / (config.load_in_4bit ? 5 : 3));
      EXPECT_TRUE(torch::equal(model.state_dict()["first.weight"], codes));
    }
    EXPECT_TRUE(torch::equal(original->forward(ids()), expected));
    const auto path = folder.path() / (config.load_in_4bit ? "four" : "eight");
    {
      const auto model = disk_offload(original, path);
      EXPECT_TRUE(torch::equal(model(ids()), expected));
      EXPECT_TRUE(std::filesystem::exists(path / "first.weight.dat"));
      EXPECT_EQ(std::filesystem::file_size(path / "first.weight.dat"),
                static_cast<std::uintmax_t>(codes.nbytes()));
      // Backward brings them again.
      const auto x = torch::randn({2, 64}, torch::requires_grad());
      original->first(x).sum().backward();
      EXPECT_TRUE(x.grad().defined());
    }
    EXPECT_TRUE(torch::equal(original->forward(ids()), expected));
  }
}

TEST_F(Quantized, LayersOnDiskAreWrittenInEightBits) {
  save_model(state_dict(*plain), folder.path());
  const auto expected = load_and_quantize_model(net, eight_bits());
  auto empty = init_empty_weights([] { return Net(); });
  const DeviceMap map{
      {"embedding", "cpu"}, {"first", "disk"}, {"second", "cpu"}, {"norm", "cpu"}, {"head", "cpu"}};
  const auto model = load_and_quantize_model(
      empty, eight_bits(),
      {.weights_location = folder.path(), .device_map = map, .offload_folder = folder / "spill"});
  EXPECT_TRUE(torch::equal(model(ids()), expected(ids())));
  EXPECT_EQ(std::filesystem::file_size(folder / "spill/first.weight.dat"), 64U * 128U);
  EXPECT_EQ(std::filesystem::file_size(folder / "spill/first.SCB.dat"), 128U * 4U);
}

TEST_F(Quantized, LayersOnDiskStayAsTheyAreInFourBits) {
  save_model(state_dict(*plain), folder.path());
  auto empty = init_empty_weights([] { return Net(); });
  const DeviceMap map{
      {"embedding", "cpu"}, {"first", "disk"}, {"second", "cpu"}, {"norm", "cpu"}, {"head", "cpu"}};
  const auto model = load_and_quantize_model(
      empty, four_bits(),
      {.weights_location = folder.path(), .device_map = map, .offload_folder = folder / "spill"});
  EXPECT_EQ(std::filesystem::file_size(folder / "spill/first.weight.dat"), 64U * 128U * 4U);
  EXPECT_TRUE(is_packed(net->second) || is_packed(empty->second));
  EXPECT_EQ(model(ids()).sizes(), (std::vector<std::int64_t>{3, 4, 16}));
  auto another = init_empty_weights([] { return Net(); });
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(
                        load_and_quantize_model(another, four_bits(),
                                                {.weights_location = folder.path(),
                                                 .device_map = DeviceMap{{"", "disk"}},
                                                 .offload_folder = folder / "other"}));
                  }),
                  "Some modules are dispatched on the CPU or the disk: '' is on disk."));
}

TEST_F(Quantized, ComputedMapsCountQuantizedWeights) {
  save_model(state_dict(*plain), folder.path());
  auto empty = init_empty_weights([] { return Net(); });
  MaxMemory budget;
  budget.set("cpu", "64KB");
  budget.set("disk", "1MB");
  const auto model = load_and_quantize_model(empty, eight_bits(),
                                             {.weights_location = folder.path(),
                                              .device_map = "auto",
                                              .max_memory = budget,
                                              .offload_folder = folder / "spill"});
  EXPECT_EQ(model.hf_device_map(), (DeviceMap{{"", "cpu"}}));  // 80 KB in float32
}

// -- adapters -------------------------------------------------------------------------------------

TEST(Lora, TrainsAdaptersOnFourBitWeightsAndSavesNothingElse) {
  torch::manual_seed(6);
  Adapted net;
  const auto trained = nn::mark_only_lora_as_trainable(*net);
  EXPECT_EQ(trained.size(), 2U);
  const auto model = load_and_quantize_model(net, four_bits());
  const auto x = torch::randn({8, 64});
  const auto before = model(x);
  EXPECT_TRUE(torch::equal(net->first(x), torch::linear(x, net->first->weight, net->first->bias)));
  const auto codes = state_dict(*net)["first.weight"].clone();
  Accelerator accelerator({.cpu = true});
  auto [prepared, optimizer] = accelerator.prepare(net, accelerate::AdamW(trained, {.lr = 0.1}));
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(prepared(x).square().sum());
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_FALSE(torch::allclose(model(x), before, 1e-2, 1e-2));
  EXPECT_TRUE(torch::equal(state_dict(*net)["first.weight"], codes));
  const auto adapters = nn::lora_state_dict(*net);
  EXPECT_EQ(adapters.keys(),
            (std::vector<std::string>{"first.lora_A.weight", "first.lora_B.weight"}));
  const auto after = model(x);
  StateDict kept;
  for (const auto& item : adapters) kept.insert(item.key(), item.value().detach().clone());
  net->first->reset_adapter();
  EXPECT_TRUE(torch::allclose(model(x), before, 1e-4, 1e-4));
  load_state_dict(*net, kept, /*strict=*/false);
  EXPECT_TRUE(torch::equal(model(x), after));
  AcceleratorState::_reset_state(true);
}

struct ClonedImpl : torch::nn::Cloneable<ClonedImpl> {
  ClonedImpl() { ClonedImpl::reset(); }
  void reset() override {
    first = register_module("first", nn::LoraLinear(64, 128, nn::LoraOptions{.r = 4}));
  }
  nn::LoraLinear first{nullptr};
};

TEST(Lora, IsClonedWithTheModelAroundIt) {
  const auto net = std::make_shared<ClonedImpl>();
  nn::mark_only_lora_as_trainable(*net);
  const torch::NoGradGuard no_grad;
  net->named_parameters()["first.lora_B.weight"].normal_();
  const auto x = torch::randn({2, 64});
  const auto expected = net->first(x);
  const auto copy = std::dynamic_pointer_cast<ClonedImpl>(net->clone());
  EXPECT_TRUE(torch::equal(copy->first(x), expected));
  auto trained = copy->named_parameters()["first.lora_B.weight"];
  EXPECT_TRUE(trained.requires_grad());
  EXPECT_FALSE(copy->first->weight.requires_grad());
  trained.zero_();
  EXPECT_FALSE(torch::equal(copy->first(x), expected));
  EXPECT_TRUE(torch::equal(net->first(x), expected));
}

TEST(Lora, OfAModelOnTheMetaDeviceBeginsAsZero) {
  test::Folder folder;
  torch::manual_seed(7);
  Adapted original;
  auto state = state_dict(*original);
  StateDict base;  // a file of the model without adapters
  for (const auto& item : state) {
    if (item.key().find("lora_") == std::string::npos) base.insert(item.key(), item.value());
  }
  save_model(base, folder.path());
  auto empty = init_empty_weights([] { return Adapted(); });
  nn::mark_only_lora_as_trainable(*empty);
  const auto model =
      load_and_quantize_model(empty, four_bits(), {.weights_location = folder.path()});
  const auto expected = load_and_quantize_model(original, four_bits());
  const auto x = torch::randn({8, 64});
  EXPECT_TRUE(torch::equal(model(x), expected(x)));
}

TEST(Lora, TrainsUnderFp8WhichLeavesPackedWeightsAlone) {
  const std::vector<KwargsHandler> recipes{
      AORecipeKwargs{.module_filter_func = [](auto&&...) { return true; }}, TERecipeKwargs{}};
  for (const auto& recipe : recipes) {
    torch::manual_seed(6);
    Adapted net;
    const auto trained = nn::mark_only_lora_as_trainable(*net);
    auto config = four_bits();
    config.skip_modules.emplace();
    config.skip_modules->push_back("head");
    const auto dispatched = load_and_quantize_model(net, config);
    Accelerator accelerator(
        {.mixed_precision = PrecisionType::kFp8, .cpu = true, .kwargs_handlers = {recipe}});
    auto [model, optimizer] = accelerator.prepare(net, accelerate::AdamW(trained, {.lr = 0.1}));
    EXPECT_TRUE(has_4bit_bnb_layers(*net));
    EXPECT_EQ(std::ranges::count(fp8_layers(*net), "first"), 0);
    accelerator.backward(model(torch::randn({8, 64})).square().sum());
    optimizer.step();
    AcceleratorState::_reset_state(true);
  }
}

TEST(Prepare, TakesWhatQuantizingHasReturned) {
  test::Folder folder;
  auto net = seeded_net();
  const auto quantized = load_and_quantize_model(net, four_bits());
  EXPECT_TRUE(has_4bit_bnb_layers(*quantized));
  const auto expected = quantized(ids());
  Accelerator accelerator({.cpu = true});
  auto [model, optimizer] =
      accelerator.prepare(quantized, accelerate::AdamW(net->head->parameters(), {.lr = 0.1}));
  static_assert(std::same_as<decltype(model), PreparedModel<Net>>);
  EXPECT_TRUE(torch::equal(model(ids()), expected));
  accelerator.backward(model(ids()).sum());
  optimizer.step();
  EXPECT_FALSE(torch::equal(model(ids()), expected));
  accelerator.save_model(quantized, folder.path());
  EXPECT_EQ(load_state_dict(folder / "model.safetensors")["first.weight"].scalar_type(),
            torch::kByte);
  AcceleratorState::_reset_state(true);
}

TEST(Prepare, KeepsWeightsWhereAModelWasDispatched) {
  auto net = seeded_net();
  Accelerator accelerator({.cpu = true});
  const auto model = accelerator.prepare(cpu_offload(net, {.lazy = {.manage_on_cpu = true}}));
  EXPECT_TRUE(is_offloaded(net->first->weight));
  EXPECT_EQ(model(ids()).sizes(), (std::vector<std::int64_t>{3, 4, 16}));
  AcceleratorState::_reset_state(true);
}

TEST(Prepare, TakesQuantizedWeightsOfTheGpuOfAProcessAlone) {
  auto net = seeded_net();
  static_cast<void>(load_and_quantize_model(net, four_bits()));
  const test::FakeGpu gpu({.major = 9, .minor = 0});
  Accelerator accelerator;
  EXPECT_EQ(accelerator.device().str(), "cuda");
  detail::modeling::set_device_map(net.ptr(), DeviceMap{{"", MapDevice(1)}}, nullptr);
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { static_cast<void>(accelerator.prepare(net)); }),
                  "it is on GPU 1, and this process trains on cuda. Leave device_map"));
  detail::modeling::set_device_map(net.ptr(), DeviceMap{{"", MapDevice(0)}}, nullptr);
  static_cast<void>(accelerator.prepare(net));
  AcceleratorState::_reset_state(true);
}

TEST(Prepare, RefusesToTrainQuantizedWeightsOnDisk) {
  test::Folder folder;
  auto net = seeded_net();
  static_cast<void>(load_and_quantize_model(net, eight_bits()));
  const auto model = disk_offload(net, folder.path());
  Accelerator accelerator({.cpu = true});
  EXPECT_TRUE(
      has(message_of<ArgumentError>([&] { static_cast<void>(accelerator.prepare(net)); }),
          "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU "
          "or disk offload."));
  AcceleratorState::_reset_state(true);
}

}  // namespace
}  // namespace accelerate
