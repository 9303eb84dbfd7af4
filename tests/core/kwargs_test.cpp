#include "accelerate/kwargs.h"

#include <gtest/gtest.h>

#include "core/resolve.h"
#include "core/supported.h"
#include "records_support.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using testing::expect_kwargs_like_python;
using testing::expect_like_python;
using testing::expect_refused;
using testing::Json;
using testing::message_of;
using testing::to_json;

const Environment kEmpty;

/// What a user hears about a record.
template <class T>
detail::Warnings warnings_of(const T& record, const Environment& environment = kEmpty) {
  detail::Warnings warnings;
  static_cast<void>(detail::resolve(record, environment, warnings));
  return warnings;
}

TEST(Handlers, HavePythonsFieldsAndDefaults) {
  expect_like_python("AutocastKwargs/default", AutocastKwargs{});
  expect_like_python("DistributedDataParallelKwargs/default", DistributedDataParallelKwargs{});
  expect_like_python("GradScalerKwargs/default", GradScalerKwargs{});
  expect_like_python("InitProcessGroupKwargs/default", InitProcessGroupKwargs{});
  expect_like_python("ProfileKwargs/default", ProfileKwargs{});
  expect_like_python("AORecipeKwargs/default", AORecipeKwargs{});
  expect_like_python("TERecipeKwargs/default", TERecipeKwargs{});
  expect_like_python("MSAMPRecipeKwargs/default", MSAMPRecipeKwargs{});
  expect_like_python("TorchDynamoPlugin/default", TorchDynamoPlugin{});
  expect_like_python("TorchTensorParallelPlugin/default", TorchTensorParallelPlugin{});
  expect_like_python("TorchTensorParallelConfig/default", TorchTensorParallelConfig{});
  expect_like_python("TorchContextParallelConfig/default", TorchContextParallelConfig{});
  expect_like_python("DeepSpeedSequenceParallelConfig/default", DeepSpeedSequenceParallelConfig{});
}

TEST(Handlers, ADefaultRecordPassesNothingOn) {
  expect_kwargs_like_python("AutocastKwargs/default", AutocastKwargs{});
  expect_kwargs_like_python("DistributedDataParallelKwargs/default",
                            DistributedDataParallelKwargs{});
  expect_kwargs_like_python("GradScalerKwargs/default", GradScalerKwargs{});
  expect_kwargs_like_python("InitProcessGroupKwargs/default", InitProcessGroupKwargs{});
  expect_kwargs_like_python("ProfileKwargs/default", ProfileKwargs{});
  expect_kwargs_like_python("AORecipeKwargs/default", AORecipeKwargs{});
  expect_kwargs_like_python("TERecipeKwargs/default", TERecipeKwargs{});
  expect_kwargs_like_python("MSAMPRecipeKwargs/default", MSAMPRecipeKwargs{});
  expect_kwargs_like_python("GradientAccumulationPlugin/default", GradientAccumulationPlugin{});
  expect_kwargs_like_python("TorchDynamoPlugin/default", TorchDynamoPlugin{});
}

TEST(Handlers, PassOnWhatDiffersFromTheDefault) {
  const AutocastKwargs island{.enabled = false, .cache_enabled = true};
  expect_like_python("AutocastKwargs/island", island);
  expect_kwargs_like_python("AutocastKwargs/island", island);

  const GradScalerKwargs scaler{.init_scale = 1024, .growth_factor = 2};
  expect_like_python("GradScalerKwargs/changed", scaler);
  expect_kwargs_like_python("GradScalerKwargs/changed", scaler);

  const ProfileKwargs profile{
      .activities = {{ProfilerActivity::kCpu, ProfilerActivity::kCuda}},
      .schedule_option =
          ProfileSchedule{.wait = 1, .warmup = 1, .active = 3, .repeat = 2, .skip_first = 1},
      .on_trace_ready = [](Profiler&) {},
      .record_shapes = true,
      .output_trace_dir = "trace"};
  expect_like_python("ProfileKwargs/schedule", profile);
  expect_kwargs_like_python("ProfileKwargs/schedule", profile);
}

TEST(Handlers, CommunicationHooksAreNoPartOfTheirKwargs) {
  const DistributedDataParallelKwargs kwargs{
      .bucket_cap_mb = 15,
      .find_unused_parameters = true,
      .comm_hook = DDPCommunicationHookType::kPowerSgd,
      .comm_wrapper = DDPCommunicationHookType::kBf16,
      .comm_state_option = {{"matrix_approximation_rank", 2}}};
  expect_like_python("DistributedDataParallelKwargs/hook", kwargs);
  expect_kwargs_like_python("DistributedDataParallelKwargs/hook", kwargs);
}

TEST(Handlers, AnExplicitOptionalFieldIsPassedOnEvenWhenItEqualsTheDefault) {
  // Python drops the 600 s, and Gloo then waits for its own 1800 s.
  EXPECT_EQ(to_json(to_kwargs(InitProcessGroupKwargs{.backend = "gloo", .timeout = 600s}, kEmpty)),
            Json::parse(R"({"backend": "gloo", "timeout": 600.0})"));
  EXPECT_EQ(to_json(to_kwargs(InitProcessGroupKwargs{.timeout = 600s}, kEmpty)),
            Json::parse(R"({"timeout": 600.0})"));
  EXPECT_EQ(to_json(to_kwargs(TERecipeKwargs{.margin = 0}, kEmpty)),
            Json::parse(R"({"margin": 0})"));
  EXPECT_EQ(to_json(to_kwargs(TorchDynamoPlugin{.backend = DynamoBackend::kNo}, kEmpty)),
            Json::parse(R"({"backend": "no"})"));
}

TEST(Handlers, TheTimeoutOfAProcessGroupFollowsItsBackend) {
  expect_like_python("InitProcessGroupKwargs/gloo", InitProcessGroupKwargs{.backend = "gloo"});
  expect_kwargs_like_python("InitProcessGroupKwargs/gloo",
                            InitProcessGroupKwargs{.backend = "gloo"});
  expect_kwargs_like_python("InitProcessGroupKwargs/timeout",
                            InitProcessGroupKwargs{.timeout = 800s});
  EXPECT_EQ(message_of([] { validate(InitProcessGroupKwargs{.timeout = 0s}, kEmpty); }),
            "timeout is 0 ms, but it must be positive.");
}

TEST(Handlers, FieldsComeFromTheEnvironmentUnlessTheyAreGiven) {
  expect_like_python("AORecipeKwargs/environment", AORecipeKwargs{});
  expect_kwargs_like_python("AORecipeKwargs/environment", AORecipeKwargs{});
  expect_like_python("TERecipeKwargs/environment", TERecipeKwargs{});
  expect_kwargs_like_python("TERecipeKwargs/environment", TERecipeKwargs{});
  const TERecipeKwargs given{.margin = 5, .fp8_format = FP8Format::kE5m2};
  expect_like_python("TERecipeKwargs/given", given);
  expect_kwargs_like_python("TERecipeKwargs/given", given);
  expect_like_python("MSAMPRecipeKwargs/environment", MSAMPRecipeKwargs{});
  expect_kwargs_like_python("MSAMPRecipeKwargs/environment", MSAMPRecipeKwargs{});
  expect_like_python("TorchContextParallelConfig/environment", TorchContextParallelConfig{});
  expect_like_python("DeepSpeedSequenceParallelConfig/environment",
                     DeepSpeedSequenceParallelConfig{});
  expect_like_python("DeepSpeedSequenceParallelConfig/none",
                     DeepSpeedSequenceParallelConfig{.sp_seq_length_is_variable = false});
}

TEST(Handlers, ResolvingTwiceChangesNothing) {
  const auto environment =
      Environment({{"ACCELERATE_FP8_MARGIN", "7"}, {"ACCELERATE_DYNAMO_BACKEND", "tvm"}});
  const auto recipe = resolved(TERecipeKwargs{}, environment);
  EXPECT_EQ(recipe.margin, 7);
  EXPECT_EQ(resolved(recipe, kEmpty), recipe);
  const auto plugin = resolved(TorchDynamoPlugin{}, environment);
  EXPECT_EQ(plugin.backend, DynamoBackend::kTvm);
  EXPECT_EQ(resolved(plugin, kEmpty), plugin);
}

TEST(Handlers, FunctionsAreComparedByIdentity) {
  const ProfileKwargs one{.on_trace_ready = [](Profiler&) {}};
  const ProfileKwargs other{.on_trace_ready = [](Profiler&) {}};
  const ProfileKwargs copy = one;
  EXPECT_EQ(copy, one);
  EXPECT_NE(other, one);
  EXPECT_NE(ProfileKwargs{}, one);
}

TEST(Handlers, ASecondOfOneKindIsRefusedByName) {
  const std::vector<KwargsHandler> handlers{GradScalerKwargs{}, AutocastKwargs{},
                                            GradScalerKwargs{}};
  EXPECT_EQ(message_of([&] { validate(handlers, kEmpty); }),
            "kwargs_handlers has two GradScalerKwargs. Give one handler of each kind.");
  EXPECT_NO_THROW(
      validate(std::vector<KwargsHandler>{GradScalerKwargs{}, AutocastKwargs{}}, kEmpty));
}

TEST(Handlers, AreFoundByTheirKind) {
  const std::vector<KwargsHandler> handlers{GradScalerKwargs{.init_scale = 8.0}};
  ASSERT_NE(find_handler<GradScalerKwargs>(handlers), nullptr);
  EXPECT_EQ(find_handler<GradScalerKwargs>(handlers)->init_scale, 8.0);
  EXPECT_EQ(find_handler<AutocastKwargs>(handlers), nullptr);
}

TEST(Handlers, ValuesThatCannotWorkAreRefused) {
  expect_refused("te_format", [](const Environment& e) { validate(TERecipeKwargs{}, e); });
  expect_refused("te_algorithm", [](const Environment& e) { validate(TERecipeKwargs{}, e); });
  expect_refused("msamp_level", [](const Environment& e) { validate(MSAMPRecipeKwargs{}, e); });
  expect_refused("fp8_backend", [](const Environment& e) {
    validate(FP8RecipeKwargs{.backend = FP8BackendType::kAo}, e);
  });
  expect_refused("dynamo_backend", [](const Environment& e) { validate(TorchDynamoPlugin{}, e); });
  expect_refused("truth_word", [](const Environment& e) { validate(TorchDynamoPlugin{}, e); });
  expect_refused("cp_strategy", [](const Environment& e) {
    validate(TorchContextParallelConfig{.cp_comm_strategy = "ring"}, e);
  });
  expect_refused("sp_length", [](const Environment& e) {
    validate(DeepSpeedSequenceParallelConfig{.sp_seq_length_is_variable = false}, e);
  });
  expect_refused("sp_attention", [](const Environment& e) {
    validate(DeepSpeedSequenceParallelConfig{.sp_attn_implementation = "eager"}, e);
  });
}

TEST(Handlers, AVariableThatIsNoNumberIsNamedWithItsValue) {
  EXPECT_EQ(message_of([] {
              validate(TERecipeKwargs{}, Environment({{"ACCELERATE_FP8_MARGIN", "2.5"}}));
            }),
            "ACCELERATE_FP8_MARGIN is '2.5', which is not a whole number.");
}

TEST(Handlers, ImpossibleNumbersAreRefused) {
  EXPECT_EQ(message_of([] { validate(GradScalerKwargs{.growth_factor = 1.0}, kEmpty); }),
            "growth_factor is 1, but it must be above 1.");
  EXPECT_EQ(message_of([] { validate(GradScalerKwargs{.backoff_factor = 1.5}, kEmpty); }),
            "backoff_factor is 1.5, but it must be below 1.");
  EXPECT_NO_THROW(validate(GradScalerKwargs{.growth_factor = 1.0, .enabled = false}, kEmpty));
  EXPECT_EQ(message_of([] {
              validate(ProfileKwargs{.schedule_option = ProfileSchedule{.active = 0}}, kEmpty);
            }),
            "schedule_option.active is 0, but it must be at least 1.");
  EXPECT_EQ(message_of([] { validate(GradientAccumulationPlugin{.num_steps = 0}, kEmpty); }),
            "num_steps is 0, but it must be at least 1.");
}

TEST(Handlers, PowerSgdOptionsAreChecked) {
  const auto hook = [](Value::Dict options) {
    return DistributedDataParallelKwargs{.comm_hook = DDPCommunicationHookType::kPowerSgd,
                                         .comm_state_option = std::move(options)};
  };
  const auto unknown = message_of([&] { validate(hook({{"warmstart", true}}), kEmpty); });
  EXPECT_NE(unknown.find("the unknown key 'warmstart'"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("Did you mean 'warm_start'?"), std::string::npos) << unknown;

  EXPECT_EQ(message_of([&] { validate(hook({{"warm_start", 1}}), kEmpty); }),
            "comm_state_option has warm_start = 1, which is not true or false.");
  EXPECT_EQ(message_of([&] { validate(hook({{"start_powerSGD_iter", "2"}}), kEmpty); }),
            "comm_state_option has start_powerSGD_iter = '2', which is not a whole number.");

  const auto early = message_of([&] { validate(hook({{"start_powerSGD_iter", 1}}), kEmpty); });
  EXPECT_NE(early.find("start_powerSGD_iter = 1"), std::string::npos) << early;
  EXPECT_NO_THROW(validate(
      hook({{"start_powerSGD_iter", 1}, {"use_error_feedback", false}, {"warm_start", false}}),
      kEmpty));
}

TEST(Handlers, AWrapperThatIsNoWrapperIsRefused) {
  EXPECT_EQ(
      message_of([] {
        validate(DistributedDataParallelKwargs{.comm_wrapper = DDPCommunicationHookType::kPowerSgd},
                 kEmpty);
      }),
      "comm_wrapper is 'power_sgd', which cannot wrap a hook. Choose one of: no, fp16, bf16.");
}

TEST(Handlers, WhatHasNoEffectIsSaid) {
  EXPECT_EQ(
      warnings_of(DistributedDataParallelKwargs{.comm_wrapper = DDPCommunicationHookType::kBf16}),
      detail::Warnings{"comm_wrapper = bf16 does nothing without a comm_hook."});
  EXPECT_EQ(warnings_of(TorchTensorParallelConfig{.enable_async_tp = true}),
            detail::Warnings{"enable_async_tp has no effect: it is not supported."});
  EXPECT_EQ(warnings_of(AutocastKwargs{}), detail::Warnings{});
}

TEST(Handlers, ASwitchThatPythonReadsAsFalseIsTrueWithAWarning) {
  const auto environment = Environment({{"PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "1"}});
  detail::Warnings warnings;
  const auto config = detail::resolve(DeepSpeedSequenceParallelConfig{}, environment, warnings);
  EXPECT_EQ(config.sp_seq_length_is_variable, true);
  EXPECT_EQ(warnings, detail::Warnings{
                          "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE is '1', which counts as "
                          "true. Python Accelerate takes only the word 'true' here and would read "
                          "it as false."});
  EXPECT_EQ(warnings_of(DeepSpeedSequenceParallelConfig{},
                        Environment({{"PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "True"}})),
            detail::Warnings{});
}

TEST(Fp8Recipes, AConfigIsTakenAsItIs) {
  const auto recipe = resolved(AORecipeKwargs{.config = Float8LinearConfig{.recipe = "rowwise"}},
                               Environment({{"ACCELERATE_FP8_PAD_INNER_DIM", "true"}}));
  EXPECT_FALSE(recipe.config->pad_inner_dim);
  EXPECT_EQ(recipe.pad_inner_dim, std::nullopt);
  EXPECT_EQ(
      message_of([] {
        validate(AORecipeKwargs{.config = Float8LinearConfig{.recipe = "colwise"}}, kEmpty);
      }),
      "config.recipe is 'colwise'. Choose one of: tensorwise, rowwise, rowwise_with_gw_hp. Did "
      "you mean 'rowwise'?");
}

TEST(Fp8Recipes, BlockScalingExcludesAHistoryOfMaxima) {
  EXPECT_NO_THROW(validate(TERecipeKwargs{.use_mxfp8_block_scaling = true}, kEmpty));
  EXPECT_THROW(
      validate(TERecipeKwargs{.amax_history_len = 8, .use_mxfp8_block_scaling = true}, kEmpty),
      ConfigError);
}

TEST(Fp8Recipes, TheDeprecatedRecordStandsForTheRecipeOfItsBackend) {
  const FP8RecipeKwargs te{.margin = 4, .backend = FP8BackendType::kTe};
  // Python leaves the level of the other backend open, and drops what equals the default.
  expect_like_python("FP8RecipeKwargs/te", te, {{"opt_level", "O2"}});
  expect_kwargs_like_python("FP8RecipeKwargs/te", te, {{"backend", "TE"}});
  EXPECT_EQ(std::get<TERecipeKwargs>(recipe_of(te, kEmpty)), (TERecipeKwargs{.margin = 4}));

  const auto msamp = Environment({{"ACCELERATE_FP8_BACKEND", "msamp"}});
  EXPECT_EQ(std::get<MSAMPRecipeKwargs>(recipe_of({.opt_level = OptLevel::kO1}, msamp)),
            (MSAMPRecipeKwargs{.opt_level = OptLevel::kO1}));
  EXPECT_EQ(warnings_of(te),
            detail::Warnings{"FP8RecipeKwargs is deprecated. Use TERecipeKwargs or "
                             "MSAMPRecipeKwargs instead."});
}

TEST(Configurations, HavePythonsFieldsAndDefaultsAndOurs) {
  expect_like_python("DataLoaderConfiguration/default", DataLoaderConfiguration{},
                     {{"already_sharded", false}});
  expect_like_python("ProjectConfiguration/default", ProjectConfiguration{},
                     {{"save_on_preemption", false}, {"monitor", false}});
}

TEST(Configurations, TheLoggingDirectoryFollowsTheProjectUnlessItIsGiven) {
  const Json ours{{"save_on_preemption", false}, {"monitor", false}};
  expect_like_python("ProjectConfiguration/project",
                     ProjectConfiguration{.project_dir = "run", .total_limit = 3}, ours);
  expect_like_python("ProjectConfiguration/logging",
                     ProjectConfiguration{.project_dir = "run", .logging_dir = "log"}, ours);
  ProjectConfiguration project;
  project.set_directories("run");
  project.set_directories("other");
  EXPECT_EQ(project.project_dir, "other");
  EXPECT_EQ(project.logging_dir, "run");
}

TEST(Configurations, GradientAccumulationLeavesSchedulersAloneUnlessAsked) {
  const Json off{{"adjust_scheduler", false}};
  expect_like_python("GradientAccumulationPlugin/default", GradientAccumulationPlugin{}, off);
  const GradientAccumulationPlugin plugin{.num_steps = 4, .sync_each_batch = true};
  expect_like_python("GradientAccumulationPlugin/changed", plugin, off);
  expect_kwargs_like_python("GradientAccumulationPlugin/changed", plugin);
  EXPECT_EQ(resolved(GradientAccumulationPlugin{.adjust_scheduler = true}, kEmpty).adjust_scheduler,
            true);
}

TEST(Configurations, CompilationIsReadFromTheEnvironment) {
  expect_like_python("TorchDynamoPlugin/environment", TorchDynamoPlugin{});
  expect_kwargs_like_python("TorchDynamoPlugin/environment", TorchDynamoPlugin{});
  const TorchDynamoPlugin plugin{.mode = "max-autotune"};
  expect_like_python("TorchDynamoPlugin/all", plugin);
  expect_kwargs_like_python("TorchDynamoPlugin/all", plugin);
  EXPECT_EQ(message_of([] { validate(TorchDynamoPlugin{.mode = "max-autotun"}, kEmpty); }),
            "mode is 'max-autotun'. Choose one of: default, reduce-overhead, max-autotune, "
            "max-autotune-no-cudagraphs. Did you mean 'max-autotune'?");
}

TEST(Configurations, QuantisationFindsItsTypes) {
  const BnbQuantizationConfig eight{.load_in_8bit = true};
  expect_like_python("BnbQuantizationConfig/eight", eight);
  EXPECT_EQ(eight.target_dtype(), "int8");
  const BnbQuantizationConfig four{.load_in_4bit = true,
                                   .bnb_4bit_quant_type = "nf4",
                                   .bnb_4bit_compute_dtype = FloatType::kBf16,
                                   .skip_modules = {{"lm_head"}}};
  expect_like_python("BnbQuantizationConfig/four", four);
  EXPECT_EQ(four.target_dtype(), "int4");
  EXPECT_EQ(warnings_of(BnbQuantizationConfig{.llm_int8_threshold = 5.0, .load_in_4bit = true}),
            detail::Warnings{"llm_int8_threshold has no effect on a model in 4 bits."});
}

TEST(Configurations, QuantisationNeedsOneWidthAndAKnownType) {
  expect_refused("bnb_both", [](const Environment& e) {
    validate(BnbQuantizationConfig{.load_in_8bit = true, .load_in_4bit = true}, e);
  });
  expect_refused("bnb_none", [](const Environment& e) { validate(BnbQuantizationConfig{}, e); });
  expect_refused("bnb_type", [](const Environment& e) {
    validate(BnbQuantizationConfig{.load_in_4bit = true, .bnb_4bit_quant_type = "np4"}, e);
  });
}

TEST(Supported, WhatCannotBeGrantedNamesFeatureReasonAndAlternative) {
  EXPECT_EQ(message_of<UnsupportedError>([] { detail::require_supported(FP8BackendType::kMsamp); }),
            "The FP8 backend MSAMP is not supported: MS-AMP is a Python package that is no longer "
            "maintained. Use AO (AORecipeKwargs).");
  EXPECT_EQ(message_of<UnsupportedError>([] { detail::require_supported(DistributedType::kXla); }),
            "distributed_type XLA is not supported: LibTorch for C++ has no back end for this "
            "device. Use MULTI_GPU or MULTI_CPU.");
  EXPECT_EQ(message_of<UnsupportedError>([] { detail::require_supported(DynamoBackend::kTvm); }),
            "The dynamo backend TVM is not supported: it compiles Python code. Use one of: NO, "
            "EAGER, CUDAGRAPHS, INDUCTOR.");
}

TEST(Supported, RecipesOfOurOwnAreGrantedAndThatOfAPythonPackageIsNot) {
  using detail::require_supported;
  EXPECT_NO_THROW(require_supported(KwargsHandler(AORecipeKwargs{})));
  EXPECT_NO_THROW(require_supported(KwargsHandler(GradScalerKwargs{})));
  EXPECT_NO_THROW(require_supported(KwargsHandler(TERecipeKwargs{})));
  EXPECT_THROW(require_supported(KwargsHandler(MSAMPRecipeKwargs{})), UnsupportedError);
  EXPECT_NO_THROW(require_supported(KwargsHandler(FP8RecipeKwargs{})));
  ASSERT_EQ(::setenv("ACCELERATE_FP8_BACKEND", "MSAMP", 1), 0);
  const auto message =
      message_of<UnsupportedError>([] { require_supported(KwargsHandler(FP8RecipeKwargs{})); });
  ::unsetenv("ACCELERATE_FP8_BACKEND");
  EXPECT_TRUE(message.starts_with("The FP8 backend MSAMP is not supported")) << message;
  EXPECT_THROW(
      require_supported(KwargsHandler(ProfileKwargs{.activities = {{ProfilerActivity::kHpu}}})),
      UnsupportedError);
  EXPECT_THROW(require_supported(ComputeEnvironment::kAmazonSagemaker), UnsupportedError);
  EXPECT_NO_THROW(require_supported(DistributedType::kMultiCpu));
  EXPECT_NO_THROW(
      require_supported(TorchDynamoPlugin{.backend = DynamoBackend::kTvm, .disable = true}));
  EXPECT_THROW(require_supported(TorchDynamoPlugin{.backend = DynamoBackend::kTvm}),
               UnsupportedError);
}

}  // namespace
}  // namespace accelerate
