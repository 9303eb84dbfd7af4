// The engine by itself: when weights come, when they go, and what happens if they cannot come.
#include "offload/lazy_params.h"

#include <accelerate/big_modeling/empty_weights.h>
#include <accelerate/environment.h>
#include <accelerate/errors.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/autocast_mode.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/captured_log.h"
#include "lazy/trigger.h"
#include "offload/managed_model.h"
#include "support/command.h"
#include "support/fake_gpu.h"
#include "support/has.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
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

/// What a store of the test does before it fills.
class WatchedStore final : public offload::Store {
 public:
  WatchedStore(std::unique_ptr<offload::Store> inner, std::function<void()> before, bool slow)
      : inner_(std::move(inner)), before_(std::move(before)), slow_(slow) {}
  bool is_slow() const override { return slow_; }
  void fill(const at::Tensor& memory) override {
    before_();
    inner_->fill(memory);
  }
  void write_back(std::size_t storage, const at::Tensor& bytes) override {
    inner_->write_back(storage, bytes);
  }
  at::Tensor bytes(std::size_t storage) const override { return inner_->bytes(storage); }

 private:
  std::unique_ptr<offload::Store> inner_;
  std::function<void()> before_;
  bool slow_;
};

offload::MakeStore watched(torch::nn::Module& net, const std::function<void(std::string)>& before,
                           bool slow) {
  return [=, &net](const offload::GroupPlan& plan) {
    return std::make_unique<WatchedStore>(
        in_host_memory(net)(plan), [=, name = plan.name] { before(name); }, slow);
  };
}

class LazyWeights : public testing::Test {
 protected:
  void manage(const LazyOptions& options = {}) {
    engine.emplace(options);
    manage_by_module(*engine, *net, in_host_memory(*net));
  }

  ThreeLayers resident = seeded<ThreeLayers>();
  ThreeLayers net = seeded<ThreeLayers>();
  std::optional<LazyParams> engine;
};

TEST_F(LazyWeights, ForwardAndGradientsHaveTheBitsOfTheResidentModel) {
  manage();
  for (int pass = 0; pass < 3; ++pass) {
    const auto expected = resident->forward(input());
    const auto result = net->forward(input());
    EXPECT_TRUE(result.equal(expected));
    engine->offload_now();  // between forward and backward
    expected.pow(2).sum().backward();
    result.pow(2).sum().backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(net->parameters()[i].grad().equal(resident->parameters()[i].grad())) << i;
    }
  }
}

TEST_F(LazyWeights, AnEmptyStorageThrowsByNameForRawPointersAndKeepsItsMetadata) {
  manage();
  EXPECT_EQ(net->first->weight.sizes(), (std::vector<std::int64_t>{8, 6}));
  EXPECT_EQ(net->first->weight.t().sizes(), (std::vector<std::int64_t>{6, 8}));
  const auto message = message_of<c10::Error>([&] { (void)net->first->weight.data_ptr(); });
  EXPECT_TRUE(has(message, "'first.weight' is offloaded"));
  EXPECT_TRUE(has(message, "align_module_device"));
  EXPECT_TRUE(has(message_of<c10::Error>([&] { (void)net->first->bias.data_ptr<float>(); }),
                  "'first.bias' is offloaded"));
}

TEST_F(LazyWeights, AnyOperatorOutsideOfForwardBringsThem) {
  manage();
  EXPECT_TRUE(net->second->weight.norm().equal(resident->second->weight.norm()));
  EXPECT_TRUE(net->third->weight.t()[0].sum().equal(resident->third->weight.t()[0].sum()));
  std::ostringstream text;
  std::ostringstream expected;
  text << net->first->bias;
  expected << resident->first->bias;
  EXPECT_EQ(text.str(), expected.str());
  EXPECT_TRUE(torch::cat({net->first->bias, net->second->bias, net->third->bias})
                  .equal(torch::cat(
                      {resident->first->bias, resident->second->bias, resident->third->bias})));
}

TEST_F(LazyWeights, FillAndReleaseLeaveVersionsAlone) {
  const auto version = net->first->weight._version();
  manage();
  net->forward(input());
  engine->offload_now();
  net->forward(input());
  EXPECT_EQ(net->first->weight._version(), version);
}

TEST_F(LazyWeights, TheOrderOfTheFirstPassIsBroughtAheadAlsoAcrossTheTurn) {
  manage();
  const auto step = [&] { net->forward(input()).sum().backward(); };
  step();
  step();
  const auto before = engine->stats();
  step();
  const auto after = engine->stats();
  // Forward 1 2 3, backward 2 (3 is still there; 1 needs no gradient of its input).
  EXPECT_EQ(after.fills - before.fills, after.prefetch_hits - before.prefetch_hits);
  EXPECT_GT(after.prefetch_hits, before.prefetch_hits);
  EXPECT_GT(after.hits, before.hits);
}

TEST_F(LazyWeights, NoMoreThanTheRingIsResident) {
  manage({.prefetch_depth = 1, .keep = 1});
  net->forward(input());
  const auto stats = engine->stats();
  const std::int64_t largest = 512;  // 8 x 8 weights and 8 biases, at multiples of 256 bytes
  EXPECT_EQ(stats.peak_resident_bytes, 2 * largest);
  EXPECT_EQ(stats.managed_bytes, 3 * largest);
  engine->offload_now();
  EXPECT_EQ(engine->stats().resident_bytes, 0);
}

TEST_F(LazyWeights, ABudgetBelowTheRingBringsLessAhead) {
  manage({.prefetch_depth = 3, .max_resident_bytes = "600KB"});
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  engine.reset();
  net = seeded<ThreeLayers>();
  manage({.prefetch_depth = 3, .max_resident_bytes = std::int64_t{600}});
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  EXPECT_EQ(engine->stats().peak_resident_bytes, 512);
  EXPECT_EQ(engine->stats().prefetch_hits, 0);
}

TEST_F(LazyWeights, InPlaceUpdatesAreWrittenBack) {
  manage();
  torch::optim::SGD ours(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD theirs(resident->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    net->forward(input()).pow(2).sum().backward();
    resident->forward(input()).pow(2).sum().backward();
    ours.step();
    theirs.step();
    engine->offload_now();
  }
  EXPECT_GT(engine->stats().writebacks, 0);
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(offload::host_value(net->parameters()[i]).equal(resident->parameters()[i])) << i;
  }
}

TEST_F(LazyWeights, OperatorsOnListsBringAndChangeAllOfThem) {
  manage();
  const torch::NoGradGuard no_grad;
  at::_foreach_mul_(net->parameters(), 2.0);
  at::_foreach_mul_(resident->parameters(), 2.0);
  engine->offload_now();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

TEST_F(LazyWeights, InitialisingThemInPlaceWorks) {
  manage();
  torch::nn::init::zeros_(net->first->weight);
  engine->offload_now();
  EXPECT_EQ(net->first->weight.abs().sum().item<float>(), 0);
}

TEST_F(LazyWeights, TiedWeightsAreOneStorageThatIsFilledOnce) {
  struct Tied : torch::nn::Module {
    Tied() : embedding(10, 4), head(4, 10) {
      register_module("embedding", embedding);
      register_module("head", head);
      head->weight.set_data(embedding->weight);  // another tensor, the same storage
      again = register_parameter("again", embedding->weight);
    }
    torch::Tensor forward(const torch::Tensor& x) { return head->forward(embedding->forward(x)); }
    torch::nn::Embedding embedding;
    torch::nn::Linear head;
    torch::Tensor again;
  };
  const auto plain = [] {
    torch::manual_seed(1);
    return std::make_shared<Tied>();
  };
  const auto expected = plain();
  const auto tied = plain();
  engine.emplace(LazyOptions{});
  std::vector<offload::NamedTensor> all;
  for (const auto& item : tied->named_parameters()) all.push_back({item.key(), item.value()});
  engine->manage("all", all, torch::kCPU, in_host_memory(*tied));
  EXPECT_EQ(engine->stats().managed_bytes, 256 + 256) << "one weight of 160 bytes and a bias";
  const auto x = torch::arange(10);
  EXPECT_TRUE(tied->forward(x).equal(expected->forward(x)));
  EXPECT_EQ(engine->stats().fills, 1);
  const torch::NoGradGuard no_grad;
  tied->again.add_(1);
  expected->again.add_(1);
  engine->offload_now();
  EXPECT_TRUE(tied->forward(x).equal(expected->forward(x)));
}

TEST_F(LazyWeights, AFailedFillComesOutOfTheOperatorUntilReset) {
  bool fails = true;
  engine.emplace(LazyOptions{});
  manage_by_module(*engine, *net,
                   watched(
                       *net,
                       [&](const std::string& name) {
                         if (fails && name == "second")
                           throw std::runtime_error("the cable is out");
                       },
                       /*slow=*/false));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto message = message_of<StateError>([&] { net->forward(input()); });
    EXPECT_TRUE(has(message, "'second.weight'"));
    EXPECT_TRUE(has(message, "the cable is out"));
  }
  fails = false;
  EXPECT_THROW(net->forward(input()), StateError) << "a failure is final until reset()";
  engine->reset();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

TEST_F(LazyWeights, AFailedFillInBackwardReachesTheCaller) {
  bool fails = false;
  engine.emplace(LazyOptions{.prefetch_depth = 0});
  manage_by_module(*engine, *net,
                   watched(
                       *net,
                       [&](const std::string&) {
                         if (fails) throw CheckpointError("'w.dat' is gone");
                       },
                       /*slow=*/true));
  const auto loss = net->forward(input()).sum();
  engine->offload_now();
  fails = true;
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { loss.backward(); }), "'w.dat' is gone"));
  engine.reset();
}

TEST_F(LazyWeights, ASlowFillEndsWithTheTimeLimitAndIsThereLater) {
  const auto patched = patch_environment({{"ACCELERATE_OFFLOAD_TIMEOUT", "1"}});
  std::atomic<bool> hangs = true;
  engine.emplace(LazyOptions{});
  manage_by_module(*engine, *net,
                   watched(
                       *net,
                       [&](const std::string& name) {
                         while (hangs && name == "first") std::this_thread::sleep_for(1ms);
                       },
                       /*slow=*/true));
  const auto message = message_of<StateError>([&] { net->forward(input()); });
  EXPECT_TRUE(has(message, "'first.weight' was not brought to its device within 1 s"));
  EXPECT_TRUE(has(message, "ACCELERATE_OFFLOAD_TIMEOUT"));
  hangs = false;
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  engine.reset();
}

TEST_F(LazyWeights, SlowStoresAreReadAheadByAThreadOfTheEngine) {
  engine.emplace(LazyOptions{});
  const auto caller = std::this_thread::get_id();
  std::atomic<int> by_caller = 0;
  manage_by_module(*engine, *net,
                   watched(
                       *net,
                       [&](const std::string&) {
                         if (std::this_thread::get_id() == caller) ++by_caller;
                       },
                       /*slow=*/true));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  }
  EXPECT_EQ(by_caller, 0);
  EXPECT_GT(engine->stats().prefetch_hits, 0);
  engine.reset();  // its thread may still read ahead
}

TEST_F(LazyWeights, SeveralThreadsRunOneModel) {
  for (const bool slow : {false, true}) {
    net = seeded<ThreeLayers>();
    engine.emplace(LazyOptions{});
    manage_by_module(*engine, *net, watched(*net, [](const std::string&) {}, slow));
    const auto expected = resident->forward(input()).detach();
    const auto x = input();
    std::vector<std::future<bool>> runs;
    for (int i = 0; i < 4; ++i) {
      runs.push_back(std::async(std::launch::async, [&] {
        const torch::NoGradGuard no_grad;
        bool equal = true;
        for (int pass = 0; pass < 50; ++pass) equal = equal && net->forward(x).equal(expected);
        return equal;
      }));
    }
    for (auto& run : runs) EXPECT_TRUE(run.get());
    engine.reset();
  }
}

TEST_F(LazyWeights, TwoModelsDoNotDisturbEachOther) {
  manage();
  torch::manual_seed(8);
  ThreeLayers other;
  const auto expected = other->forward(input());
  LazyParams second{LazyOptions{}};
  manage_by_module(second, *other, in_host_memory(*other));
  EXPECT_TRUE((net->forward(input()) + other->forward(input()))
                  .equal(resident->forward(input()) + expected));
}

TEST_F(LazyWeights, AutocastKeepsNoCopiesOfThem) {
  manage();
  const auto run = [](ThreeLayers& model) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const auto result = model->forward(input());
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return result;
  };
  EXPECT_TRUE(run(net).equal(run(resident)));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled()) << "as it was before";
  // A cached copy would hide the change.
  const torch::NoGradGuard no_grad;
  net->first->weight.mul_(2);
  resident->first->weight.mul_(2);
  at::autocast::clear_cache();
  EXPECT_TRUE(run(net).equal(run(resident)));
}

TEST_F(LazyWeights, InferenceModeWorks) {
  manage();
  const auto expected = resident->forward(input());
  for (int i = 0; i < 2; ++i) {
    const c10::InferenceMode inference;
    EXPECT_TRUE(net->forward(input()).equal(expected));
  }
  EXPECT_TRUE(net->forward(input()).equal(expected));
  net->forward(input()).sum().backward();
}

TEST_F(LazyWeights, WhatHasNoDenseStorageStaysResident) {
  engine.emplace(LazyOptions{});
  const auto sparse = torch::eye(3).to_sparse();
  const auto turned = torch::randn({3, 4}).t();
  engine->manage("odd", {{"sparse", sparse}, {"turned", turned}, {"none", {}}}, torch::kCPU,
                 in_host_memory(*net));
  EXPECT_TRUE(engine->is_empty());
  EXPECT_FALSE(offload::is_offloaded(turned));
}

TEST_F(LazyWeights, ParametersOnTheMetaDeviceGetAStorageBeforeTheyAreUsed) {
  auto values = seeded<ThreeLayers>();
  net = init_empty_weights([] { return ThreeLayers(); });
  const auto weight = net->first->weight;  // the handle of a user's class
  engine.emplace(LazyOptions{});
  manage_by_module(*engine, *net, in_host_memory(*values));
  EXPECT_TRUE(weight.is_cpu());
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  net->forward(input()).sum().backward();
  engine->restore();
  EXPECT_TRUE(weight.equal(resident->first->weight)) << "from the meta device to the CPU";
}

TEST_F(LazyWeights, ClonesAreOrdinaryCopies) {
  manage();
  const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->first->clone());
  engine->offload_now();
  EXPECT_NE(copy->weight.data_ptr(), nullptr);
  EXPECT_TRUE(copy->forward(input()).equal(resident->first->forward(input())));
  EXPECT_NE(net->first->weight.clone().data_ptr(), nullptr);
}

TEST_F(LazyWeights, GradientsAreOrdinaryTensors) {
  manage();
  net->forward(input()).sum().backward();
  EXPECT_NE(net->first->weight.grad().data_ptr(), nullptr);
  EXPECT_FALSE(offload::is_offloaded(net->first->weight.grad()));
}

TEST_F(LazyWeights, AParameterThatGotOtherDataIsReported) {
  manage();
  EXPECT_NO_THROW(engine->check_not_moved());
  net->second->to(torch::kDouble);
  const auto message = message_of<StateError>([&] { engine->check_not_moved(); });
  EXPECT_TRUE(has(message, "'second.weight' was moved"));
  EXPECT_TRUE(has(message, "remove_hooks()"));
  engine.reset();
  EXPECT_EQ(net->second->weight.scalar_type(), torch::kDouble) << "what the user gave stays";
  EXPECT_TRUE(net->second->weight.equal(resident->second->weight.to(torch::kDouble)));
}

TEST_F(LazyWeights, TheEndOfTheEngineRestoresTheModel) {
  manage();
  const torch::NoGradGuard no_grad;
  net->first->weight.add_(1);
  resident->first->weight.add_(1);
  const auto view = net->first->weight.t();
  engine.reset();
  EXPECT_NE(net->first->weight.data_ptr(), nullptr);
  EXPECT_FALSE(offload::is_offloaded(net->first->weight));
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  EXPECT_TRUE(view.equal(resident->first->weight.t())) << "a view with the mark that outlives it";
}

TEST_F(LazyWeights, AModelThatIsGoneIsNotRestored) {
  int fills = 0;
  engine.emplace(LazyOptions{});
  manage_by_module(*engine, *net,
                   watched(*net, [&](const std::string&) { ++fills; }, /*slow=*/false));
  const auto storage = net->first->weight.storage();
  net = nullptr;
  engine.reset();
  EXPECT_EQ(fills, 0);
  EXPECT_THROW((void)storage.data(), c10::Error) << "no bytes, no garbage";
}

TEST_F(LazyWeights, AnOperatorThatWaitsWhileTheModelIsGivenBackThrows) {
  for (const bool end : {false, true}) {
    manage();
    const auto weight = lazy::find_managed(net->first->weight);  // as the operator finds it
    end ? engine.reset() : engine->restore();
    EXPECT_TRUE(has(message_of<StateError>([&] { weight->pin(lazy::Access::kRead); }),
                    "The weights of this model were given back while an operator waited for them: "
                    "'first.weight'"));
    EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  }
}

TEST_F(LazyWeights, AModelIsGivenBackWhileAnotherThreadRunsIt) {
  const auto x = input();
  const auto expected = resident->forward(x);
  for (int round = 0; round < 100; ++round) {
    engine.emplace(LazyOptions{});
    manage_by_module(
        *engine, *net,
        watched(
            *net, [](const std::string&) { std::this_thread::sleep_for(100us); }, /*slow=*/true));
    std::atomic<int> passes = 0;
    auto other = std::async(std::launch::async, [&] {
      try {
        for (; passes < 20; ++passes) EXPECT_TRUE(net->forward(x).equal(expected));
      } catch (const StateError& error) {
        EXPECT_TRUE(has(error.what(), "given back") ||
                    has(error.what(), "handle of its model has ended"));
      }
    });
    while (passes < round % 4) std::this_thread::yield();
    if (round % 2 == 0) {
      try {
        engine->restore();
      } catch (const StateError&) {  // in use: the end of the engine gives it back
      }
    }
    {
      const test::CapturedLog log;  // of what was in use
      engine.reset();
    }
    other.get();
    EXPECT_FALSE(offload::is_offloaded(net->third->weight));
    EXPECT_TRUE(net->forward(x).equal(expected));
  }
}

TEST_F(LazyWeights, NothingIsBroughtWhileAGraphIsCaptured) {
  class Capturing final : public test::FakeGpu {
   public:
    Capturing() : FakeGpu({9, 0}) {}
    bool is_capturing() const override { return true; }
  };
  manage();
  {
    const Capturing gpu;
    EXPECT_TRUE(has(message_of<StateError>([&] { net->forward(input()); }), "being captured"));
  }
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

TEST_F(LazyWeights, OptionsThatMakeNoSenseAreRefused) {
  EXPECT_THROW(LazyParams({.prefetch_depth = -1}), ConfigError);
  EXPECT_THROW(LazyParams({.keep = 0}), ConfigError);
  EXPECT_THROW(LazyParams({.max_resident_bytes = "much"}), ArgumentError);
}

// -- files ----------------------------------------------------------------------------------------

class LazyFiles : public LazyWeights {
 protected:
  void TearDown() override { engine.reset(); }  // while the files are there

  void write(torch::nn::Module& model) {
    for (const auto& item : model.named_parameters()) {
      const auto value = item.value().detach().contiguous();
      const std::filesystem::path path = folder / (item.key() + ".dat");
      std::ofstream(path, std::ios::binary)
          .write(static_cast<const char*>(value.data_ptr()),
                 static_cast<std::streamsize>(value.nbytes()));
      ranges[item.key()] = {path, 0, static_cast<std::int64_t>(value.nbytes()), value.scalar_type(),
                            true};
    }
  }
  void manage_files(const offload::FileStoreOptions& options = {}) {
    engine.emplace(LazyOptions{});
    manage_by_module(*engine, *net, [=, this](const offload::GroupPlan& plan) {
      return offload::make_file_store(plan, ranges, options);
    });
  }

  test::Folder folder;
  offload::FileRanges ranges;
};

TEST_F(LazyFiles, OnTheCpuTheyAreMappedWithoutACopy) {
  write(*net);
  manage_files();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  net->forward(input()).sum().backward();
  const auto weight = lazy::find_managed(net->first->weight);
  weight->pin(lazy::Access::kRead);
  std::ifstream maps("/proc/self/maps");
  const std::string text(std::istreambuf_iterator<char>(maps), {});
  EXPECT_TRUE(has(text, "first.weight.dat"));
  weight->unpin();
  engine->offload_now();
  std::ifstream after("/proc/self/maps");
  const std::string rest(std::istreambuf_iterator<char>(after), {});
  EXPECT_FALSE(has(rest, "first.weight.dat")) << "released is unmapped";
}

TEST_F(LazyFiles, OtherDtypesAndSharedFilesAreRead) {
  // All tensors one behind the other in one file, in double precision, at odd offsets.
  const std::filesystem::path path = folder / "all.bin";
  std::ofstream file(path, std::ios::binary);
  file << "x";
  std::int64_t offset = 1;
  for (const auto& item : net->named_parameters()) {
    const auto value = item.value().detach().to(torch::kDouble);
    file.write(static_cast<const char*>(value.data_ptr()),
               static_cast<std::streamsize>(value.nbytes()));
    ranges[item.key()] = {path, offset, static_cast<std::int64_t>(value.nbytes()), torch::kDouble};
    offset += static_cast<std::int64_t>(value.nbytes());
  }
  file.close();
  manage_files();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  EXPECT_TRUE(offload::host_value(net->third->bias).equal(resident->third->bias));
}

TEST_F(LazyFiles, AreReadOnlyUnlessWritable) {
  write(*net);
  manage_files();
  const torch::NoGradGuard no_grad;
  const auto message = message_of<StateError>([&] { net->first->weight.add_(1); });
  EXPECT_TRUE(has(message, "'first.weight' is on disk and cannot be changed"));
  EXPECT_TRUE(has(message, "LazyOptions::writable"));
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

TEST_F(LazyFiles, WritableOnesAreChanged) {
  write(*net);
  manage_files({.writable = true});
  torch::optim::SGD ours(net->parameters(), 0.1);
  torch::optim::SGD theirs(resident->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    net->forward(input()).pow(2).sum().backward();
    resident->forward(input()).pow(2).sum().backward();
    ours.step();
    theirs.step();
  }
  engine->offload_now();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
  std::ifstream file(folder / "second.bias.dat", std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(torch::from_blob(bytes.data(), {8}).equal(resident->second->bias));
}

TEST_F(LazyFiles, AFileThatIsGoneOrCutIsNamed) {
  write(*net);
  manage_files();
  std::filesystem::resize_file(folder / "second.weight.dat", 100);
  const auto cut = message_of<CheckpointError>([&] { net->forward(input()); });
  EXPECT_TRUE(has(cut, "'second.weight'"));
  EXPECT_TRUE(has(cut, "256 bytes at offset 0 of"));
  EXPECT_TRUE(has(cut, "second.weight.dat"));
  EXPECT_TRUE(has(cut, "The file has 100 bytes; 256 are expected"));
  EXPECT_THROW((void)net->second->weight.data_ptr(), std::exception);
  write(*resident);
  engine->reset();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));

  std::filesystem::remove(folder / "second.weight.dat");
  const auto gone = message_of<CheckpointError>([&] { net->forward(input()); });
  EXPECT_TRUE(has(gone, "second.weight.dat"));
  EXPECT_TRUE(has(gone, "No such file"));
  write(*resident);
}

TEST_F(LazyFiles, AFolderOfAnotherModelIsRefusedBeforeAnythingChanges) {
  write(*net);
  ranges.erase("third.bias");
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { manage_files(); }),
                  "'third.bias' is not in the index of the offload folder"));
  engine.reset();
  write(*net);
  ranges["first.bias"].bytes = 16;
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { manage_files(); }),
                  "The model expects 8 elements of float32"));
  engine.reset();
  EXPECT_TRUE(net->forward(input()).equal(resident->forward(input())));
}

// -- several devices ------------------------------------------------------------------------------

// The meta device stands for a second GPU: activations follow the weights.
TEST(LazyDevices, ArgumentsMoveToTheDeviceOfTheWeights) {
  ThreeLayers net;
  net->second =
      net->replace_module("second", init_empty_weights([] { return torch::nn::Linear(8, 8); }));
  LazyParams engine{LazyOptions{}};
  std::vector<offload::NamedTensor> all;
  for (const auto& item : net->named_parameters()) all.push_back({item.key(), item.value()});
  engine.manage_resident(all);
  const auto hidden = torch::randn({5, 8});
  EXPECT_TRUE(net->second->forward(hidden).is_meta());
  EXPECT_TRUE(net->first->forward(torch::randn({5, 6})).is_cpu());
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    auto out = torch::empty({5, 8});
                    at::mm_out(out, hidden, net->second->weight);
                  }),
                  "writes to a tensor on cpu, but the weights that it uses are on meta"));
  // A residual connection across the cut: no weight among the arguments.
  const lazy::OneDevicePerOperator scope;
  const auto after = net->second->forward(hidden);
  EXPECT_TRUE((hidden + after).is_meta());
}

}  // namespace
}  // namespace accelerate
