// What happens to weights at the edges: failures half way, weights in use, odd tensors.
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <accelerate/big_modeling.h>
#include <accelerate/checkpoint.h>
#include <accelerate/errors.h>
#include <accelerate/modeling.h>
#include <accelerate/safetensors.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/captured_log.h"
#include "lazy/trigger.h"
#include "offload/lazy_params.h"
#include "offload/managed_model.h"
#include "support/command.h"
#include "support/fake_gpu.h"
#include "support/has.h"
#include "support/message_of.h"

namespace accelerate::lazy_edges_test {
namespace {

namespace lazy = detail::lazy;
namespace offload = detail::offload;
using offload::LazyParams;
using test::has;
using test::in_host_memory;
using test::input;
using test::manage_by_module;
using test::message_of;
using test::seeded;
using test::ThreeLayers;

/// A GPU of which a test says whether it captures a graph.
class CapturingGpu final : public test::FakeGpu {
 public:
  CapturingGpu() : FakeGpu({9, 0}) {}
  bool is_capturing() const override { return true; }
};

/// The allocator of the process. From the time when it is told to, it gives as many blocks as
/// wanted of at least 512 bytes, which a slot of `ThreeLayers` has, and no more.
class FailingAllocator final : public c10::Allocator {
 public:
  static FailingAllocator& instance() {
    static auto& one = *new FailingAllocator;
    return one;
  }
  void fail_after(int count) { left_ = count; }
  void stop() { left_ = -1; }

  c10::DataPtr allocate(std::size_t bytes) override {
    const bool counts = bytes >= 512 && left_ >= 0;
    TORCH_CHECK_WITH(OutOfMemoryError, !counts || left_ > 0, "there is no memory for ", bytes);
    if (counts) --left_;
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  FailingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 100); }
  c10::Allocator* inner_;
  std::atomic<int> left_ = -1;
};

class LazyEdges : public testing::Test {
 protected:
  static LazyOptions managed() { return {.manage_on_cpu = true}; }

  test::Folder folder;
  ThreeLayers resident = seeded<ThreeLayers>();
  ThreeLayers net = seeded<ThreeLayers>();
};

// -- little memory --------------------------------------------------------------------------------

TEST_F(LazyEdges, MemoryForOneSlotIsEnough) {
  auto& allocator = FailingAllocator::instance();
  const auto expected = resident->forward(input());
  const auto x = input();
  const auto model = cpu_offload(net, {.lazy = managed()});
  allocator.fail_after(1);
  torch::Tensor result;
  EXPECT_NO_THROW(result = net->forward(x));
  std::string message;
  {
    const auto aligned = align_module_device(*net->third, std::nullopt);
    message = message_of<c10::OutOfMemoryError>([&] { (void)net->second->bias.neg(); });
  }
  allocator.stop();
  EXPECT_TRUE(has(message, "There is no memory for the parameter 'second.weight'"));
  EXPECT_TRUE(has(message, "there is no memory for 512"));
  EXPECT_TRUE(result.equal(expected));
  EXPECT_TRUE(net->forward(x).equal(expected)) << "as ever with more memory";
}

// -- the end of a handle --------------------------------------------------------------------------

TEST_F(LazyEdges, WeightsWhoseFilesAreGoneThrowByNameAfterTheHandle) {
  const test::CapturedLog log;
  {
    const auto model = disk_offload(net, folder / "spill");
    EXPECT_TRUE(model(input()).equal(resident->forward(input())));
    std::filesystem::remove_all(folder / "spill");
  }
  ASSERT_FALSE(log.messages().empty());
  EXPECT_TRUE(has(log.messages().front(), "could not be restored"));
  for (const auto& layer : {net->first, net->second, net->third}) {
    EXPECT_THROW((void)layer->weight.data_ptr(), c10::Error) << "no pointer to freed memory";
  }
  EXPECT_TRUE(has(message_of<c10::Error>([&] { net->forward(input()); }), "'first."));
}

TEST_F(LazyEdges, AModelOfTheMetaDeviceIsNotReadAtTheEndOfItsHandle) {
  offload_state_dict(folder / "spill", state_dict(*resident));
  auto empty = init_empty_weights([] { return ThreeLayers(); });
  const test::CapturedLog log;
  {
    const auto model = disk_offload(empty, folder / "spill", {.execution_device = torch::kCPU});
    EXPECT_TRUE(model(input()).equal(resident->forward(input())));
    std::filesystem::remove_all(folder / "spill");  // a read would fail
  }
  EXPECT_TRUE(log.messages().empty()) << log.messages().front();
  for (const auto& message :
       {message_of<c10::Error>([&] { (void)empty->first->weight.data_ptr(); }),
        message_of<c10::Error>([&] { empty->forward(input()); })}) {
    EXPECT_TRUE(has(message, "The parameter 'first."));
    EXPECT_TRUE(has(message, "the handle that its model was dispatched with has ended"));
  }
  // With its values elsewhere it can be dispatched again.
  const auto again = cpu_offload(empty, {.state_dict = state_dict(*resident), .lazy = managed()});
  EXPECT_TRUE(again(input()).equal(resident->forward(input())));
}

TEST_F(LazyEdges, ChangesOfAModelOfTheMetaDeviceAreInItsFilesAfterTheHandle) {
  offload_state_dict(folder / "spill", state_dict(*resident));
  auto empty = init_empty_weights([] { return ThreeLayers(); });
  {
    const auto model = disk_offload(empty, folder / "spill",
                                    {.execution_device = torch::kCPU, .lazy = {.writable = true}});
    const torch::NoGradGuard no_grad;
    empty->second->bias.fill_(3);
  }
  const OffloadedWeightsLoader weights({.save_folder = folder / "spill"});
  EXPECT_TRUE(weights.at("second.bias").equal(torch::full({8}, 3.0)));
}

TEST_F(LazyEdges, OneFailureLeavesNoOtherGroupBehind) {
  const test::CapturedLog log;
  {
    const auto model = dispatch_model(net, {{"first", "cpu"}, {"second", "cpu"}, {"third", "disk"}},
                                      {.offload_dir = folder / "spill", .lazy = managed()});
    const torch::NoGradGuard no_grad;
    net->first->weight.add_(1);
    resident->first->weight.add_(1);
    std::filesystem::remove_all(folder / "spill");
    EXPECT_THROW(model.remove_hooks(), CheckpointError);
    EXPECT_NE(net->first->weight.data_ptr(), nullptr);
    EXPECT_TRUE(net->first->weight.equal(resident->first->weight)) << "the only copy";
    EXPECT_TRUE(is_offloaded(net->third->weight));
    EXPECT_TRUE(has(message_of<CheckpointError>([&] { (void)model(input()); }), "third."));
  }
  EXPECT_TRUE(net->second->weight.equal(resident->second->weight));
  EXPECT_THROW((void)net->third->weight.data_ptr(), c10::Error);
}

TEST_F(LazyEdges, WeightsInUseAreNotRestoredBeforeThatEnds) {
  std::optional model = cpu_offload(net, {.lazy = managed()});
  std::optional<AlignedModule> aligned;
  aligned.emplace(*net->second, std::nullopt);
  EXPECT_TRUE(has(message_of<StateError>([&] { model->remove_hooks(); }),
                  "'second.weight' cannot be restored: it is in use"));
  EXPECT_TRUE(is_offloaded(net->first->weight)) << "nothing has changed";
  EXPECT_TRUE((*model)(input()).equal(resident->forward(input())));
  const auto* data = net->second->weight.data_ptr<float>();
  {
    const test::CapturedLog log;
    model.reset();
    ASSERT_EQ(log.messages().size(), 1U);
  }
  EXPECT_FALSE(is_offloaded(net->first->weight));
  EXPECT_EQ(net->second->weight.data_ptr<float>(), data) << "as long as it is aligned";
  EXPECT_EQ(data[0], resident->second->weight.data_ptr<float>()[0]);
  aligned.reset();
  EXPECT_FALSE(is_offloaded(net->second->weight));
  EXPECT_NE(net->second->weight.data_ptr(), nullptr);
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

TEST_F(LazyEdges, TheDeviceMapGoesWithTheHandleThatSetIt) {
  std::optional first = dispatch_model(net, {{"", "cpu"}});
  std::optional second = dispatch_model(net, {{"", "cpu"}});
  first.reset();
  EXPECT_TRUE(hf_device_map(*net)) << "of the second";
  second.reset();
  EXPECT_FALSE(hf_device_map(*net));
}

TEST_F(LazyEdges, AModelThatIsSpreadIsNotDispatchedAgain) {
  LazyParams engine{LazyOptions{}};
  engine.manage_resident({{"first.weight", net->first->weight}});
  EXPECT_TRUE(has(message_of<StateError>([&] { (void)cpu_offload(net, {.lazy = managed()}); }),
                  "dispatched or offloaded already"));
}

TEST_F(LazyEdges, AChangeAfterAStateDictWasTakenIsKept) {
  LazyParams engine{LazyOptions{}};
  manage_by_module(engine, *net, in_host_memory(*net));
  const auto weight = lazy::find_managed(net->first->weight);
  weight->pin(lazy::Access::kWrite);  // as an operator that has not written yet
  (void)offload::host_value(net->first->weight);
  net->first->weight.data_ptr<float>()[0] = 42;
  weight->unpin();
  engine.offload_now();
  EXPECT_EQ(offload::host_value(net->first->weight)[0][0].item<float>(), 42);
}

TEST_F(LazyEdges, WhatAGraphUsesStaysUntilTheEnd) {
  std::optional<LazyParams> engine(LazyOptions{.keep = 3});
  manage_by_module(*engine, *net, in_host_memory(*net));
  net->forward(input());
  {
    const CapturingGpu gpu;
    net->second->forward(torch::ones({1, 8}));
  }
  engine->offload_now();
  EXPECT_NE(net->second->weight.data_ptr(), nullptr) << "the graph has its address";
  EXPECT_THROW((void)net->first->weight.data_ptr(), c10::Error);
  engine->restore();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

// -- failures half way ----------------------------------------------------------------------------

TEST_F(LazyEdges, AnAlignmentThatFailsLeavesNothingPinned) {
  torch::nn::Linear layer(4, 4);
  LazyParams engine{LazyOptions{}};
  const test::Folder files;
  std::ofstream(files / "bias.dat") << std::string(16, '\0');
  engine.manage("weight", {{"weight", layer->weight}}, torch::kCPU, in_host_memory(*layer));
  engine.manage("bias", {{"bias", layer->bias}}, torch::kCPU, [&](const offload::GroupPlan& plan) {
    return offload::make_file_store(plan, {{"bias", {files / "bias.dat", 0, 16, torch::kFloat}}},
                                    {});
  });
  std::filesystem::remove(files / "bias.dat");
  EXPECT_THROW((void)align_module_device(*layer), CheckpointError);
  EXPECT_THROW((void)align_module_device(*layer, torch::Device(torch::kMeta)), CheckpointError);
  EXPECT_TRUE(layer->weight.is_cpu()) << "what was replaced is as before";
  engine.offload_now();
  EXPECT_THROW((void)layer->weight.data_ptr(), c10::Error) << "nothing is pinned";
  std::ofstream(files / "bias.dat") << std::string(16, '\0');
  engine.restore();
}

TEST_F(LazyEdges, AGroupThatCannotBeTakenOverIsLeftAsItWas) {
  const auto empty = torch::TensorOptions().device(torch::kMeta);
  const auto first = torch::empty({4}, empty);
  const auto second = torch::empty({4}, empty).requires_grad_();
  const auto graph = second.sum();  // keeps the accumulator of its gradient
  LazyParams engine{LazyOptions{}};
  offload::PinnedBudget budget;
  EXPECT_THROW(engine.manage("group", {{"first", first}, {"second", second}}, torch::kCPU,
                             [&](const offload::GroupPlan& plan) {
                               return offload::make_host_store(
                                   plan, [](const std::string&) { return torch::ones(4); }, budget);
                             }),
               StateError);
  EXPECT_TRUE(first.is_meta());
  EXPECT_FALSE(offload::is_offloaded(first));
  EXPECT_TRUE(engine.is_empty());
}

// -- odd tensors ----------------------------------------------------------------------------------

TEST_F(LazyEdges, TensorsOfOneBeginningAndOtherLengthsComeWhole) {
  const auto values = torch::arange(8, torch::kFloat);
  const auto whole = values.clone();
  const auto head = whole.narrow(0, 0, 3);
  offload_state_dict(folder.path(), [&] {
    StateDict state;
    state.insert("head", head);
    state.insert("whole", whole);
    return state;
  }());
  const offload::FileRanges ranges{{"head", {folder / "head.dat", 0, 12, torch::kFloat, true}},
                                   {"whole", {folder / "whole.dat", 0, 32, torch::kFloat, true}}};
  LazyParams engine{LazyOptions{}};
  engine.manage(
      "group", {{"head", head}, {"whole", whole}}, torch::kCPU,
      [&](const offload::GroupPlan& plan) { return offload::make_file_store(plan, ranges, {}); });
  EXPECT_TRUE((whole + 0).equal(values));
  EXPECT_TRUE((head + 0).equal(values.narrow(0, 0, 3)));
}

TEST_F(LazyEdges, ConjugatesAreWrittenAsTheyReadAndStayResident) {
  const auto value = torch::complex(torch::ones(2), torch::ones(2)).conj();
  ASSERT_TRUE(value.is_conj());
  EXPECT_FALSE(offload::can_be_managed(value));
  OffloadIndex index;
  offload_weight(value, "w", folder.path(), &index);
  EXPECT_TRUE(load_offloaded_weight(folder / "w.dat", *index.find("w")).equal(value));
}

/// Tensors that no group takes.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    turned = register_parameter("turned", torch::randn({3, 4}).t());
    none = register_parameter("none", torch::empty({0, 3}));
    cache = register_buffer("cache", torch::randn({3}).expand({2, 3}));
  }
  torch::Tensor turned, none, cache;
};
TORCH_MODULE(Odd);

// The meta device stands for a GPU.
TEST_F(LazyEdges, WhatCannotBeManagedMovesToWhereItComputes) {
  for (const bool by_hook : {false, true}) {
    Odd odd;
    const auto device = torch::Device(torch::kMeta);
    if (by_hook) {
      (void)cpu_offload_with_hook(odd, {.execution_device = device});
    } else {
      (void)cpu_offload(odd, {.execution_device = device});
    }
    EXPECT_TRUE(odd->turned.is_meta()) << by_hook;
    EXPECT_TRUE(odd->none.is_meta()) << by_hook;
    EXPECT_TRUE(odd->cache.is_meta()) << by_hook;
  }
}

TEST_F(LazyEdges, LayersWithoutElementsAndOfOneDtypeAreCast) {
  auto casting = attach_layerwise_casting_hooks(*net, torch::kFloat, torch::kFloat);
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  casting.remove();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  torch::nn::Sequential none(torch::nn::Linear(4, 0));
  const auto fewer = attach_layerwise_casting_hooks(*none, torch::kFloat8_e4m3fn, torch::kFloat);
  EXPECT_EQ(none->forward(torch::ones({2, 4})).sizes(), (std::vector<std::int64_t>{2, 0}));
}

TEST_F(LazyEdges, PackedSequencesKeepTheirStepsOnTheHost) {
  auto lstm = init_empty_weights([] { return torch::nn::LSTM(3, 4); });
  LazyParams engine{LazyOptions{}};
  std::vector<offload::NamedTensor> all;
  for (const auto& item : lstm->named_parameters()) all.push_back({item.key(), item.value()});
  engine.manage_resident(all);
  const auto packed =
      torch::nn::utils::rnn::pack_padded_sequence(torch::randn({5, 2, 3}), torch::tensor({5, 3}));
  const auto [output, state] = lstm->forward_with_packed_input(packed);
  EXPECT_TRUE(output.data().is_meta());
  EXPECT_TRUE(output.batch_sizes().is_cpu());
}

// -- other ways to run operators ------------------------------------------------------------------

TEST_F(LazyEdges, ScriptModulesBringTheWeights) {
  const auto model = cpu_offload(net, {.lazy = managed()});
  torch::jit::Module script("first");
  script.register_parameter("weight", net->first->weight, /*is_buffer=*/false);
  script.register_parameter("bias", net->first->bias, /*is_buffer=*/false);
  script.define(
      "def forward(self, x):\n  return torch.relu(x.matmul(self.weight.t()) + self.bias)\n");
  const auto expected =
      torch::relu(input().matmul(resident->first->weight.t()) + resident->first->bias);
  expected.sum().backward();
  for (int run = 0; run < 3; ++run) {  // profiled first, then optimized
    model.offload_now();
    net->zero_grad();
    const auto result = script.forward({input()}).toTensor();
    EXPECT_TRUE(result.equal(expected)) << run;
    model.offload_now();
    result.sum().backward();
    EXPECT_TRUE(net->first->weight.grad().equal(resident->first->weight.grad())) << run;
  }
}

TEST_F(LazyEdges, VmapBringsTheWeights) {
  namespace functorch = at::functorch;
  const auto model = cpu_offload(net, {.lazy = managed()});
  const auto rows = torch::stack({input(), 2 * input()});
  const auto over_rows = [&](ThreeLayers& layers) {
    const auto level = functorch::initAndPushDynamicLayer(
        functorch::TransformType::Vmap, c10::SymInt(2), functorch::RandomnessType::Error);
    const auto result = layers->forward(functorch::makeBatched(rows, 0, level));
    const auto value = functorch::maybeGetBatchedImpl(result)->value();
    functorch::popDynamicLayerAndDeleteMetadata();
    return value;
  };
  model.offload_now();
  EXPECT_TRUE(over_rows(net).equal(over_rows(resident)));
}

TEST_F(LazyEdges, OpaqueTensorsStayResident) {
  if (!at::hasMKLDNN()) GTEST_SKIP() << "this LibTorch has no tensors of oneDNN";
  net->register_buffer("opaque", torch::ones({4}).to_mkldnn());
  const auto model = cpu_offload(net, {.offload_buffers = true, .lazy = managed()});
  EXPECT_FALSE(is_offloaded(net->named_buffers()["opaque"]));
  EXPECT_TRUE(is_offloaded(net->first->weight));
  EXPECT_EQ(net->named_buffers()["opaque"].to_dense().sum().item<float>(), 4);
}

// -- checkpoints ----------------------------------------------------------------------------------

TEST_F(LazyEdges, FilesAreReadIntoOffloadedTensors) {
  safetensors::save_file(state_dict(*resident), folder / "model.safetensors");
  torch::manual_seed(9);
  net = ThreeLayers();
  const auto model = cpu_offload(net, {.lazy = managed()});
  model(input());  // some are in memory now, others not
  load_checkpoint_in_model(*net, folder / "model.safetensors");
  model.offload_now();
  EXPECT_TRUE(model(input()).equal(resident->forward(input())));
}

TEST_F(LazyEdges, OptionsThatOverflowAreRefused) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(LazyParams({.keep = kMost}), ConfigError);
  EXPECT_THROW(LazyParams({.prefetch_depth = kMost}), ConfigError);
}

}  // namespace
}  // namespace accelerate::lazy_edges_test
