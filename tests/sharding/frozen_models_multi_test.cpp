// Models, and parts of them, that get no gradients.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "parallel/engine.h"
#include "sharding/sharded_nets.h"
#include "support/on_processes.h"

namespace accelerate::frozen_models_test {
namespace {

using test::anew;
using test::Mlp;
using test::TinyGpt;
using Plugin = FullyShardedDataParallelPlugin;

TinyGpt frozen_net() {
  torch::manual_seed(3);
  TinyGpt net;
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  return net;
}

AcceleratorOptions with_plugin(const Plugin& plugin) { return anew({.fsdp_plugin = plugin}); }

torch::Tensor words() { return torch::arange(8).reshape({2, 4}); }

TEST(FrozenModels, AreShardedAndComputeTheSame) {
  on_processes(2, [] {
    const auto wanted = frozen_net()->forward(words());
    const DeepSpeedPlugin stage_3{
        .hf_ds_config =
            Value::Dict{{"train_micro_batch_size_per_gpu", 4},
                        {"zero_optimization",
                         Value::Dict{{"stage", 3}, {"stage3_param_persistence_threshold", 0}}}}};
    for (const auto& options :
         {with_plugin({.fsdp_version = 1}), with_plugin({.fsdp_version = 2}),
          AcceleratorOptions{.cpu = true, .deepspeed_plugin = stage_3},
          AcceleratorOptions{.cpu = true,
                             .parallelism_config = ParallelismConfig{.dp_shard_size = 2}}}) {
      AcceleratorState::_reset_state();
      Accelerator accelerator(options);
      auto net = frozen_net();
      const auto model = accelerator.prepare(net);
      ASSERT_NE(model._core()->engine, nullptr);
      EXPECT_TRUE(model._core()->engine->is_sharded());
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(model(words()).equal(wanted));
      EXPECT_TRUE(model(words()).equal(wanted));
    }
  });
}

TEST(FrozenModels, NeedTheirWeightsOnTheFirstProcessOnly) {
  on_processes(2, [] {
    Accelerator accelerator(with_plugin({.fsdp_version = 2, .cpu_ram_efficient_loading = true}));
    const auto wanted = frozen_net()->forward(words());
    std::optional<InitOnDeviceScope> empty;
    if (!accelerator.is_main_process()) empty.emplace(c10::kMeta);
    auto net = frozen_net();
    empty.reset();
    const auto model = accelerator.prepare(net);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(model(words()).equal(wanted));
  });
}

TEST(FrozenModels, TeachStudentsWhoseGradientsPassThroughThem) {
  on_processes(2, [] {
    const auto train = [](const std::optional<Plugin>& plugin) {
      Accelerator accelerator(anew({.fsdp_plugin = plugin}));
      torch::manual_seed(5);
      Mlp student(3, 4), teacher(4, 2);
      for (auto& parameter : teacher->parameters()) parameter.set_requires_grad(false);
      auto [model, judge, optimizer] =
          accelerator.prepare(student, teacher, SGD(student->parameters(), {.lr = 0.5}));
      for (int step = 0; step < 3; ++step) {
        const auto x = test::input_of(accelerator.process_index(), step);
        accelerator.backward(judge(model(x)).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      return gathered_parameters(model, {},
                                 [&] { return student->first->weight.detach().clone(); });
    };
    const auto wanted = train(std::nullopt);
    EXPECT_TRUE(train(Plugin{.fsdp_version = 2}).allclose(wanted, 1e-6, 1e-7));
  });
}

TEST(UnusedParameters, KeepTheirValuesUnderWeightDecayAsWithDataParallelism) {
  on_processes(2, [] {
    const auto train = [](const AcceleratorOptions& options) {
      Accelerator accelerator(options);
      torch::manual_seed(3);
      TinyGpt net;
      net->skipped = {1};
      auto [model, optimizer] =
          accelerator.prepare(net, AdamW(net->parameters(), {.lr = 0.1, .weight_decay = 0.5}));
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(model(words()).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      return gathered_parameters(model, {}, [&] {
        const auto weight = [&](std::size_t block) {
          return net->blocks->ptr(block)->as<test::Block>()->up->weight.detach().clone();
        };
        return std::pair(weight(0), weight(1));
      });
    };
    const auto [used, unused] = train(test::averaging({.find_unused_parameters = true}));
    torch::manual_seed(3);
    EXPECT_TRUE(unused.equal(TinyGpt()->blocks->ptr(1)->as<test::Block>()->up->weight));
    for (const auto& options :
         {with_plugin({.fsdp_version = 2}),
          AcceleratorOptions{.cpu = true,
                             .parallelism_config = ParallelismConfig{.dp_shard_size = 2}}}) {
      AcceleratorState::_reset_state();
      const auto [sharded_used, sharded_unused] = train(options);
      EXPECT_TRUE(sharded_used.equal(used));
      EXPECT_TRUE(sharded_unused.equal(unused));
    }
  });
}

TEST(MetaParameters, WithoutValuesAreTold) {
  on_processes(2, [] {
    const test::CapturedLog log;
    Accelerator accelerator(with_plugin({.fsdp_version = 2}));
    auto net = [] {
      const InitOnDeviceScope empty(c10::kMeta);
      return Mlp();
    }();
    const auto model = accelerator.prepare(net);
    std::string all;
    for (const auto& message : log.messages()) all += message;
    EXPECT_EQ(all.find("4 parameters are on the meta device") != std::string::npos,
              accelerator.is_main_process());
  });
}

}  // namespace
}  // namespace accelerate::frozen_models_test
