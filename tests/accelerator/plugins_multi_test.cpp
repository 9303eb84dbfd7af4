// Plugins that shard models: where they come from, and what `prepare` makes of them.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>

#include <string>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::message_of;
using test::Mlp;

TEST(PluginsOnProcesses, AreMadeOfTheVariablesOfTheLauncher) {
  on_processes(2,
               {.environment = {{"ACCELERATE_USE_FSDP", "true"},
                                {"FSDP_VERSION", "2"},
                                {"ACCELERATE_MIXED_PRECISION", "bf16"}}},
               [] {
                 const Accelerator accelerator;
                 EXPECT_EQ(accelerator.distributed_type(), DistributedType::kFsdp);
                 EXPECT_TRUE(accelerator.is_fsdp2());
                 EXPECT_EQ(accelerator.state().fsdp_plugin()->policy()->output_dtype,
                           FloatType::kBf16);
                 accelerator.wait_for_everyone();
               });
  on_processes(2,
               {.environment = {{"ACCELERATE_USE_DEEPSPEED", "true"},
                                {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
                                {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"}}},
               [] {
                 const Accelerator accelerator({.mixed_precision = PrecisionType::kBf16});
                 EXPECT_EQ(accelerator.distributed_type(), DistributedType::kDeepspeed);
                 EXPECT_EQ(accelerator.deepspeed_plugin()->zero_stage, 3);
                 EXPECT_EQ(accelerator.mixed_precision(), PrecisionType::kBf16);
                 EXPECT_EQ(accelerator.gradient_accumulation_steps(), 1);
                 accelerator.wait_for_everyone();
               });
}

TEST(PluginsOnProcesses, NoShardIsDataParallelism) {
  on_processes(2, [] {
    Accelerator accelerator({.fsdp_plugin = FullyShardedDataParallelPlugin{
                                 .reshard_after_forward = ShardingStrategy::kNoShard}});
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::kFsdp);
    auto model = accelerator.prepare(Mlp());
    accelerator.backward(
        model(test::input_of(accelerator.process_index(), /*step=*/0)).pow(2).mean());
    EXPECT_TRUE(test::gradients_same_everywhere(model.parameters()));
  });
}

TEST(PluginsOnProcesses, WithoutShardsTheRestOfAPluginIsHonouredOrTold) {
  on_processes(2, [] {
    const test::CapturedLog log;
    Accelerator accelerator(
        {.fsdp_plugin = FullyShardedDataParallelPlugin{
             .reshard_after_forward = ShardingStrategy::kNoShard,
             .mixed_precision_policy = "bf16",
             .auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap,
             .cpu_offload = true,
             .activation_checkpointing = true,
             .transformer_cls_names_to_wrap = std::vector<std::string>{"Linear"}}});
    Mlp net;
    const auto model = accelerator.prepare(net);
    EXPECT_TRUE(should_checkpoint(*net->first));
    std::string all;
    for (const auto& message : log.messages()) all += message + "\n";
    if (!accelerator.is_main_process()) return;
    EXPECT_NE(all.find("cpu_offload of the FSDP plugin has no effect"), std::string::npos) << all;
    EXPECT_NE(all.find("mixed_precision_policy of the FSDP plugin has no effect"),
              std::string::npos)
        << all;
  });
}

TEST(PluginsOnProcesses, DoNotFitEveryModel) {
  on_processes(2, [] {
    Accelerator accelerator(
        {.fsdp_plugin = FullyShardedDataParallelPlugin{
             .auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap,
             .transformer_cls_names_to_wrap = std::vector<std::string>{"BertLayer"}}});
    EXPECT_EQ(message_of<ConfigError>([&] { (void)accelerator.prepare(Mlp()); }),
              "Could not find the transformer layer class BertLayer in the model.");
    accelerator.wait_for_everyone();
  });
}

}  // namespace
}  // namespace accelerate
