#include <gtest/gtest.h>
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "accelerate/modeling.h"
#include "accelerate/sharding.h"
#include "nets.h"
#include "sharding/shard_plan.h"
#include "support/message_of.h"

namespace accelerate::fsdp_plan_test {
namespace {

using detail::sharding::OffloadTarget;
using detail::sharding::plan_from;
using detail::sharding::ShardGroups;
using detail::sharding::ShardLevel;
using detail::sharding::ShardPlan;
using detail::sharding::ShardRun;
using test::message_of;
using testing::NetImpl;
using Fsdp = FullyShardedDataParallelPlugin;
using Names = std::vector<std::string>;

const Environment kEmpty;
constexpr ShardRun kFour{.num_processes = 4, .processes_per_node = 4};

ShardPlan plan_of(Fsdp plugin, ShardRun run = kFour) {
  plugin = resolved(plugin, kEmpty);
  if (run.mixed_precision != PrecisionType::kNo) {
    plugin.set_mixed_precision(to_string(run.mixed_precision));
  }
  return plan_from(plugin, NetImpl(), run);
}

TEST(FsdpPlan, EachStrategyOfVersionOneShardsItsPart) {
  struct Row {
    ShardingStrategy strategy;
    ShardLevel level;
    bool reshard;
    ShardGroups groups;
  };
  using enum ShardingStrategy;
  const Row rows[] = {{kFullShard, ShardLevel::kParameters, true, {1, 8}},
                      {kShardGradOp, ShardLevel::kParameters, false, {1, 8}},
                      {kNoShard, ShardLevel::kNone, true, {8, 1}},
                      {kHybridShard, ShardLevel::kParameters, true, {2, 4}},
                      {kHybridShardZero2, ShardLevel::kParameters, false, {2, 4}}};
  for (const auto& row : rows) {
    SCOPED_TRACE(to_string(row.strategy));
    const auto plan = plan_of({.reshard_after_forward = row.strategy},
                              {.num_processes = 8, .processes_per_node = 4});
    EXPECT_EQ(plan.spec.level, row.level);
    EXPECT_EQ(plan.spec.reshard_after_forward, row.reshard);
    EXPECT_TRUE(plan.spec.accumulate_unsharded);
    EXPECT_EQ(plan.groups, row.groups);
  }
}

TEST(FsdpPlan, OneNodeIsShardedPlainlyByHybridStrategies) {
  const auto plan = plan_of({.reshard_after_forward = ShardingStrategy::kHybridShard});
  EXPECT_EQ(plan.groups, (ShardGroups{1, 4}));
  EXPECT_EQ(message_of<ConfigError>([] {
              static_cast<void>(plan_of({.reshard_after_forward = ShardingStrategy::kHybridShard},
                                        {.num_processes = 7, .processes_per_node = 4}));
            }),
            "sharding_strategy HYBRID_SHARD: a node has 4 processes, which does not divide the 7 "
            "processes of the run: each needs as many.");
}

TEST(FsdpPlan, AMeshGoesBeforeTheStrategy) {
  const ShardRun run{.num_processes = 8, .processes_per_node = 8, .mesh = ShardGroups{4, 2}};
  EXPECT_EQ(plan_of({.fsdp_version = 2}, run).groups, (ShardGroups{4, 2}));
  EXPECT_EQ(plan_of({.reshard_after_forward = ShardingStrategy::kHybridShard}, run).groups,
            (ShardGroups{4, 2}));
  const ShardRun whole{.num_processes = 4, .processes_per_node = 4, .mesh = ShardGroups{4, 1}};
  EXPECT_EQ(plan_of({.fsdp_version = 2}, whole).spec.level, ShardLevel::kNone);
}

TEST(FsdpPlan, ReshardOfVersionTwoIsATruthValue) {
  for (const bool reshard : {true, false}) {
    const auto plan = plan_of({.fsdp_version = 2, .reshard_after_forward = reshard});
    EXPECT_EQ(plan.spec.level, ShardLevel::kParameters);
    EXPECT_EQ(plan.spec.reshard_after_forward, reshard);
    EXPECT_EQ(plan.groups, (ShardGroups{1, 4}));
  }
}

TEST(FsdpPlan, UnitsFollowThePolicy) {
  using enum AutoWrapPolicy;
  const Names blocks{"layers.0", "layers.1"};
  EXPECT_EQ(plan_of({}).spec.units, Names{});
  EXPECT_EQ(plan_of({.auto_wrap_policy = kNoWrap}).spec.units, Names{});
  EXPECT_EQ(plan_of({.auto_wrap_policy = kTransformerBasedWrap,
                     .transformer_cls_names_to_wrap = Names{"Block"}})
                .spec.units,
            blocks);
  EXPECT_EQ(plan_of({.auto_wrap_policy = kSizeBasedWrap, .min_num_params = 60}).spec.units, blocks);
  EXPECT_EQ(plan_of({.fsdp_version = 2, .auto_wrap_policy = kSizeBasedWrap, .min_num_params = 60})
                .spec.units,
            (Names{"layers"}));
  const auto chosen = [](const torch::nn::Module& module) {
    return module_class_name(module) == "Linear";
  };
  EXPECT_EQ(plan_of({.auto_wrap_policy = chosen}).spec.units.size(), 4U);
  EXPECT_EQ(message_of<ConfigError>([&] {
              static_cast<void>(plan_of({.auto_wrap_policy = kTransformerBasedWrap,
                                         .transformer_cls_names_to_wrap = Names{"BertLayer"}}));
            }),
            "Could not find the transformer layer class BertLayer in the model.");
}

struct TellingImpl : NetImpl, NoSplitModules {
  [[nodiscard]] Names no_split_modules() const override { return {"Block"}; }
};

TEST(FsdpPlan, TheModelCanNameTheClassesOfItsUnits) {
  const auto plugin =
      resolved(Fsdp{.auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap}, kEmpty);
  EXPECT_EQ(plan_from(plugin, TellingImpl(), kFour).spec.units, (Names{"layers.0", "layers.1"}));
  const auto silent = plan_from(plugin, NetImpl(), kFour);
  EXPECT_EQ(silent.spec.units, Names{});
  ASSERT_EQ(silent.warnings.size(), 1U);
  EXPECT_NE(silent.warnings[0].find("the whole model is gathered at once"), std::string::npos);
}

TEST(FsdpPlugin, SetAutoWrapPolicyAsksTheModelForItsClasses) {
  Fsdp plugin{.auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap};
  plugin.set_auto_wrap_policy(TellingImpl());
  EXPECT_EQ(plugin.transformer_cls_names_to_wrap, (Names{"Block"}));
  plugin.transformer_cls_names_to_wrap = Names{"BertLayer"};
  EXPECT_EQ(message_of<ConfigError>([&] { plugin.set_auto_wrap_policy(NetImpl()); }),
            "Could not find the transformer layer class BertLayer in the model.");
  Fsdp by_size{.auto_wrap_policy = AutoWrapPolicy::kSizeBasedWrap, .min_num_params = 60};
  const Fsdp before = by_size;
  by_size.set_auto_wrap_policy(NetImpl());
  EXPECT_EQ(by_size, before);
  by_size.min_num_params = 0;
  by_size.set_auto_wrap_policy(NetImpl());
  EXPECT_EQ(std::get<AutoWrapPolicy>(*by_size.auto_wrap_policy), AutoWrapPolicy::kNoWrap);
}

TEST(FsdpPlugin, ValidatesWhatItHas) {
  Fsdp plugin;
  EXPECT_THROW(plugin.validate_cpu_offload(), ConfigError);
  EXPECT_THROW(plugin.validate_mixed_precision_policy(), ConfigError);
  plugin.set_cpu_offload();
  plugin.set_mixed_precision("bf16");
  EXPECT_EQ(plugin.cpu_offload, CPUOffload(false));
  EXPECT_NO_THROW(plugin.validate_cpu_offload());
  EXPECT_NO_THROW(plugin.validate_mixed_precision_policy());
  plugin.fsdp_version = 2;
  EXPECT_NE(message_of<ConfigError>([&] {
              plugin.validate_mixed_precision_policy();
            }).find("buffer_dtype, which is of fsdp_version 1"),
            std::string::npos);
}

TEST(FsdpPlan, ConfigurationsOfStateDictionariesThatAskForMoreAreTold) {
  EXPECT_TRUE(plan_of({}).warnings.empty());
  EXPECT_TRUE(plan_of({.fsdp_version = 2}).warnings.empty());
  const auto plan = plan_of({.state_dict_config = StateDictConfig{.rank0_only = false}});
  ASSERT_EQ(plan.warnings.size(), 1U);
  EXPECT_NE(plan.warnings[0].find("state_dict_config has no effect"), std::string::npos);
}

TEST(EnsureWeightsRetied, MakesOneOfWhatTheFunctionHasPutApart) {
  torch::nn::Module net("Tied");
  net.register_module("a", testing::sized(4));
  net.register_module("b", testing::sized(4));
  static_cast<void>(tie_parameters(net, {"a.weight", "b.weight"}));
  const auto tied = find_tied_parameters(net);
  EXPECT_EQ(tied, (std::vector<Names>{{"a.weight", "b.weight"}}));
  const Callback<void(torch::nn::Module&)> apart = [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false)) {
      parameter.set_data(torch::full_like(parameter, 2));
    }
  };
  const auto init = ensure_weights_retied(apart, net, c10::kCPU);
  for (const auto& module : net.children()) init(*module);
  EXPECT_EQ(find_tied_parameters(net), tied);
  NetImpl loose;
  EXPECT_EQ(ensure_weights_retied(apart, loose, c10::kCPU), apart);
}

TEST(FsdpPlan, IgnoredModulesAndWhatIsInThemAreNoUnits) {
  const auto plan = plan_of({.auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap,
                             .ignored_modules = "layers\\.0",
                             .transformer_cls_names_to_wrap = Names{"Block", "Linear"}});
  EXPECT_EQ(plan.spec.ignored, (Names{"layers.0"}));
  EXPECT_EQ(plan.spec.units, (Names{"layers.1.q_proj", "layers.1.mlp", "layers.1"}));
}

TEST(FsdpPlan, PrefetchesAsTheVersionDoes) {
  struct Row {
    Fsdp plugin;
    std::int64_t forward, backward;
    bool after_gradients;
  };
  const Row rows[] = {
      {{}, 0, 0, false},
      {{.backward_prefetch = BackwardPrefetch::kBackwardPre, .forward_prefetch = true},
       1,
       1,
       false},
      {{.backward_prefetch = BackwardPrefetch::kBackwardPost}, 0, 1, true},
      {{.backward_prefetch = BackwardPrefetch::kNoPrefetch}, 0, 0, false},
      {{.fsdp_version = 2}, 1, 1, false},
      {{.fsdp_version = 2, .forward_prefetch = false}, 0, 1, false}};
  for (const auto& row : rows) {
    const auto spec = plan_of(row.plugin).spec;
    EXPECT_EQ(spec.forward_prefetch, row.forward);
    EXPECT_EQ(spec.backward_prefetch, row.backward);
    EXPECT_EQ(spec.prefetch_after_gradients, row.after_gradients);
    EXPECT_TRUE(spec.limit_gathers);
  }
  EXPECT_FALSE(plan_of({.limit_all_gathers = false}).spec.limit_gathers);
}

TEST(FsdpPlan, PrecisionOfVersionOneIsUnderAutocastAndOfTwoByItsPolicy) {
  ShardRun run = kFour;
  run.mixed_precision = PrecisionType::kBf16;
  const auto one = plan_of({}, run);
  EXPECT_TRUE(one.autocast);
  EXPECT_EQ(one.spec.precision.param_dtype, at::kBFloat16);
  EXPECT_EQ(one.spec.precision.reduce_dtype, at::kBFloat16);
  EXPECT_EQ(one.spec.precision.buffer_dtype, at::kBFloat16);
  EXPECT_EQ(one.spec.precision.output_dtype, std::nullopt);
  EXPECT_TRUE(one.spec.precision.float32_masters);
  ASSERT_EQ(one.notes.size(), 1U);
  EXPECT_NE(one.notes[0].find("FSDP reduces gradients in BFloat16"), std::string::npos);

  const auto two = plan_of({.fsdp_version = 2}, run);
  EXPECT_FALSE(two.autocast);
  EXPECT_EQ(two.spec.precision.buffer_dtype, std::nullopt);
  EXPECT_EQ(two.spec.precision.output_dtype, at::kBFloat16);

  const auto plain = plan_of({});
  EXPECT_EQ(plain.spec.precision.param_dtype, std::nullopt);
  EXPECT_FALSE(plain.spec.precision.float32_masters);
  EXPECT_TRUE(plain.notes.empty());
  const auto mixed =
      plan_of({.mixed_precision_policy = MixedPrecisionPolicy{.param_dtype = FloatType::kBf16,
                                                              .reduce_dtype = FloatType::kFp32}});
  EXPECT_EQ(mixed.spec.precision.reduce_dtype, at::kFloat);
  EXPECT_TRUE(mixed.notes.empty());
}

TEST(FsdpPlan, Float16IsForDevicesThatTrainInIt) {
  ShardRun run = kFour;
  run.mixed_precision = PrecisionType::kFp16;
  const auto on_cpu = plan_of({}, run);
  EXPECT_EQ(on_cpu.spec.precision.param_dtype, std::nullopt);
  ASSERT_EQ(on_cpu.warnings.size(), 1U);
  EXPECT_NE(on_cpu.warnings[0].find("mixed_precision_policy has fp16, which a CPU does not train"),
            std::string::npos);
  run.on_cpu = false;
  EXPECT_TRUE(plan_of({}, run).warnings.empty());
  EXPECT_EQ(plan_of({}, run).spec.precision.param_dtype, at::kHalf);
}

TEST(FsdpPlan, TrainedParametersOfFewBitsAreUpcastWithMixedPrecision) {
  NetImpl net;
  net.to(at::kBFloat16);
  auto parameters = net.named_parameters();
  parameters["embed.weight"].set_requires_grad(false);
  const auto plugin = resolved(Fsdp{}, kEmpty);
  ShardRun run = kFour;
  EXPECT_TRUE(plan_from(plugin, net, run).warnings.empty());
  run.mixed_precision = PrecisionType::kBf16;
  const auto plan = plan_from(plugin, net, run);
  ASSERT_EQ(plan.warnings.size(), 1U);
  EXPECT_EQ(plan.warnings[0].substr(0, 200),
            std::string("FSDP upcast of low precision parameters to fp32 (since mixed_precision != "
                        "'no') may affect the precision of model checkpoints. This affects 9 "
                        "parameters: layers.0.q_proj.weight, layers.0.q_proj.bias, ")
                .substr(0, 200));
}

TEST(FsdpPlan, OffloadInitializationAndCheckpointingAreTakenOver) {
  const auto plain = plan_of({}).spec;
  EXPECT_EQ(plain.offload.parameters, OffloadTarget::kNone);
  EXPECT_FALSE(plain.init_empty);
  EXPECT_TRUE(plan_of({}).checkpointed.empty());

  const auto moved = plan_of({.cpu_offload = CPUOffload(true, /*pin=*/false)}).spec;
  EXPECT_EQ(moved.offload.parameters, OffloadTarget::kCpu);
  EXPECT_EQ(moved.offload.optimizer, OffloadTarget::kCpu);
  EXPECT_FALSE(moved.offload.pin_memory);

  int calls = 0;
  const auto init = plan_of({.param_init_fn = [&](torch::nn::Module&) { ++calls; }}).spec;
  NetImpl net;
  init.init_empty(net);
  EXPECT_EQ(calls, 1);

  const auto again = plan_of({.auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap,
                              .activation_checkpointing = true,
                              .transformer_cls_names_to_wrap = Names{"Block"}});
  EXPECT_EQ(again.checkpointed, (Names{"layers.0", "layers.1"}));
}

}  // namespace
}  // namespace accelerate::fsdp_plan_test
