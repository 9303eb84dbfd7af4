#include "accelerate/kwargs/plugins.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "accelerate/kwargs.h"
#include "core/resolve.h"
#include "core/supported.h"
#include "records_support.h"
#include "support/command.h"

namespace accelerate {
namespace {

using testing::environment_of;
using testing::expect_like_python;
using testing::expect_refused;
using testing::Json;
using testing::message_of;
using testing::reference;
using testing::to_json;

using Fsdp = FullyShardedDataParallelPlugin;

const Environment kEmpty;

template <class T>
detail::Warnings warnings_of(const T& record, const Environment& environment = kEmpty) {
  detail::Warnings warnings;
  static_cast<void>(detail::resolve(record, environment, warnings));
  return warnings;
}

TEST(FsdpPlugin, HasPythonsFieldsInBothVersions) {
  const std::string name = "FullyShardedDataParallelPlugin/";
  expect_like_python(name + "default", Fsdp{});
  expect_like_python(name + "version_2", Fsdp{.fsdp_version = 2});
  expect_like_python(name + "version_2_from_environment", Fsdp{});
}

TEST(FsdpPlugin, ReadsEveryFieldFromTheEnvironment) {
  // How storage is made is the engine's business here.
  expect_like_python("FullyShardedDataParallelPlugin/everything", Fsdp{},
                     {{"param_init_fn", nullptr}});
  expect_like_python("FullyShardedDataParallelPlugin/size",
                     Fsdp{.auto_wrap_policy = AutoWrapPolicy::kSizeBasedWrap});
  expect_like_python("FullyShardedDataParallelPlugin/local",
                     Fsdp{.state_dict_type = StateDictType::kLocalStateDict});
}

TEST(FsdpPlugin, VersionTwoDropsWhatIsObsoleteWithAWarningEach) {
  const Fsdp plugin{.fsdp_version = 2,
                    .reshard_after_forward = false,
                    .backward_prefetch = BackwardPrefetch::kBackwardPre,
                    .cpu_offload = true,
                    .state_dict_type = StateDictType::kFullStateDict,
                    .use_orig_params = true,
                    .sync_module_states = false};
  expect_like_python("FullyShardedDataParallelPlugin/version_2_obsolete", plugin);
  EXPECT_EQ(warnings_of(plugin),
            (detail::Warnings{
                "backward_prefetch has no effect with fsdp_version 2: units are always fetched "
                "ahead.",
                "use_orig_params has no effect with fsdp_version 2: the original parameters are "
                "always used.",
                "sync_module_states has no effect with fsdp_version 2: it is not needed."}));
  EXPECT_FALSE(to_kwargs(plugin, kEmpty).contains("use_orig_params"));
}

TEST(FsdpPlugin, ForwardPrefetchIsHonouredInVersionTwo) {
  EXPECT_EQ(resolved(Fsdp{.fsdp_version = 2, .forward_prefetch = true}, kEmpty).forward_prefetch,
            true);
  EXPECT_EQ(resolved(Fsdp{.fsdp_version = 2}, Environment({{"FSDP_FORWARD_PREFETCH", "true"}}))
                .forward_prefetch,
            std::nullopt);
}

TEST(FsdpPlugin, MakesThePolicyOfAPrecision) {
  for (const std::int64_t version : {1, 2}) {
    for (const std::string precision : {"fp8", "fp16", "bf16", "fp32"}) {
      const Fsdp plugin{.fsdp_version = version, .mixed_precision_policy = precision};
      expect_like_python(
          "FullyShardedDataParallelPlugin/" + precision + "_version_" + std::to_string(version),
          plugin);
    }
  }
}

TEST(FsdpPlugin, SetMixedPrecisionKeepsAPolicyUnlessToldOtherwise) {
  Fsdp plugin = resolved(Fsdp{.mixed_precision_policy = "fp16"}, kEmpty);
  plugin.set_mixed_precision("bf16");
  EXPECT_EQ(plugin.policy()->param_dtype, FloatType::kFp16);
  plugin.set_mixed_precision("bf16", {.buffer_autocast = true, .override = true});
  EXPECT_EQ(*plugin.policy(), (MixedPrecisionPolicy{.param_dtype = FloatType::kBf16,
                                                    .reduce_dtype = FloatType::kBf16,
                                                    .buffer_dtype = FloatType::kFp32}));
  EXPECT_EQ(message_of([&] { plugin.set_mixed_precision("fp64"); }),
            "mixed_precision is 'fp64'. Choose one of: fp8, fp16, bf16, fp32.");
}

TEST(FsdpPlugin, APolicyHasTheTypesOfItsVersion) {
  const Value::Dict dict{
      {"param_dtype", "bf16"}, {"reduce_dtype", "fp32"}, {"buffer_dtype", "fp32"}};
  EXPECT_EQ(MixedPrecisionPolicy::from(dict, 1),
            (MixedPrecisionPolicy{.param_dtype = FloatType::kBf16,
                                  .reduce_dtype = FloatType::kFp32,
                                  .buffer_dtype = FloatType::kFp32}));
  const auto message = message_of([&] { static_cast<void>(MixedPrecisionPolicy::from(dict, 2)); });
  EXPECT_NE(message.find("must have the keys param_dtype, reduce_dtype and output_dtype with "
                         "fsdp_version 2, and no others."),
            std::string::npos)
      << message;
  EXPECT_THROW(validate(Fsdp{.mixed_precision_policy =
                                 MixedPrecisionPolicy{.output_dtype = FloatType::kBf16}},
                        kEmpty),
               ConfigError);
  EXPECT_THROW(validate(Fsdp{.fsdp_version = 2,
                             .mixed_precision_policy =
                                 MixedPrecisionPolicy{.buffer_dtype = FloatType::kBf16}},
                        kEmpty),
               ConfigError);
}

TEST(FsdpPlugin, AStrategyInTheSecondVariableBeatsTheLaunchersDefaultInTheFirst) {
  const auto strategy = [](std::map<std::string, std::string> variables) {
    return resolved(Fsdp{}, Environment(std::move(variables))).sharding_strategy;
  };
  EXPECT_EQ(strategy({{"FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP"}}),
            ShardingStrategy::kShardGradOp);
  EXPECT_EQ(strategy({{"FSDP_SHARDING_STRATEGY", "FULL_SHARD"},
                      {"FSDP_RESHARD_AFTER_FORWARD", "shard_grad_op"}}),
            ShardingStrategy::kShardGradOp);
  EXPECT_EQ(
      strategy({{"FSDP_SHARDING_STRATEGY", "NO_SHARD"}, {"FSDP_RESHARD_AFTER_FORWARD", "true"}}),
      ShardingStrategy::kNoShard);
  EXPECT_EQ(message_of([&] {
              static_cast<void>(strategy({{"FSDP_SHARDING_STRATEGY", "NO_SHARD"},
                                          {"FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP"}}));
            }),
            "FSDP_SHARDING_STRATEGY is NO_SHARD and FSDP_RESHARD_AFTER_FORWARD is SHARD_GRAD_OP. "
            "They mean the same in version 1: set one of them.");
  EXPECT_THROW(static_cast<void>(strategy({{"FSDP_RESHARD_AFTER_FORWARD", "HALF"}})), ConfigError);
}

TEST(FsdpPlugin, AStrategyInCodeBeatsTheEnvironment) {
  const auto environment = Environment({{"FSDP_SHARDING_STRATEGY", "NO_SHARD"}});
  EXPECT_EQ(resolved(Fsdp{.reshard_after_forward = ShardingStrategy::kHybridShard}, environment)
                .sharding_strategy,
            ShardingStrategy::kHybridShard);
  EXPECT_EQ(resolved(Fsdp{.sharding_strategy = ShardingStrategy::kFullShard}, environment)
                .sharding_strategy,
            ShardingStrategy::kFullShard);
  EXPECT_THROW(validate(Fsdp{.sharding_strategy = ShardingStrategy::kFullShard,
                             .reshard_after_forward = ShardingStrategy::kNoShard},
                        kEmpty),
               ConfigError);
}

TEST(FsdpPlugin, EfficientLoadingForcesTheBroadcastOfWeights) {
  const Fsdp plugin{.cpu_ram_efficient_loading = true};
  EXPECT_EQ(resolved(plugin, kEmpty).sync_module_states, true);
  EXPECT_EQ(
      warnings_of(plugin),
      detail::Warnings{"sync_module_states is set to true: with cpu_ram_efficient_loading only "
                       "the first process has the weights."});
  EXPECT_EQ(warnings_of(Fsdp{.sync_module_states = true, .cpu_ram_efficient_loading = true}),
            detail::Warnings{});
}

TEST(FsdpPlugin, ASizeOfZeroMakesNoUnits) {
  const auto plugin = resolved(Fsdp{.auto_wrap_policy = AutoWrapPolicy::kSizeBasedWrap}, kEmpty);
  EXPECT_EQ(std::get<AutoWrapPolicy>(*plugin.auto_wrap_policy), AutoWrapPolicy::kNoWrap);
  EXPECT_EQ(plugin.min_num_params, 0);
}

TEST(FsdpPlugin, TakesAPredicateForItsUnits) {
  const Fsdp plugin{.auto_wrap_policy = [](const torch::nn::Module&) { return true; }};
  EXPECT_EQ(resolved(plugin, Environment({{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"}}))
                .auto_wrap_policy,
            plugin.auto_wrap_policy);
}

TEST(FsdpPlugin, TheStateDictTypeCanChangeLater) {
  Fsdp plugin = resolved(Fsdp{.fsdp_version = 2}, kEmpty);
  EXPECT_EQ(plugin.state_dict_config, (StateDictConfig{.rank0_only = false}));
  plugin.set_state_dict_type(StateDictType::kFullStateDict, kEmpty);
  EXPECT_EQ(plugin.state_dict_type, StateDictType::kFullStateDict);
  EXPECT_EQ(plugin.state_dict_config, (StateDictConfig{.rank0_only = true}));

  const StateDictConfig own{.offload_to_cpu = false};
  plugin.state_dict_config = own;
  plugin.set_state_dict_type(StateDictType::kShardedStateDict, kEmpty);
  EXPECT_EQ(plugin.state_dict_config, own);
}

TEST(FsdpPlugin, ValuesThatCannotWorkAreRefused) {
  expect_refused("fsdp_reshard_1", [](const Environment& e) {
    validate(Fsdp{.fsdp_version = 1, .reshard_after_forward = true}, e);
  });
  expect_refused("fsdp_reshard_2", [](const Environment& e) {
    validate(Fsdp{.fsdp_version = 2, .reshard_after_forward = ShardingStrategy::kShardGradOp}, e);
  });
  expect_refused("fsdp_local", [](const Environment& e) {
    validate(Fsdp{.fsdp_version = 2, .state_dict_type = StateDictType::kLocalStateDict}, e);
  });
  expect_refused("fsdp_wrap", [](const Environment& e) { validate(Fsdp{}, e); });
  expect_refused("fsdp_precision",
                 [](const Environment& e) { validate(Fsdp{.mixed_precision_policy = "int8"}, e); });
  EXPECT_EQ(message_of([] { validate(Fsdp{.fsdp_version = 3}, kEmpty); }),
            "fsdp_version is 3. Choose 1 or 2.");
  EXPECT_EQ(
      message_of([] { validate(Fsdp{.ignored_modules = "(?<=a)b"}, kEmpty); }),
      "ignored_modules is '(?<=a)b', which is not a regular expression of the ECMAScript kind.");
}

TEST(FsdpPlugin, RamEfficientLoadingIsSwitchedThroughTheEnvironment) {
  const auto restored = clear_environment();
  enable_fsdp_ram_efficient_loading();
  EXPECT_STREQ(std::getenv("ACCELERATE_USE_FSDP"), "True");
  EXPECT_STREQ(std::getenv("FSDP_CPU_RAM_EFFICIENT_LOADING"), "True");
  ::setenv("ACCELERATE_USE_FSDP", "false", 1);
  enable_fsdp_ram_efficient_loading();
  EXPECT_STREQ(std::getenv("ACCELERATE_USE_FSDP"), "false");
  disable_fsdp_ram_efficient_loading();
  EXPECT_STREQ(std::getenv("FSDP_CPU_RAM_EFFICIENT_LOADING"), "False");
}

// ---------------------------------------------------------------------------------------------

/// "auto" wherever the plugin has a field for it, as in the reference.
Value::Dict automatic() {
  const auto offload = [] { return Value::Dict{{"device", "auto"}, {"nvme_path", "auto"}}; };
  return {
      {"train_micro_batch_size_per_gpu", "auto"},
      {"gradient_accumulation_steps", "auto"},
      {"gradient_clipping", "auto"},
      {"fp16", Value::Dict{{"enabled", "auto"}}},
      {"zero_optimization", Value::Dict{{"stage", "auto"},
                                        {"offload_optimizer", offload()},
                                        {"offload_param", offload()},
                                        {"stage3_gather_16bit_weights_on_model_save", "auto"}}}};
}

Value::Dict fixed() {
  return {{"gradient_clipping", 0.5},
          {"bf16", Value::Dict{{"enabled", true}}},
          {"zero_optimization",
           Value::Dict{{"stage", 3}, {"offload_param", Value::Dict{{"device", "cpu"}}}}}};
}

/// Compares the fields, the tree, its queries and the tree of each precision with Python's.
void expect_deepspeed_like_python(const std::string& name, const DeepSpeedPlugin& given) {
  SCOPED_TRACE(name);
  const Json& expected = reference().at("cases").at("DeepSpeedPlugin/" + name);
  const auto environment = environment_of(expected);
  EXPECT_EQ(to_json(to_dict(given, environment)), expected.at("fields"));

  const auto plugin = resolved(given, environment);
  EXPECT_EQ(plugin.hf_ds_config->is_zero2(), expected["queries"]["is_zero2"].get<bool>());
  EXPECT_EQ(plugin.hf_ds_config->is_zero3(), expected["queries"]["is_zero3"].get<bool>());
  EXPECT_EQ(plugin.hf_ds_config->is_offload(), expected["queries"]["is_offload"].get<bool>());
  for (const auto& [precision, tree] : expected.at("set_mixed_precision").items()) {
    SCOPED_TRACE(precision);
    auto copy = plugin;
    if (tree.contains("error")) {
      EXPECT_THROW(copy.set_mixed_precision(precision), ConfigError);
      continue;
    }
    copy.set_mixed_precision(precision);
    // The order of the sections differs by history, their content does not.
    EXPECT_EQ(nlohmann::json::parse(to_json(copy.deepspeed_config()).dump()),
              nlohmann::json::parse(tree.dump()));
  }
}

TEST(DeepSpeedPlugin, BuildsPythonsTreeFromItsFields) {
  expect_deepspeed_like_python("default", {});
  expect_deepspeed_like_python("environment", {});
  expect_deepspeed_like_python(
      "no_clipping", {.gradient_clipping = 0.0, .zero_stage = 1, .zero3_init_flag = true});
}

TEST(DeepSpeedPlugin, FillsTheAutoEntriesOfAFileAndTakesTheOthersOver) {
  expect_deepspeed_like_python("automatic", {.hf_ds_config = automatic()});
  expect_deepspeed_like_python("automatic_default", {.hf_ds_config = automatic()});
  expect_deepspeed_like_python(
      "fixed", {.hf_ds_config = fixed(), .gradient_clipping = 2.0, .zero_stage = 2});
}

TEST(DeepSpeedPlugin, ReadsJsonTextAndBase64) {
  expect_deepspeed_like_python("text", {});
  expect_deepspeed_like_python("base64", {});
}

TEST(DeepSpeedPlugin, ReadsAFile) {
  const test::Folder folder;
  const auto path = folder.path() / "deepspeed.json";
  std::ofstream(path) << R"({"zero_optimization": {"stage": 1, "reduce_bucket_size": 2e8}})";
  const auto plugin = resolved(DeepSpeedPlugin{.hf_ds_config = path}, kEmpty);
  EXPECT_EQ(plugin.zero_stage, 1);
  EXPECT_EQ(plugin.gradient_accumulation_steps, AutoOr<std::int64_t>(1));
  EXPECT_EQ(plugin.get_value("zero_optimization.reduce_bucket_size"), Value(2e8));
  std::ofstream(path) << "{\"zero_optimization\": ";
  EXPECT_NE(message_of([&] { HfDeepSpeedConfig broken(path); }).find(path.string()),
            std::string::npos);
}

TEST(DeepSpeedPlugin, ResolvingTwiceChangesNothing) {
  const auto environment = Environment(
      {{"ACCELERATE_CONFIG_DS_FIELDS", "zero_stage"}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"}});
  const auto once = resolved(DeepSpeedPlugin{}, environment);
  EXPECT_EQ(once.zero_stage, 3);
  EXPECT_EQ(resolved(once, environment), once);
}

TEST(DeepSpeedPlugin, TheInitFlagIsForStageThree) {
  EXPECT_EQ(warnings_of(DeepSpeedPlugin{.zero_stage = 2, .zero3_init_flag = true}),
            detail::Warnings{"zero3_init_flag is set to false: it is for ZeRO stage 3 alone."});
  EXPECT_EQ(resolved(DeepSpeedPlugin{.zero_stage = 3}, kEmpty).zero3_init_flag, true);
  EXPECT_EQ(resolved(DeepSpeedPlugin{.zero_stage = 3},
                     Environment({{"ACCELERATE_DEEPSPEED_ZERO3_INIT", "no"}}))
                .zero3_init_flag,
            false);
}

TEST(DeepSpeedPlugin, SavingIn16BitsIsTrueForEveryTruthWordWithAWarning) {
  const auto environment = Environment({{"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "yes"}});
  EXPECT_EQ(resolved(DeepSpeedPlugin{}, environment).zero3_save_16bit_model, true);
  const auto warnings = warnings_of(DeepSpeedPlugin{}, environment);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL is 'yes'"),
            std::string::npos);
}

TEST(DeepSpeedPlugin, MsAmpIsRecordedAndRefusedWhenUsed) {
  expect_deepspeed_like_python("msamp", {.enable_msamp = true});
  expect_refused<UnsupportedError>("deepspeed_msamp", [](const Environment& e) {
    validate(DeepSpeedPlugin{.zero_stage = 3, .enable_msamp = true}, e);
  });
  const auto plugin =
      resolved(DeepSpeedPlugin{}, Environment({{"ACCELERATE_FP8_BACKEND", "MSAMP"}}));
  EXPECT_EQ(plugin.enable_msamp, true);
  EXPECT_THROW(detail::require_supported(plugin), UnsupportedError);
  EXPECT_NO_THROW(detail::require_supported(resolved(DeepSpeedPlugin{}, kEmpty)));
}

TEST(DeepSpeedPlugin, SectionsOfThePackageItselfAreRefusedUnlessTheyAreOff) {
  const auto profiler = [](Value entry) {
    return resolved(
        DeepSpeedPlugin{.hf_ds_config =
                            Value::Dict{{"zero_optimization", Value::Dict{{"stage", 2}}},
                                        {"flops_profiler", std::move(entry)}}},
        kEmpty);
  };
  EXPECT_EQ(message_of<UnsupportedError>(
                [&] { detail::require_supported(profiler(Value::Dict{{"enabled", true}})); }),
            "'flops_profiler' in the DeepSpeed configuration is not supported: times and "
            "operations are shown by accelerator.profile(), and by `accelerate monitor`.");
  EXPECT_NO_THROW(detail::require_supported(profiler(Value::Dict{{"enabled", false}})));
}

TEST(DeepSpeedPlugin, ValuesThatCannotWorkAreRefused) {
  expect_refused("deepspeed_section", [](const Environment& e) {
    validate(DeepSpeedPlugin{.hf_ds_config = Value::Dict{{"fp16", Value::Dict{}}}}, e);
  });
  expect_refused("deepspeed_text",
                 [](const Environment&) { HfDeepSpeedConfig config("nowhere.json"); });
  expect_refused("deepspeed_fields", [](const Environment& e) {
    validate(DeepSpeedPlugin{.hf_ds_config = fixed()}, e);
  });
  EXPECT_EQ(message_of([] { validate(DeepSpeedPlugin{.zero_stage = 4}, kEmpty); }),
            "zero_stage is 4. Choose 0, 1, 2 or 3.");
  EXPECT_EQ(message_of([] { validate(DeepSpeedPlugin{.offload_param_device = "disk"}, kEmpty); }),
            "offload_param_device is 'disk'. Choose one of: none, cpu, nvme.");
  EXPECT_EQ(message_of([] { validate(DeepSpeedPlugin{.offload_param_device = "nvme"}, kEmpty); }),
            "offload_param_device is nvme, but offload_param_nvme_path is not set.");
  const Value::Dict wrong{{"zero_optimization", Value::Dict{{"stage", "three"}}}};
  const auto message =
      message_of([&] { validate(DeepSpeedPlugin{.hf_ds_config = wrong}, kEmpty); });
  EXPECT_NE(message.find("'zero_optimization.stage' is 'three'"), std::string::npos) << message;
}

TEST(DeepSpeedPlugin, ProcessReportsAllMismatchesAtOnce) {
  expect_refused("deepspeed_process", [](const Environment& e) {
    auto plugin = resolved(
        DeepSpeedPlugin{
            .hf_ds_config =
                Value::Dict{{"train_micro_batch_size_per_gpu", 1},
                            {"optimizer", Value::Dict{{"params", Value::Dict{{"lr", 0.001}}}}},
                            {"zero_optimization", Value::Dict{{"stage", 2}}}}},
        e);
    plugin.deepspeed_config_process({{"train_micro_batch_size_per_gpu", 16},
                                     {"zero_optimization.stage", 3},
                                     {"optimizer.params.lr", 0.1}});
  });
}

TEST(DeepSpeedPlugin, ProcessFillsAutoEntriesAndRefusesThoseWithoutAValue) {
  const auto plugin = resolved(
      DeepSpeedPlugin{
          .hf_ds_config =
              Value::Dict{{"optimizer", Value::Dict{{"params", Value::Dict{{"lr", "auto"}}}}},
                          {"zero_optimization", Value::Dict{{"stage", 2}}}}},
      kEmpty);
  EXPECT_TRUE(plugin.is_auto("optimizer.params.lr"));
  auto filled = plugin;
  filled.deepspeed_config_process({{"optimizer.params.lr", 0.1}});
  EXPECT_EQ(filled.get_value("optimizer.params.lr"), Value(0.1));
  expect_refused("deepspeed_auto", [&](const Environment&) {
    auto copy = plugin;
    copy.deepspeed_config_process({});
  });
}

TEST(DeepSpeedPlugin, HasNoTreeBeforeItIsResolved) {
  EXPECT_EQ(message_of<StateError>([] { static_cast<void>(DeepSpeedPlugin{}.deepspeed_config()); }),
            "This DeepSpeedPlugin has no configuration yet. Call resolved(plugin) first.");
}

TEST(HfDeepSpeedConfig, AnswersDottedKeys) {
  HfDeepSpeedConfig config(
      Value::Dict{{"a", Value::Dict{{"on", true}, {"off", 0}, {"text", "x"}}}});
  EXPECT_EQ(config.get_value("a.text"), Value("x"));
  EXPECT_EQ(config.get_value("a.missing", 7), Value(7));
  EXPECT_EQ(config.get_value("b.c.d"), Value());
  EXPECT_TRUE(config.is_true("a.on"));
  EXPECT_FALSE(config.is_false("a.on"));
  EXPECT_TRUE(config.is_false("a.off"));
  EXPECT_FALSE(config.is_true("a.missing"));
  EXPECT_FALSE(config.is_false("a.missing"));
  EXPECT_EQ(config.find_config_node("x.y").first, nullptr);
  EXPECT_EQ(config.find_config_node("a.text").second, "text");
}

TEST(HfDeepSpeedConfig, RemovesPartsOfTheTree) {
  HfDeepSpeedConfig config(Value::Dict{{"a", Value::Dict{{"b", 1}, {"c", 2}}}});
  config.del_config_sub_tree("a.b");
  EXPECT_EQ(config.config(), (Value::Dict{{"a", Value::Dict{{"c", 2}}}}));
  EXPECT_NO_THROW(config.del_config_sub_tree("a.b"));
  EXPECT_EQ(message_of([&] { config.del_config_sub_tree("a.b", /*must_exist=*/true); }),
            "The DeepSpeed configuration has no entry 'a.b'. It is: {'a': {'c': 2}}");
}

TEST(HfDeepSpeedConfig, BrokenJsonSaysWhereItBreaks) {
  const auto message = message_of([] { HfDeepSpeedConfig config(R"({"a": })"); });
  EXPECT_NE(message.find("The DeepSpeed configuration"), std::string::npos) << message;
  EXPECT_NE(message.find("line 1"), std::string::npos) << message;
}

// ---------------------------------------------------------------------------------------------

void expect_megatron_like_python(const std::string& name, const MegatronLMPlugin& given) {
  expect_like_python("MegatronLMPlugin/" + name, given);
  const Json& expected = reference().at("cases").at("MegatronLMPlugin/" + name);
  const auto plugin = resolved(given, environment_of(expected));
  EXPECT_EQ(to_json(plugin.megatron_lm_default_args()), expected.at("megatron_lm_default_args"));
}

TEST(MegatronLMPlugin, HasPythonsFieldsAndArguments) {
  expect_megatron_like_python("default", {});
  expect_megatron_like_python("environment", {});
  expect_megatron_like_python(
      "given", {.tp_degree = 4,
                .consumed_samples = {{7}},
                .tensorboard_dir = "board",
                .custom_get_batch_function = [](const Value& batch) { return batch; },
                .other_megatron_args = Value::Dict{{"alibi", true}, {"lr_mult", 3.0}}});
}

TEST(MegatronLMPlugin, WarnsOfTheContextParallelismNobodyAskedFor) {
  const auto warnings = warnings_of(MegatronLMPlugin{});
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("context_parallel_size of MegatronLMPlugin is 2"), std::string::npos);
  EXPECT_EQ(warnings_of(MegatronLMPlugin{.context_parallel_size = 2}), detail::Warnings{});
  EXPECT_EQ(
      warnings_of(MegatronLMPlugin{}, Environment({{"MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "2"}})),
      detail::Warnings{});
}

TEST(MegatronLMPlugin, ValuesThatCannotWorkAreRefused) {
  EXPECT_EQ(message_of([] { validate(MegatronLMPlugin{.tp_degree = 0}, kEmpty); }),
            "tp_degree is 0, but it must be at least 1.");
  EXPECT_EQ(message_of([] { validate(MegatronLMPlugin{.recompute_method = "blocks"}, kEmpty); }),
            "recompute_method is 'blocks'. Choose one of: uniform, block. Did you mean 'block'?");
  EXPECT_EQ(message_of([] { validate(MegatronLMPlugin{.lr_decay_style = "exponential"}, kEmpty); }),
            "lr_decay_style is 'exponential'. Choose one of: constant, linear, cosine.");
}

TEST(MegatronLMPlugin, ExpertsAndIndexedDatasetsAreRecordedAndRefused) {
  const auto plugin = resolved(MegatronLMPlugin{}, kEmpty);
  EXPECT_NO_THROW(detail::require_supported(plugin));
  auto experts = plugin;
  experts.expert_model_parallel_size = 2;
  EXPECT_EQ(
      message_of<UnsupportedError>([&] { detail::require_supported(experts); }),
      "expert_model_parallel_size = 2 is not supported: there is no expert parallelism. Set it "
      "to 1.");
  auto dataset = plugin;
  dataset.megatron_dataset_flag = true;
  EXPECT_THROW(detail::require_supported(dataset), UnsupportedError);
  auto others = plugin;
  others.other_megatron_args = Value::Dict{{"alibi", true}};
  EXPECT_NE(message_of<UnsupportedError>([&] { detail::require_supported(others); }).find("alibi"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate
