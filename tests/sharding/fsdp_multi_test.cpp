// Models that an FSDP plugin shards.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "sharding/sharded_nets.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using test::anew;
using test::TinyGpt;
using Plugin = FullyShardedDataParallelPlugin;
namespace F = torch::nn::functional;

Plugin by_blocks(Plugin plugin) {
  plugin.auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap;
  plugin.transformer_cls_names_to_wrap = std::vector<std::string>{"Block"};
  return plugin;
}

/// A run under a plugin, or by data parallelism.
struct PluginRun {
  explicit PluginRun(const std::optional<Plugin>& plugin,
                     PrecisionType precision = PrecisionType::kNo)
      : accelerator(anew({.mixed_precision = precision, .fsdp_plugin = plugin})) {
    torch::manual_seed(3);
    net = TinyGpt();
    auto prepared = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.1, .momentum = 0.5}));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
  }
  std::vector<double> train(int first, int steps) {
    std::vector<double> losses;
    for (int step = first; step < first + steps; ++step) {
      auto generator =
          at::make_generator<at::CPUGeneratorImpl>(10 * step + accelerator.process_index());
      const auto words = torch::randint(64, {4, 9}, generator, torch::TensorOptions(torch::kLong));
      const auto scores = model(words.slice(1, 0, 8)).reshape({-1, 64});
      const auto loss = F::cross_entropy(scores.to(torch::kFloat), words.slice(1, 1).reshape(-1));
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<double>());
    }
    return losses;
  }

  Accelerator accelerator;
  TinyGpt net{nullptr};
  PreparedModel<TinyGpt> model;
  AcceleratedOptimizer optimizer;
};

TEST(ShardedByPlugin, BothVersionsOfFsdpTrainAsDataParallelismDoes) {
  on_processes(2, [] {
    const auto wanted = PluginRun(std::nullopt).train(0, 4);
    for (const auto& plugin : {Plugin{.fsdp_version = 1}, Plugin{.fsdp_version = 2},
                               Plugin{.fsdp_version = 2, .reshard_after_forward = false},
                               Plugin{.fsdp_version = 2, .cpu_offload = true}}) {
      PluginRun run(by_blocks(plugin));
      EXPECT_EQ(run.accelerator.distributed_type(), DistributedType::kFsdp);
      EXPECT_EQ(run.train(0, 4), wanted);
    }
  });
}

TEST(ShardedByPlugin, OptionsOfDataParallelismAreRefusedOrTold) {
  on_processes(2, [] {
    const auto prepare = [](const DistributedDataParallelKwargs& ddp) {
      Accelerator accelerator(
          anew({.fsdp_plugin = by_blocks({.fsdp_version = 2}), .kwargs_handlers = {ddp}}));
      static_cast<void>(accelerator.prepare(TinyGpt()));
    };
    EXPECT_EQ(test::message_of<ConfigError>(
                  [&] { prepare({.comm_hook = DDPCommunicationHookType::kFp16}); }),
              "comm_hook of DistributedDataParallelKwargs is 'fp16', but gradients of a sharded "
              "model are not compressed. Leave it out, or train by data parallelism. With an FSDP "
              "plugin, reduce_dtype of its mixed_precision_policy chooses a smaller type.");
    const test::CapturedLog log;
    prepare({.broadcast_buffers = false, .find_unused_parameters = true});
    EXPECT_TRUE(log.messages().empty()) << "that is how shards are trained";
    prepare({.bucket_cap_mb = 50, .gradient_as_bucket_view = true, .static_graph = true});
    if (!PartialState().is_main_process()) return;
    ASSERT_EQ(log.messages().size(), 3U);
    EXPECT_EQ(log.messages()[0],
              "[RANK 0] bucket_cap_mb of DistributedDataParallelKwargs has no effect: the model is "
              "sharded, "
              "so that its gradients are reduced unit by unit. Leave it out.");
  });
}

TEST(ShardedByPlugin, HybridStrategiesShardWithinAHostAndReplicateAcross) {
  on_processes(4, {.processes_per_host = 2}, [] {
    const auto wanted = PluginRun(std::nullopt).train(0, 4);
    PluginRun run(by_blocks({.sharding_strategy = ShardingStrategy::kHybridShard}));
    const auto losses = run.train(0, 4);
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(losses[i], wanted[i], 1e-5);
  });
}

TEST(ShardedByPlugin, ParametersAndOutputsHaveTheTypesOfThePolicy) {
  on_processes(2, [] {
    const auto wanted = PluginRun(std::nullopt).train(0, 4);
    for (const int version : {1, 2}) {
      PluginRun run(by_blocks({.fsdp_version = version}), PrecisionType::kBf16);
      EXPECT_EQ(run.net->head->weight.scalar_type(), torch::kBFloat16);
      const auto words = torch::zeros({1, 4}, torch::kLong);
      EXPECT_EQ(run.model(words).scalar_type(), version == 1 ? torch::kFloat : torch::kBFloat16);
      const auto losses = run.train(0, 4);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_NEAR(losses[i], wanted[i], 0.05) << "version " << version;
      }
    }
  });
}

TEST(ShardedByPlugin, InputsHaveTheTypeOfThePolicyInBothVersions) {
  on_processes(2, [] {
    const MixedPrecisionPolicy policy{.param_dtype = FloatType::kBf16,
                                      .reduce_dtype = FloatType::kFp32};
    for (const int version : {1, 2}) {
      for (const auto precision : {PrecisionType::kNo, PrecisionType::kBf16}) {
        Accelerator accelerator(anew(
            {.mixed_precision = precision,
             .fsdp_plugin = Plugin{.fsdp_version = version, .mixed_precision_policy = policy}}));
        test::Line line;
        torch::nn::init::ones_(line->weight);
        auto product = accelerator.prepare(line);
        // An operator that autocast does not know: the input alone decides.
        EXPECT_EQ(product(torch::full({1}, 1 + 0x1p-10)).item<double>(), 1) << version;

        torch::manual_seed(1);
        test::Mlp net;
        auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.1}));
        const auto x = test::input_of(accelerator.process_index());
        const auto loss_of = [&] { return model(x).to(torch::kFloat).pow(2).mean(); };
        const auto first = loss_of();
        accelerator.backward(first);
        optimizer.step();
        const auto mean = [&](const torch::Tensor& loss) {
          return accelerator.reduce(loss.detach(), Reduction::kMean).item<double>();
        };
        EXPECT_LT(mean(loss_of()), mean(first));
      }
    }
  });
}

TEST(ShardedByPlugin, ShardedFilesAreWrittenAndRead) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    const auto plugin = by_blocks({.fsdp_version = 2});
    PluginRun run(plugin);
    (void)run.train(0, 2);
    const auto state = folder.path() / "state";
    run.accelerator.save_state(state);
    EXPECT_TRUE(std::filesystem::exists(state / "pytorch_model_fsdp_0" / ".metadata"));
    const auto wanted = run.train(2, 2);
    PluginRun resumed(plugin);
    (void)resumed.train(20, 1);
    resumed.accelerator.load_state(state);
    EXPECT_EQ(resumed.train(2, 2), wanted);
  });
}

}  // namespace
}  // namespace accelerate
