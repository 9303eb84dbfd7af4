#include "accelerate/modeling/planning.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <map>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/state_dict.h"
#include "core/captured_log.h"
#include "modeling/outline.h"
#include "modeling/stored_models.h"
#include "support/fake_gpu.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::CapturedLog;
using test::Json;
using test::message_of;
using Names = std::vector<std::string>;

/// The model of Accelerate's own tests: 236 bytes.
struct SmallImpl : torch::nn::Module {
  SmallImpl() {
    linear1 = register_module("linear1", torch::nn::Linear(3, 4));
    batchnorm = register_module("batchnorm", torch::nn::BatchNorm1d(4));
    linear2 = register_module("linear2", torch::nn::Linear(4, 5));
  }
  torch::nn::Linear linear1{nullptr}, linear2{nullptr};
  torch::nn::BatchNorm1d batchnorm{nullptr};
};
TORCH_MODULE(Small);

struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(const std::vector<std::shared_ptr<Module>>& layers) {
    for (std::size_t i = 0; i < layers.size(); ++i) register_module(std::to_string(i), layers[i]);
  }
};

std::shared_ptr<LayersImpl> three_small() {
  return std::make_shared<LayersImpl>(std::vector<std::shared_ptr<torch::nn::Module>>{
      std::make_shared<SmallImpl>(), std::make_shared<SmallImpl>(), std::make_shared<SmallImpl>()});
}

TEST(DtypeByteSize, CountsBits) {
  EXPECT_EQ(dtype_byte_size(torch::kFloat32), 4);
  EXPECT_EQ(dtype_byte_size("torch.bfloat16"), 2);
  EXPECT_EQ(dtype_byte_size(torch::kBool), 0.125);
  EXPECT_EQ(dtype_byte_size(CustomDtype::kInt4), 0.5);
  EXPECT_EQ(dtype_byte_size("int2"), 0.25);
  for (const auto* name : {"fp8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
                           "float8_e5m2fnuz", "float8_e8m0fnu"}) {
    EXPECT_EQ(dtype_byte_size(name), 1) << name;
  }
  EXPECT_EQ(message_of<ArgumentError>([] { (void)dtype_byte_size("float17"); }),
            "`dtype` is not a valid dtype: float17. Use a name of Torch such as 'float16', or "
            "'fp8', 'int4', 'int2'.");
}

TEST(ComputeModuleSizes, SumsTensorsOfModules) {
  const Small net;
  const auto sizes = compute_module_sizes(*net);
  EXPECT_EQ(sizes.get("", 0), 236);
  EXPECT_EQ(sizes.get("linear1", 0), 64);
  EXPECT_EQ(sizes.get("batchnorm", 0), 72);
  EXPECT_EQ(sizes.get("linear2.weight", 0), 80);
  EXPECT_EQ(compute_module_sizes(*net, {.dtype = torch::kHalf}).get("", 0), 122);
  EXPECT_EQ(compute_module_sizes(*net, {.dtype = "float64"}).get("", 0), 236);
  EXPECT_EQ(compute_module_total_buffer_size(*net), 40);
}

TEST(ComputeModuleSizes, CountsTensorsWithOneMemoryOnce) {
  const Small net;
  net->linear2->bias.set_data(net->linear2->weight.view(-1).slice(0, 0, 5));
  EXPECT_EQ(compute_module_sizes(*net).get("", 0), 236);  // a part of another one is no alias
  net->linear1->bias.set_data(net->batchnorm->bias);
  EXPECT_EQ(compute_module_sizes(*net).get("", 0), 220);
}

struct Transformer : torch::nn::Module, NoSplitModules {
  Transformer() {
    weight = register_parameter("weight", torch::zeros(7));
    register_module("block", Small());
  }
  Names no_split_modules() const override { return {"Small"}; }
  torch::Tensor weight;
};

TEST(CalculateMaximumSizes, FindsTheLargestLayer) {
  const auto [total, largest] = calculate_maximum_sizes(*Small());
  EXPECT_EQ(total, 236);
  EXPECT_EQ(largest, (LayerSize{100, {"linear2"}}));
  EXPECT_EQ(calculate_maximum_sizes(Transformer()).largest_layer, (LayerSize{236, {"block"}}));
  EXPECT_EQ(get_max_layer_size({{"", Small().get()}}, {}, {}).names.size(), 3U);
}

TEST(InferAutoDeviceMap, PlansTheModelsOfTheChapter) {
  const CapturedLog log;
  const auto plan = [](const auto& net, InferAutoDeviceMapOptions options) {
    return infer_auto_device_map(*net, options);
  };
  Small small;
  EXPECT_EQ(plan(small, {.max_memory = MaxMemory{{0, 200}, {1, 200}}}),
            (DeviceMap{{"linear1", 0}, {"batchnorm", 1}, {"linear2", 1}}));
  EXPECT_EQ(plan(small, {.max_memory = MaxMemory{{0, "1KB"}}}), (DeviceMap{{"", 0}}));
  const auto three = three_small();
  const MaxMemory budget{{0, 500}, {1, 500}};
  EXPECT_EQ(
      plan(three, {.max_memory = budget}),
      (DeviceMap{{"0", 0}, {"1.linear1", 0}, {"1.batchnorm", 0}, {"1.linear2", 1}, {"2", 1}}));
  EXPECT_EQ(plan(three, {.max_memory = budget, .no_split_module_classes = {"Small"}}),
            (DeviceMap{{"0", 0}, {"1", 1}, {"2", 1}}));
  const auto layers = std::make_shared<LayersImpl>(std::vector<std::shared_ptr<torch::nn::Module>>{
      std::make_shared<torch::nn::LinearImpl>(10, 4), std::make_shared<torch::nn::LinearImpl>(4, 4),
      std::make_shared<torch::nn::LinearImpl>(4, 8)});
  EXPECT_EQ(plan(layers, {.max_memory = MaxMemory{{0, 256}}}), (DeviceMap{{"", "disk"}}));
  EXPECT_EQ(plan(layers, {.max_memory = MaxMemory{{0, 256}}, .fallback_allocation = true}),
            (DeviceMap{{"0", "disk"}, {"1", 0}, {"2", "disk"}}));
}

TEST(InferAutoDeviceMap, KeepsTiedModulesTogether) {
  const CapturedLog log;
  const auto tied = std::make_shared<LayersImpl>(std::vector<std::shared_ptr<torch::nn::Module>>{
      std::make_shared<torch::nn::LinearImpl>(4, 4), std::make_shared<torch::nn::LinearImpl>(4, 4),
      std::make_shared<torch::nn::LinearImpl>(4, 4),
      std::make_shared<torch::nn::LinearImpl>(4, 4)});
  const MaxMemory budget{{0, 240}, {1, 200}};
  EXPECT_EQ(infer_auto_device_map(*tied, {.max_memory = budget}),
            (DeviceMap{{"0", 0}, {"1", 0}, {"2", 1}, {"3", 1}}));
  tie_parameters(*tied, {"0.weight", "2.weight"});
  EXPECT_EQ(infer_auto_device_map(*tied, {.max_memory = budget}),
            (DeviceMap{{"0", 0}, {"2", 0}, {"1", 1}, {"3", 1}}));
}

TEST(InferAutoDeviceMap, ListsWhatWouldHaveBeenEnoughAndEachStep) {
  const CapturedLog log(LogLevel::kInfo);
  (void)infer_auto_device_map(*Small(),
                              {.max_memory = MaxMemory{{0, 100}, {"cpu", 1000}}, .verbose = true});
  std::string all;
  for (const auto& message : log.messages()) all += message + "\n";
  EXPECT_NE(all.find("  - 0: 164 bytes required"), all.npos) << all;
  EXPECT_NE(all.find("Treating module linear1."), all.npos) << all;
  EXPECT_NE(all.find("Putting linear1 (size=64) on cpu."), all.npos) << all;
}

TEST(InferAutoDeviceMap, WarnsOfWeightsThatShouldBeTied) {
  struct Untied : SmallImpl, TiedWeights {};
  const CapturedLog log;
  (void)infer_auto_device_map(Untied(), {.max_memory = MaxMemory{{"cpu", 1000}}});
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0].substr(0, 34), "The model weights are not tied. Pl");
}

TEST(GetMaxMemory, OrdersDevicesAndWarnsOfThoseThatAreNotThere) {
  const CapturedLog log;
  const auto memory = get_max_memory(MaxMemory{{"disk", 1}, {"cpu", "1MB"}, {3, "1KiB"}, {1, 5}});
  std::string order;
  for (const auto& [device, bytes] : memory) order += device.to_string() + " ";
  EXPECT_EQ(order, "1 3 cpu disk ");
  EXPECT_EQ(memory.get(MapDevice(3), 0), 1024);
  EXPECT_EQ(log.messages(), (Names{"Device 1 is not available, available devices are []",
                                   "Device 3 is not available, available devices are []"}));
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)get_max_memory(MaxMemory{{"npu:0", 1}}); }),
      "Device npu:0 is not recognized, available devices are integers(for GPU/XPU), 'mps', 'cpu' "
      "and 'disk'");
  EXPECT_THROW((void)(MaxMemory{{0, -1}}), ArgumentError);
  EXPECT_THROW((void)(MaxMemory{{0, "many"}}), ArgumentError);
}

TEST(GetMaxMemory, MeasuresWhatIsFree) {
  const test::FakeGpu gpu({.major = 9, .minor = 0});
  const auto memory = get_max_memory();
  EXPECT_EQ(memory.get(MapDevice(0), 0), 1000);
  EXPECT_GT(memory.get(MapDevice("cpu"), 0), 1 << 20);
}

TEST(GetBalancedMemory, SharesAModelOut) {
  const CapturedLog log;
  const auto balanced = [](const MaxMemory& budget, bool low_zero = false) {
    return get_balanced_memory(*Small(), {.max_memory = budget, .low_zero = low_zero});
  };
  EXPECT_EQ(balanced({{0, 300}, {1, 300}}), (MaxMemory{{0, 215}, {1, 300}}));
  EXPECT_EQ(balanced({{0, 0}, {1, 300}, {2, 300}}), (MaxMemory{{0, 0}, {1, 215}, {2, 300}}));
  EXPECT_EQ(balanced({{0, 300}, {"cpu", 1000}}), (MaxMemory{{0, 300}, {"cpu", 1000}}));
  // Python fails for the next two.
  EXPECT_EQ(balanced({{0, 300}, {2, 200}}, true), (MaxMemory{{0, 36}, {2, 200}}));
  EXPECT_EQ(balanced({{0, 300}, {1, 300}, {"disk", 0}}),
            (MaxMemory{{0, 215}, {1, 300}, {"disk", 0}}));
}

TEST(GetBalancedMemory, LeavesATenthOfAnOnlyGpuFree) {
  const test::FakeGpu gpu({.major = 9, .minor = 0});
  EXPECT_EQ(get_balanced_memory(*Small()).get(MapDevice(0), 0), 900);
}

TEST(CleanDeviceMap, NamesModulesInsteadOfTheirParts) {
  EXPECT_EQ(clean_device_map({{"a", 0}, {"b", 0}}), (DeviceMap{{"", 0}}));
  EXPECT_EQ(clean_device_map({{"a.x", 0}}), (DeviceMap{{"a.x", 0}}));
  EXPECT_EQ(clean_device_map({{"a.x", 0}, {"a.y", 0}, {"ab", 1}}),
            (DeviceMap{{"a", 0}, {"ab", 1}}));
  EXPECT_EQ(clean_device_map({{"a.x", 0}, {"a.y", 0}, {"b.x", 0}, {"b.y", 0}}, "a"),
            (DeviceMap{{"a", 0}, {"b.x", 0}, {"b.y", 0}}));
  // A key beside those below it keeps its place.
  EXPECT_EQ(clean_device_map({{"a", 0}, {"a.x", 1}, {"a.y", 1}}),
            (DeviceMap{{"a", 0}, {"a.x", 1}, {"a.y", 1}}));
}

TEST(OrderedMap, IsReadAndWrittenAsADictionaryOfPython) {
  DeviceMap map{{"linear1", 0}, {"batchnorm", "cpu"}};
  map["linear2"] = "disk";
  map["linear1"] = 1;
  EXPECT_EQ(map.keys(), (Names{"linear1", "batchnorm", "linear2"}));
  EXPECT_EQ(map.at("linear1"), 1);
  EXPECT_TRUE(map.at("linear2").is_disk());
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)map.at(std::string_view("linear3")); }),
            "There is no entry 'linear3'.");
  MaxMemory budget{{0, "1KB"}};
  budget["cpu"] = 500;
  EXPECT_EQ(budget.at(0), 1000);
  EXPECT_EQ(budget.at("cpu"), 500);
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)budget.at(7); }), "There is no entry '7'.");
}

TEST(MapDevice, ReadsNumbersAndNames) {
  EXPECT_EQ(MapDevice("cuda:3"), MapDevice(3));
  EXPECT_EQ(MapDevice("3"), 3);
  EXPECT_EQ(MapDevice("cuda"), 0);
  EXPECT_NE(MapDevice("cpu"), 0);
  EXPECT_TRUE(MapDevice("disk").is_disk());
  EXPECT_EQ(MapDevice("xpu:1").to_string(), "xpu:1");
}

TEST(CheckDeviceMap, NamesTensorsWithoutAPlaceAndUnknownModules) {
  const Small net;
  const CapturedLog log;
  check_device_map(*net, {{"", 0}});
  check_device_map(
      *net, {{"linear1", 0}, {"batchnorm", 1}, {"linear2.weight", 0}, {"linear2.bias", "cpu"}});
  EXPECT_EQ(log.messages(), Names{});
  EXPECT_EQ(message_of<ArgumentError>([&] {
              check_device_map(*net, {{"linear1", 0}, {"batchnorm", 1}, {"linear3", 0}});
            }),
            "The device_map provided does not give any device for the following parameters: "
            "linear2.weight, linear2.bias. Add them, or a module that they are in.");
  EXPECT_EQ(log.messages(),
            Names{"The following device_map keys do not match any submodules in the model: "
                  "['linear3']"});
}

TEST(CheckTiedParameters, WarnsOfDifferentDevices) {
  const CapturedLog log;
  check_tied_parameters_on_same_device({{"a.w", "b.w"}}, {{"a", 0}, {"b", 0}});
  EXPECT_EQ(log.messages(), Names{});
  check_tied_parameters_on_same_device({{"a.w", "b.w"}}, {{"a", 0}, {"b", "cpu"}});
  EXPECT_EQ(log.messages(),
            Names{"Tied parameters are on different devices: {'a.w': 0, 'b.w': cpu}. Please modify "
                  "your custom device map or set `device_map='auto'`. "});
  EXPECT_THROW(check_tied_parameters_on_same_device({{"a.w", "b.w"}}, {{"a", 0}}), ArgumentError);
}

TEST(HfDeviceMap, IsRememberedWithTheModel) {
  auto net = std::make_shared<SmallImpl>();
  EXPECT_EQ(hf_device_map(*net), std::nullopt);
  detail::modeling::set_device_map(net, DeviceMap{{"", 0}});
  EXPECT_EQ(hf_device_map(*net), (DeviceMap{{"", 0}}));
  detail::modeling::set_device_map(net, std::nullopt);
  EXPECT_EQ(hf_device_map(*net), std::nullopt);
  EXPECT_EQ(hf_device_map(SmallImpl()), std::nullopt);
}

// ---- what Python says about 200 random models ---------------------------------------------------

std::map<std::string, DtypeLike> special_dtypes(const Json& options) {
  std::map<std::string, DtypeLike> result;
  if (!options.contains("special_dtypes")) return result;
  for (const auto& [name, dtype] : options["special_dtypes"].items()) {
    result.emplace(name, dtype.get<std::string>());
  }
  return result;
}

std::optional<DtypeLike> dtype_of(const Json& options) {
  if (!options.contains("dtype")) return std::nullopt;
  return options["dtype"].get<std::string>();
}

MaxMemory budget_of(const Json& stored) {
  MaxMemory budget;
  for (const auto& [device, bytes] : stored.items()) {
    // Python's results have fractions of a byte where a bool is an eighth; ours do not.
    budget.set(MapDevice(device), static_cast<std::int64_t>(bytes.get<double>()));
  }
  return budget;
}

InferAutoDeviceMapOptions plan_options(const Json& options) {
  return {.max_memory = budget_of(options["max_memory"]),
          .no_split_module_classes = options["no_split_module_classes"].get<Names>(),
          .dtype = dtype_of(options),
          .special_dtypes = special_dtypes(options),
          .clean_result = options["clean_result"].get<bool>(),
          .offload_buffers = options["offload_buffers"].get<bool>(),
          .fallback_allocation = options["fallback_allocation"].get<bool>()};
}

/// Calls `check(net, model)` for each stored model until one fails.
template <class Check>
void for_each_model(const Check& check) {
  std::ifstream file(test::reference_path("device_maps/plans.json"));
  const auto stored = Json::parse(file);
  ASSERT_EQ(stored.size(), 200U);
  for (std::size_t i = 0; i < stored.size() && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("model " + std::to_string(i));
    check(*test::build_stored_model(stored[i]), stored[i]);
  }
}

TEST(StoredModels, HavePythonsSizes) {
  for_each_model([](const torch::nn::Module& net, const Json& model) {
    const ModuleSizesOptions options{.dtype = dtype_of(model["sizes_options"]),
                                     .special_dtypes = special_dtypes(model["sizes_options"])};
    const auto sizes = compute_module_sizes(net, options);
    ASSERT_EQ(sizes.size(), model["sizes"].size());
    auto ours = sizes.begin();
    for (const auto& [name, bytes] : model["sizes"].items()) {
      EXPECT_EQ(ours->first, name);  // in Python's order
      EXPECT_EQ(ours->second, bytes.get<double>()) << name;
      ++ours;
    }
    EXPECT_EQ(compute_module_total_buffer_size(net, options), model["buffers"].get<double>());
    const auto largest = calculate_maximum_sizes(net).largest_layer;
    EXPECT_EQ(largest.size, model["largest"][0].get<double>());
    EXPECT_EQ(largest.names, model["largest"][1].get<Names>());
  });
}

TEST(StoredModels, HavePythonsTies) {
  for_each_model([](const torch::nn::Module& net, const Json& model) {
    EXPECT_EQ(find_tied_parameters(net), model["tied"].get<std::vector<Names>>());
  });
}

TEST(StoredModels, AreBalancedAsByPython) {
  const CapturedLog log;
  int compared = 0;
  for_each_model([&](const torch::nn::Module& net, const Json& model) {
    for (const auto& options : model["balanced"]) {
      const auto balanced = get_balanced_memory(
          net, {.max_memory = budget_of(options["max_memory"]),
                .no_split_module_classes = options["no_split_module_classes"].get<Names>(),
                .dtype = dtype_of(options),
                .special_dtypes = special_dtypes(options),
                .low_zero = options["low_zero"].get<bool>()});
      if (options.contains("error")) continue;
      EXPECT_EQ(balanced, budget_of(options["result"])) << options;
      ++compared;
    }
  });
  EXPECT_GT(compared, 350);
}

/// Every tensor is where Python puts it. Python's map leaves out buffers of modules that it splits.
void expect_same_places(const torch::nn::Module& net, const DeviceMap& ours,
                        const DeviceMap& python) {
  bool complete = true;
  for (const auto& entry : state_dict(net)) {
    const auto* const expected = find_in_device_map(python, entry.key());
    const auto* const device = find_in_device_map(ours, entry.key());
    ASSERT_NE(device, nullptr) << entry.key();
    if (expected == nullptr) {
      complete = false;
    } else {
      EXPECT_EQ(*device, *expected) << entry.key();
    }
  }
  if (complete) {
    EXPECT_EQ(ours, python);
  }
}

TEST(StoredModels, ArePlannedAsByPython) {
  const CapturedLog log;
  int compared = 0;
  for_each_model([&](const torch::nn::Module& net, const Json& model) {
    for (const auto& options : model["plans"]) {
      SCOPED_TRACE(options.dump());
      const auto map = infer_auto_device_map(net, plan_options(options));
      check_device_map(net, map);
      if (options.contains("error")) continue;  // of Python
      DeviceMap python;
      for (const auto& [name, device] : options["map"].items()) {
        python.set(name, device.get<std::string>());
      }
      expect_same_places(net, map, python);
      ++compared;
    }
  });
  EXPECT_GT(compared, 600);
}

/// The numbers before a word in messages.
std::vector<double> numbers_before(const Names& messages, const std::string& word) {
  std::vector<double> numbers;
  for (const auto& message : messages) {
    for (auto end = message.find(word); end != message.npos; end = message.find(word, end + 1)) {
      numbers.push_back(std::stod(message.substr(message.rfind(' ', end - 1))));
    }
  }
  return numbers;
}

TEST(StoredModels, AreReportedAsByPython) {
  for_each_model([&](const torch::nn::Module& net, const Json& model) {
    for (const auto& options : model["plans"]) {
      // Python looks for special dtypes of buffers under names that begin in the module.
      if (options.contains("error") || options.contains("special_dtypes")) continue;
      SCOPED_TRACE(options.dump());
      const CapturedLog log(LogLevel::kInfo);
      (void)infer_auto_device_map(net, plan_options(options));
      EXPECT_EQ(numbers_before(log.messages(), " bytes of buffer"),
                options["homeless"].get<std::vector<double>>());
      std::vector<double> required;
      for (const auto& pair : options["required"]) required.push_back(pair[1].get<double>());
      EXPECT_EQ(numbers_before(log.messages(), " bytes required"), required);
    }
  });
}

}  // namespace
}  // namespace accelerate
