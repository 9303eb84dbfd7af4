// Models in host memory, on disk and over devices, through the public functions.
#include <accelerate/accelerator.h>
#include <accelerate/big_modeling.h>
#include <accelerate/checkpoint.h>
#include <accelerate/errors.h>
#include <accelerate/modeling.h>
#include <accelerate/nn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "core/captured_log.h"
#include "offload/managed_model.h"
#include "support/command.h"
#include "support/fake_gpu.h"
#include "support/has.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::has;
using test::input;
using test::message_of;
using test::seeded;
using test::ThreeLayers;

/// With a norm that has buffers, and a head that is tied to the first layer.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(10, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    block = register_module("block", ThreeLayers());
    head = register_module("head", torch::nn::Linear(4, 8));
    out = register_module("out", torch::nn::Linear(torch::nn::LinearOptions(8, 10).bias(false)));
    tie_parameters(*this, {"embedding.weight", "out.weight"});
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    const auto x = norm->forward(embedding->forward(tokens));
    return out->forward(head->forward(block->forward(x.slice(1, 0, 6))));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  ThreeLayers block{nullptr};
  torch::nn::Linear head{nullptr}, out{nullptr};
};
TORCH_MODULE(TiedNet);

/// With a buffer that state dicts do not have.
struct RotaryImpl : torch::nn::Module {
  RotaryImpl() {
    layer = register_module("layer", torch::nn::Linear(6, 8));
    inv_freq = register_buffer("inv_freq", 1.0 / torch::arange(1.0, 9.0));
    scale = register_buffer("scale", torch::full({8}, 2.0));
    mark_non_persistent(*this, "inv_freq");
  }
  torch::Tensor forward(const torch::Tensor& x) { return layer->forward(x) * inv_freq * scale; }
  torch::nn::Linear layer{nullptr};
  torch::Tensor inv_freq, scale;
};
TORCH_MODULE(Rotary);

torch::Tensor tokens() { return torch::arange(10); }

class Offload : public testing::Test {
 protected:
  static LazyOptions managed() { return {.manage_on_cpu = true}; }

  test::Folder folder;
  ThreeLayers resident = seeded<ThreeLayers>();
  ThreeLayers net = seeded<ThreeLayers>();
  TiedNet tied_resident = seeded<TiedNet>();
  TiedNet tied = seeded<TiedNet>();
};

TEST_F(Offload, CpuOffloadOnTheCpuLeavesTheModelAsItIs) {
  const auto model = cpu_offload(net);
  EXPECT_FALSE(is_offloaded(net->first->weight));
  EXPECT_NE(net->first->weight.data_ptr(), nullptr);
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
  EXPECT_EQ(model.stats().managed_bytes, 0);
}

// Accelerator::device() is cpu:0, cpu:1, ... in processes on CPUs.
TEST_F(Offload, TheCpuIsOneDeviceWhateverItsIndex) {
  const auto model =
      cpu_offload(net, {.execution_device = torch::Device(torch::kCPU, 1), .lazy = managed()});
  EXPECT_TRUE(is_offloaded(net->first->weight));
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(Offload, CpuOffloadedTrainsAsTheResidentModel) {
  const auto model = cpu_offload(tied, {.lazy = managed()});
  EXPECT_TRUE(has_offloaded_params(*tied->head));
  EXPECT_FALSE(is_offloaded(tied->norm->running_mean)) << "buffers stay by default";
  torch::optim::AdamW ours(tied->parameters(), torch::optim::AdamWOptions(0.01));
  torch::optim::AdamW theirs(tied_resident->parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 4; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    const auto result = model(tokens());
    const auto expected = tied_resident->forward(tokens());
    EXPECT_TRUE(result.equal(expected)) << step;
    result.pow(2).mean().backward();
    expected.pow(2).mean().backward();
    ours.step();
    theirs.step();
  }
  const auto values = model.state_dict();
  const auto expected = state_dict(*tied_resident);
  ASSERT_EQ(values.size(), expected.size());
  for (const auto& item : expected)
    EXPECT_TRUE(values[item.key()].equal(item.value())) << item.key();
  EXPECT_GT(model.stats().writebacks, 0);
}

TEST_F(Offload, ActivationCheckpointsBringTheWeightsAgain) {
  const auto model = cpu_offload(net, {.lazy = managed()});
  const auto result = activation_checkpoint(net, input());
  model.offload_now();
  result.pow(2).sum().backward();
  resident->forward(input()).pow(2).sum().backward();
  const auto expected = resident->parameters();
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(parameters[i].grad().equal(expected[i].grad())) << i;
  }
}

TEST_F(Offload, RemoveHooksMakesAnOrdinaryModel) {
  const auto model = cpu_offload(tied, {.offload_buffers = true, .lazy = managed()});
  EXPECT_TRUE(is_offloaded(tied->norm->running_mean));
  model(tokens());
  model.offload_now();  // statistics that the forward has changed are kept
  tied_resident->forward(tokens());
  model.remove_hooks();
  EXPECT_FALSE(has_offloaded_params(*tied->norm));
  EXPECT_NE(tied->head->weight.data_ptr(), nullptr);
  EXPECT_TRUE(tied->norm->running_mean.equal(tied_resident->norm->running_mean));
  EXPECT_TRUE(tied->embedding->weight.is_same(tied->out->weight)) << "still tied";
  EXPECT_TRUE(tied->forward(tokens()).equal(tied_resident->forward(tokens())));
}

TEST_F(Offload, PreloadedClassesAreOneGroup) {
  const auto by_layer = cpu_offload(tied, {.lazy = managed()});
  by_layer(tokens());
  const auto fills = by_layer.stats().fills;
  auto other = seeded<TiedNet>();
  const auto by_block =
      cpu_offload(other, {.preload_module_classes = {"ThreeLayers"}, .lazy = managed()});
  EXPECT_TRUE(by_block(tokens()).equal(by_layer(tokens())));
  EXPECT_LT(by_block.stats().fills, fills + 1);
}

TEST_F(Offload, CpuOffloadWithHookStaysUntilItIsOffloaded) {
  auto [first, first_hook] = cpu_offload_with_hook(net, {.lazy = managed()});
  auto second_net = seeded<ThreeLayers>();
  auto [second, second_hook] =
      cpu_offload_with_hook(second_net, {.prev_module_hook = first_hook, .lazy = managed()});
  EXPECT_TRUE(first->forward(input()).equal(resident->forward(input())));
  first->forward(input());
  EXPECT_EQ(first_hook.stats().fills, 1) << "the whole model at once, and it stays";
  EXPECT_NE(first->third->weight.data_ptr(), nullptr);
  second->forward(input());
  EXPECT_THROW((void)first->third->weight.data_ptr(), c10::Error) << "the next one sent it away";
  EXPECT_EQ(second_hook.stats().fills, 1);
  second_hook.offload();
  EXPECT_THROW((void)second->third->weight.data_ptr(), c10::Error);
  second_hook.remove();
  EXPECT_NE(second->third->weight.data_ptr(), nullptr);
}

TEST_F(Offload, DiskOffloadWritesAFolderAndReadsItAgain) {
  const auto target = folder.path() / "spill";
  {
    const auto model = disk_offload(tied, target);
    EXPECT_TRUE(is_offloaded(tied->head->weight));
    EXPECT_TRUE(std::filesystem::exists(target / "head.weight.dat"));
    EXPECT_TRUE(model(tokens()).equal(tied_resident->forward(tokens())));
    EXPECT_TRUE(model.state_dict()["out.weight"].equal(tied_resident->out->weight));
    EXPECT_THROW(
        {
          const torch::NoGradGuard no_grad;
          tied->head->bias.zero_();
        },
        StateError);
  }
  // The folder is there: a model without weights takes them from it.
  auto empty = init_empty_weights([] { return TiedNet(); });
  const auto model = disk_offload(empty, target, {.execution_device = torch::kCPU});
  tied_resident = seeded<TiedNet>();
  EXPECT_TRUE(model(tokens()).equal(tied_resident->forward(tokens())));
}

TEST_F(Offload, NonPersistentBuffersStayResidentWhereOthersAreOnDisk) {
  auto whole = seeded<Rotary>();
  const auto expected = whole->forward(input());
  save_model(state_dict(*whole), folder.path() / "checkpoint");
  auto rotary = seeded<Rotary>();
  {
    const auto model = disk_offload(rotary, folder.path() / "spill", {.offload_buffers = true});
    EXPECT_TRUE(is_offloaded(rotary->scale));
    EXPECT_FALSE(is_offloaded(rotary->inv_freq));
    EXPECT_TRUE(model(input()).equal(expected));
  }
  auto empty = init_empty_weights([] { return Rotary(); });
  const auto loaded = load_checkpoint_and_dispatch(empty, folder.path() / "checkpoint",
                                                   {.device_map = DeviceMap{{"", "disk"}},
                                                    .offload_folder = folder.path() / "loaded",
                                                    .offload_buffers = true});
  EXPECT_TRUE(loaded(input()).equal(expected));
}

TEST_F(Offload, RunningStatisticsStayResidentSoThatAForwardInTrainingWorks) {
  auto evaluated = seeded<TiedNet>();
  save_model(state_dict(*evaluated), folder.path() / "checkpoint");
  const auto expected = tied_resident->forward(tokens());
  {
    const auto model = disk_offload(tied, folder.path() / "spill", {.offload_buffers = true});
    EXPECT_TRUE(model(tokens()).equal(expected));
    EXPECT_TRUE(tied->norm->running_mean.equal(tied_resident->norm->running_mean)) << "updated";
  }
  auto empty = init_empty_weights([] { return TiedNet(); });
  const auto model = load_checkpoint_and_dispatch(empty, folder.path() / "checkpoint",
                                                  {.device_map = DeviceMap{{"", "disk"}},
                                                   .offload_folder = folder.path() / "loaded",
                                                   .offload_buffers = true});
  EXPECT_TRUE(model(tokens()).equal(expected));
  EXPECT_EQ(empty->norm->num_batches_tracked.item<int>(), 1);
  auto writable = seeded<TiedNet>();
  const auto changing = disk_offload(writable, folder.path() / "writable",
                                     {.offload_buffers = true, .lazy = {.writable = true}});
  EXPECT_TRUE(is_offloaded(writable->norm->running_mean));
  EXPECT_TRUE(changing(tokens()).equal(expected));
}

TEST_F(Offload, AFolderOfAnotherModelIsRefused) {
  const auto target = folder.path() / "spill";
  {
    const auto model = disk_offload(net, target);
  }
  EXPECT_THROW((void)disk_offload(tied, target), CheckpointError);
  EXPECT_TRUE(tied->forward(tokens()).equal(tied_resident->forward(tokens()))) << "not changed";
}

TEST_F(Offload, AFolderWithOtherValuesIsRefusedUnlessItIsReused) {
  const auto target = folder.path() / "spill";
  torch::manual_seed(11);
  ThreeLayers other;
  offload_state_dict(target, state_dict(*other));
  {
    auto taker = seeded<ThreeLayers>();
    const auto model = disk_offload(taker, target, {.lazy = {.reuse = true}});
    EXPECT_TRUE(model(input()).equal(other->forward(input())));
  }
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { (void)disk_offload(net, target); }),
                  "has other values of first.weight, first.bias"));
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input()))) << "not changed";
  std::filesystem::remove_all(target);
  {
    const auto model = disk_offload(net, target);
    EXPECT_TRUE(model(input()).equal(resident->forward(input())));
  }
  const auto again = disk_offload(net, target);  // the same values
  auto half = seeded<ThreeLayers>();
  half->to(torch::kHalf);
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { (void)disk_offload(half, target); }),
                  "'first.weight' is of the dtype float32 there and float16 here"));
}

TEST_F(Offload, AFolderIsSharedByReadersAndClosedToWriters) {
  const auto target = folder.path() / "spill";
  auto first = seeded<ThreeLayers>();
  const auto model = disk_offload(first, target);
  const auto second = disk_offload(net, target);
  EXPECT_TRUE(second(input()).equal(model(input())));
  torch::manual_seed(11);
  ThreeLayers other;
  const auto used = "uses '" + target.string() + "' for offloaded weights. Name another folder";
  const auto overwrite = [&] { offload_state_dict(target, state_dict(*other)); };
  EXPECT_TRUE(has(message_of<CheckpointError>(overwrite), used));
  EXPECT_TRUE(model(input()).equal(resident->forward(input()))) << "its files are as they were";
  model.remove_hooks();
  second.remove_hooks();
  overwrite();
  const auto writer = disk_offload(other, target, {.lazy = {.writable = true}});
  EXPECT_TRUE(writer(input()).equal(other->forward(input())));
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { (void)disk_offload(net, target); }), used));
}

// As the processes of a run that name one folder.
TEST_F(Offload, SeveralThatWriteTheSameWeightsAtOnceShareTheFolder) {
  for (int round = 0; round < 5; ++round) {
    const auto target = folder.path() / std::to_string(round);
    std::vector<ThreeLayers> nets;
    for (int i = 0; i < 3; ++i) nets.push_back(seeded<ThreeLayers>());
    std::vector<std::future<Dispatched<ThreeLayers>>> models;
    for (const auto& one : nets) {
      models.push_back(std::async(std::launch::async, [&] { return disk_offload(one, target); }));
    }
    for (auto& model : models) {
      EXPECT_TRUE(model.get()(input()).equal(resident->forward(input())));
    }
  }
}

TEST_F(Offload, MoreFilesAreMappedThanMayBeOpen) {
  torch::nn::Sequential deep;
  for (int i = 0; i < 100; ++i) deep->push_back(torch::nn::Linear(2, 2));
  const auto expected = deep->forward(torch::ones({1, 2}));
  const auto model = disk_offload(deep, folder.path() / "spill", {.lazy = {.keep = 1000}});
  rlimit old{};
  ::getrlimit(RLIMIT_NOFILE, &old);
  const rlimit few{.rlim_cur = 64, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);
  torch::Tensor result;
  EXPECT_NO_THROW(result = deep->forward(torch::ones({1, 2})));
  ::setrlimit(RLIMIT_NOFILE, &old);
  ASSERT_TRUE(result.defined());
  EXPECT_TRUE(result.equal(expected));
}

TEST_F(Offload, DispatchMixesPlaces) {
  const DeviceMap map{
      {"embedding", "cpu"}, {"norm", "cpu"}, {"block", "disk"}, {"head", "cpu"}, {"out", "cpu"}};
  const auto model =
      dispatch_model(tied, map, {.offload_dir = folder.path() / "spill", .lazy = managed()});
  EXPECT_EQ(model.hf_device_map(), map);
  EXPECT_EQ(hf_device_map(*tied), map);
  EXPECT_TRUE(model(tokens()).equal(tied_resident->forward(tokens())));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "spill" / "block.first.weight.dat"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "spill" / "head.weight.dat"));
  model.remove_hooks();
  EXPECT_FALSE(hf_device_map(*tied).has_value());
  EXPECT_TRUE(tied->forward(tokens()).equal(tied_resident->forward(tokens())));
}

TEST_F(Offload, WeightsStayInTheSafetensorsFilesOfAnIndex) {
  save_model(state_dict(*resident), folder.path());
  const auto file = folder.path() / "model.safetensors";
  OffloadIndex index;
  for (const auto& item : state_dict(*resident)) {
    index.set(item.key(), {.safetensors_file = file, .weight_name = item.key()});
  }
  auto empty = init_empty_weights([] { return ThreeLayers(); });
  const auto model = dispatch_model(empty, {{"", "disk"}}, {.offload_index = index});
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
  EXPECT_TRUE(model.state_dict()["third.bias"].equal(resident->third->bias));

  auto turned = state_dict(*resident);
  turned["first.weight"] = resident->first->weight.detach().t().contiguous();
  save_model(turned, folder.path() / "turned");
  auto wrong = index;
  wrong.set("first.weight", {.safetensors_file = folder.path() / "turned" / "model.safetensors"});
  auto conv1d = init_empty_weights([] { return ThreeLayers(); });
  EXPECT_TRUE(has(message_of<CheckpointError>([&] {
                    (void)dispatch_model(conv1d, {{"", "disk"}}, {.offload_index = wrong});
                  }),
                  "The parameter 'first.weight' has the shape [8, 6], and in"));

  index.set("first.bias", {.safetensors_file = file, .weight_name = "absent"});
  auto other = init_empty_weights([] { return ThreeLayers(); });
  EXPECT_TRUE(has(message_of<CheckpointError>([&] {
                    (void)dispatch_model(other, {{"", "disk"}}, {.offload_index = index});
                  }),
                  "which has no tensor of that name"));
}

TEST_F(Offload, ASingleDeviceOnlyMoves) {
  const auto model = dispatch_model(net, {{"", "cpu"}});
  EXPECT_FALSE(is_offloaded(net->first->weight));
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(Offload, MapsThatDoNotFitAreRefused) {
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { (void)dispatch_model(net, {{"first", "cpu"}}); }),
                  "second"));
  const auto message = message_of<ArgumentError>([&] {
    (void)dispatch_model(net, {{"first", "cpu"}, {"second", "disk"}, {"third", "disk"}});
  });
  EXPECT_TRUE(has(message, "second, third on disk"));
  EXPECT_TRUE(has(message, "offload_dir"));
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    (void)load_checkpoint_and_dispatch(net, folder.path(), {.device_map = "best"});
                  }),
                  "auto, balanced, balanced_low_0, sequential"));
  EXPECT_THROW((void)cpu_offload(ThreeLayers(nullptr)), ArgumentError);
}

TEST_F(Offload, DevicesThatAreNotThereAreRefusedByNameBeforeAnythingMoves) {
  const auto refuse = [&](const MapDevice& device) {
    (void)dispatch_model(
        net, {{"first", "disk"}, {"second", "cpu"}, {"third", device}},
        {.main_device = torch::kCPU, .offload_dir = folder.path() / "spill", .lazy = managed()});
  };
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { refuse("moon"); }),
                  "The device map has 'moon', which is no device."));
  EXPECT_TRUE(has(message_of<UnsupportedError>([&] { refuse("xpu:1"); }),
                  "The device map has 'xpu:1'; weights can be on CPUs and NVIDIA GPUs only."));
  {
    const test::FakeGpu gpu({.major = 9, .minor = 0});
    EXPECT_EQ(message_of<ArgumentError>([&] { refuse(7); }),
              "The device map has GPU 7, and this machine has 1. GPUs count from 0.");
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "spill"));
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

TEST_F(Offload, AModelWithoutValuesIsRefused) {
  auto empty = init_empty_weights([] { return ThreeLayers(); });
  EXPECT_TRUE(has(message_of<StateError>([&] { (void)cpu_offload(empty, {.lazy = managed()}); }),
                  "'first.weight' has no value: it is on the meta device"));
  EXPECT_TRUE(has(message_of<StateError>([&] { (void)dispatch_model(empty, {{"", "cpu"}}); }),
                  "'first.weight' has no value: it is on the meta device"));
  const auto model = cpu_offload(empty, {.state_dict = state_dict(*resident), .lazy = managed()});
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(Offload, CpuOffloadTakesTheValuesOfItsStateDictAlsoWhereNothingMoves) {
  const auto values = state_dict(*tied_resident);
  tied_resident->eval();
  for (auto model : {init_empty_weights([] { return TiedNet(); }), TiedNet()}) {
    const auto offloaded = cpu_offload(model, {.offload_buffers = true, .state_dict = values});
    model->eval();
    EXPECT_TRUE(model->out->weight.is_same(model->embedding->weight)) << "still tied";
    EXPECT_TRUE(offloaded(tokens()).equal(tied_resident->forward(tokens())));
    EXPECT_FALSE(model->head->weight.is_alias_of(values["head.weight"])) << "a copy";
  }
}

TEST_F(Offload, ADispatchedModelDoesNotMove) {
  const auto model = cpu_offload(net, {.lazy = managed()});
  EXPECT_TRUE(has(message_of<StateError>([&] { model.to(torch::kCPU); }),
                  "You can't move a model that has some modules offloaded"));
  net->to(torch::kDouble);
  EXPECT_TRUE(has(message_of<StateError>([&] { (void)model(input()); }), "was moved"));
  EXPECT_THROW((void)cpu_offload(seeded<ThreeLayers>(), {.lazy = {.keep = 0}}), ConfigError);
}

TEST_F(Offload, ASecondOffloadIsRefused) {
  const auto model = cpu_offload(net, {.lazy = managed()});
  EXPECT_TRUE(has(message_of<StateError>([&] { (void)disk_offload(net, folder.path()); }),
                  "offloaded already"));
}

TEST_F(Offload, ACheckpointIsLoadedAndDispatched) {
  const auto checkpoint = folder.path() / "checkpoint";
  save_model(state_dict(*tied_resident), checkpoint);
  const auto expected = tied_resident->forward(tokens());
  for (const auto& choice :
       {DeviceMapChoice(DeviceMap{{"", "disk"}}), DeviceMapChoice(DeviceMap{{"", "cpu"}}),
        DeviceMapChoice("auto"), DeviceMapChoice("sequential"), DeviceMapChoice()}) {
    auto empty = init_empty_weights([] { return TiedNet(); });
    const auto model = load_checkpoint_and_dispatch(
        empty, checkpoint, {.device_map = choice, .offload_folder = folder.path() / "spill"});
    EXPECT_TRUE(model(tokens()).equal(expected)) << choice.index();
  }
}

TEST_F(Offload, WhatACheckpointLacksIsNotTakenFromTheFolder) {
  const auto spill = folder.path() / "spill";
  torch::manual_seed(11);
  offload_state_dict(spill, state_dict(*ThreeLayers()));  // of another model
  StateDict part("Tensor");
  for (const auto& item : state_dict(*resident)) {
    if (item.key() != "second.bias") part.insert(item.key(), item.value());
  }
  save_model(part, folder.path() / "checkpoint");
  const LoadDispatchOptions options{.device_map = DeviceMap{{"", "disk"}}, .offload_folder = spill};
  for (const auto& choice : {options.device_map, DeviceMapChoice()}) {
    auto empty = init_empty_weights([] { return ThreeLayers(); });
    EXPECT_TRUE(has(message_of<StateError>([&] {
                      (void)load_checkpoint_and_dispatch(
                          empty, folder.path() / "checkpoint",
                          {.device_map = choice, .offload_folder = spill});
                    }),
                    "has no second.bias, and the model no values for them"));
  }
  const test::CapturedLog log;
  const auto model = load_checkpoint_and_dispatch(net, folder.path() / "checkpoint", options);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_TRUE(has(log.messages().front(), "has no second.bias: they keep the values"));
  EXPECT_EQ(model.load_report().missing_keys, std::vector<std::string>{"second.bias"});
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(Offload, ALoadedModelIsSplitOverMemoryAndDiskByItsBudget) {
  const auto checkpoint = folder.path() / "checkpoint";
  save_model(state_dict(*tied_resident), checkpoint);
  auto empty = init_empty_weights([] { return TiedNet(); });
  const auto model = load_checkpoint_and_dispatch(empty, checkpoint,
                                                  {.device_map = "auto",
                                                   .max_memory = MaxMemory{{"cpu", 1200}},
                                                   .offload_folder = folder.path() / "spill"});
  bool disk = false;
  for (const auto& [name, device] : model.hf_device_map()) disk = disk || device.is_disk();
  EXPECT_TRUE(disk);
  EXPECT_TRUE(model(tokens()).equal(tied_resident->forward(tokens())));
}

TEST_F(Offload, AlignedModulesAreInMemory) {
  const auto model = cpu_offload(net, {.lazy = managed()});
  {
    const auto aligned = align_module_device(*net->second);
    EXPECT_EQ(net->second->weight.data_ptr<float>()[0],
              resident->second->weight.data_ptr<float>()[0]);
    model(input());
    EXPECT_NE(net->second->weight.data_ptr(), nullptr) << "no forward takes it away";
    EXPECT_THROW((void)net->first->weight.data_ptr(), c10::Error);
  }
  model.offload_now();
  EXPECT_THROW((void)net->second->weight.data_ptr(), c10::Error);
  {
    const auto aligned = align_module_device(*net->second, torch::Device(torch::kMeta));
    EXPECT_TRUE(net->second->weight.is_meta());
  }
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(Offload, OrdinaryModulesComeBackFromTheMetaDevice) {
  torch::Tensor graph;  // outlives the alignment, with gradient accumulators for the meta device
  {
    const auto aligned = align_module_device(*net->first, torch::Device(torch::kMeta));
    graph = net->first->forward(torch::empty({2, 6}, torch::kMeta));
    EXPECT_TRUE(graph.is_meta());
  }
  const auto result = net->forward(input());
  EXPECT_TRUE(result.equal(resident->forward(input())));
  result.sum().backward();
  resident->forward(input()).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().equal(resident->first->weight.grad()));

  auto empty = init_empty_weights([] { return ThreeLayers(); });
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    (void)align_module_device(*empty->first, torch::Device(torch::kCPU));
                  }),
                  "on the meta device, we need a value to put it on cpu"));
}

TEST_F(Offload, StateDictsReadTheStores) {
  const auto model = disk_offload(net, folder.path() / "spill");
  const auto fills = model.stats().fills;
  const auto values = get_state_dict_offloaded_model(*net);
  for (const auto& item : state_dict(*resident)) {
    EXPECT_TRUE(values[item.key()].equal(item.value())) << item.key();
  }
  StateDict some("Tensor");
  some.insert("second.bias", torch::empty({0}));
  EXPECT_EQ(&get_state_dict_from_offload(*net->second, "second.weight", some), &some);
  EXPECT_TRUE(some["second.bias"].equal(resident->second->bias));
  EXPECT_EQ(some.size(), 1U) << "no name is added, as in Python";
  EXPECT_EQ(model.stats().fills, fills) << "nothing was brought";
}

TEST_F(Offload, StateDictsOfOffloadedModelsKeepTies) {
  const auto model = cpu_offload(tied, {.lazy = managed()});
  const auto values = model.state_dict();
  EXPECT_TRUE(values["out.weight"].is_alias_of(values["embedding.weight"]));
  EXPECT_TRUE(values["out.weight"].equal(tied_resident->out->weight));
  EXPECT_FALSE(values["head.bias"].is_alias_of(values["head.weight"]));
  EXPECT_FALSE(clean_state_dict_for_safetensors(values).contains("out.weight"));
}

TEST_F(Offload, TheAcceleratorSavesOffloadedModels) {
  Accelerator accelerator({.cpu = true});
  const auto model = disk_offload(tied, folder.path() / "spill", {.offload_buffers = true});
  for (const bool safe : {true, false}) {
    const auto target = folder.path() / (safe ? "safe" : "archives");
    accelerator.save_model(tied, target, {.safe_serialization = safe});
    TiedNet loaded;
    load_checkpoint_in_model(*loaded, target, {.strict = true});
    for (const auto& item : state_dict(*tied_resident)) {
      EXPECT_TRUE(state_dict(*loaded)[item.key()].equal(item.value())) << item.key();
    }
  }
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
}

TEST_F(Offload, WeightsInFewerBitsAreSavedInThem) {
  Accelerator accelerator({.cpu = true});
  const auto casting = attach_layerwise_casting_hooks(*net, torch::kBFloat16, torch::kFloat);
  accelerator.save_model(net, folder.path());
  const auto saved = load_state_dict(folder.path() / "model.safetensors");
  EXPECT_TRUE(saved["first.weight"].equal(resident->first->weight.to(torch::kBFloat16)));
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
}

TEST_F(Offload, HandlesRestoreTheModelAtTheirEnd) {
  {
    const auto model = disk_offload(net, folder.path() / "spill");
    const auto copy = model;
    EXPECT_TRUE(is_offloaded(net->first->weight));
  }
  EXPECT_FALSE(is_offloaded(net->first->weight));
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  const Dispatched<ThreeLayers> none;
  EXPECT_THROW((void)none(input()), StateError);
}

// -- fewer bits -----------------------------------------------------------------------------------

TEST_F(Offload, LayerwiseCastingRoundsOnceAndComputesInTheOtherDtype) {
  for (const auto& parameter : tied_resident->block->parameters()) {
    parameter.set_data(parameter.detach().to(torch::kFloat8_e4m3fn).to(torch::kFloat));
  }
  for (const auto& parameter : tied_resident->head->parameters()) {
    parameter.set_data(parameter.detach().to(torch::kFloat8_e4m3fn).to(torch::kFloat));
  }
  auto casting = attach_layerwise_casting_hooks(*tied, torch::kFloat8_e4m3fn, torch::kFloat,
                                                {.skip_modules_pattern = {"^out$"}});
  EXPECT_EQ(casting.layers(),
            (std::vector<std::string>{"block.first", "block.second", "block.third", "head"}));
  EXPECT_EQ(storage_dtype(tied->head->weight), torch::kFloat8_e4m3fn);
  EXPECT_EQ(tied->head->weight.scalar_type(), torch::kFloat);
  EXPECT_EQ(storage_dtype(tied->embedding->weight), torch::kFloat);
  EXPECT_TRUE(tied->forward(tokens()).equal(tied_resident->forward(tokens())));
  casting.remove();
  EXPECT_NE(tied->head->weight.data_ptr(), nullptr);
  EXPECT_TRUE(tied->forward(tokens()).equal(tied_resident->forward(tokens())));
}

TEST_F(Offload, LayerwiseCastingOfOffloadedWeightsIsRefused) {
  const auto model = dispatch_model(net, {{"first", "cpu"}, {"second", "cpu"}, {"third", "disk"}},
                                    {.offload_dir = folder.path() / "spill"});
  EXPECT_TRUE(has(message_of<StateError>([&] {
                    (void)attach_layerwise_casting_hooks(*net, torch::kBFloat16, torch::kFloat);
                  }),
                  "The weights of 'third' are offloaded or cast already."));
  EXPECT_FALSE(is_offloaded(net->first->weight)) << "nothing was cast";
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(Offload, LayerwiseCastingSkipsClassesWithAllBelow) {
  const auto casting = attach_layerwise_casting_hooks(*tied, torch::kBFloat16, torch::kFloat,
                                                      {.skip_modules_classes = {"ThreeLayers"}});
  EXPECT_EQ(casting.layers(), (std::vector<std::string>{"head", "out"}));
}

}  // namespace
}  // namespace accelerate
