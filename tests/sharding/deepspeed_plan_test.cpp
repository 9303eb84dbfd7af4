// A DeepSpeed configuration as a plan, its optimizer and scheduler, and who steps.
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <numbers>

#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "accelerate/optim.h"
#include "accelerate/optimizer.h"
#include "accelerate/scheduler.h"
#include "accelerate/sharding.h"
#include "nets.h"
#include "sharding/deepspeed_objects.h"
#include "sharding/deepspeed_steps.h"
#include "sharding/shard_plan.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using detail::DeepSpeedObjects;
using detail::DeepSpeedSettings;
using detail::GivenObject;
using detail::sharding::OffloadTarget;
using detail::sharding::plan_from;
using detail::sharding::ShardGroups;
using detail::sharding::ShardLevel;
using detail::sharding::ShardPlan;
using detail::sharding::ShardRun;
using test::message_of;
using testing::NetImpl;
using Names = std::vector<std::string>;

const Environment kEmpty;
constexpr ShardRun kFour{.num_processes = 4, .processes_per_node = 4};

/// Of a configuration with these entries of its section zero_optimization.
DeepSpeedPlugin plugin_of(Value::Dict zero, Value::Dict more = {}) {
  more.set("zero_optimization", std::move(zero));
  return resolved(DeepSpeedPlugin{.hf_ds_config = std::move(more)}, kEmpty);
}

ShardPlan plan_of(Value::Dict zero, Value::Dict more = {}, const ShardRun& run = kFour) {
  return plan_from(plugin_of(std::move(zero), std::move(more)), NetImpl(), run);
}

TEST(DeepSpeedPlan, StagesAreLevels) {
  for (const std::int64_t stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    const auto plan = plan_of({{"stage", stage}});
    EXPECT_EQ(static_cast<std::int64_t>(plan.spec.level), stage);
    EXPECT_EQ(plan.spec.accumulate_unsharded, stage < 2);
    EXPECT_TRUE(plan.spec.reshard_after_forward);
    EXPECT_EQ(plan.groups, (stage == 0 ? ShardGroups{4, 1} : ShardGroups{1, 4}));
    EXPECT_EQ(plan.spec.keep_gathered_below, stage == 3 ? 100'000 : 0);
    EXPECT_FALSE(plan.autocast);
  }
}

TEST(DeepSpeedPlan, PrecisionKeepsFloat32Masters) {
  const Value::Dict on{{"enabled", true}};
  const auto bf16 = plan_of({{"stage", 2}}, {{"bf16", on}}).spec.precision;
  EXPECT_EQ(bf16.param_dtype, at::kBFloat16);
  EXPECT_TRUE(bf16.float32_masters);
  ShardRun gpu = kFour;
  gpu.on_cpu = false;
  EXPECT_EQ(plan_of({{"stage", 2}}, {{"fp16", on}}).spec.precision.param_dtype, std::nullopt);
  EXPECT_EQ(plan_of({{"stage", 2}}, {{"fp16", on}}, gpu).spec.precision.param_dtype, at::kHalf);
  EXPECT_EQ(plan_of({{"stage", 2}}, {{"bf16", on}, {"communication_data_type", "fp32"}})
                .spec.precision.reduce_dtype,
            at::kFloat);
  EXPECT_THROW(static_cast<void>(plan_of({{"stage", 2}}, {{"communication_data_type", "fp4"}})),
               ConfigError);
  const auto fp16 = plan_of({{"stage", 2}}, {{"communication_data_type", "fp16"}});
  ASSERT_EQ(fp16.warnings.size(), 1U);
  EXPECT_NE(fp16.warnings[0].find("is fp16, in which a CPU does not reduce"), std::string::npos);
  EXPECT_EQ(plan_of({{"stage", 2}}, {{"communication_data_type", "fp16"}}, gpu).warnings.size(),
            0U);
}

TEST(DeepSpeedPlan, BucketsMakeUnitsAndLimitsBoundThePrefetch) {
  EXPECT_EQ(plan_of({{"stage", 3}}).spec.units, Names{});
  const auto three = plan_of({{"stage", 3}, {"stage3_prefetch_bucket_size", 70}}).spec;
  EXPECT_EQ(three.units, (Names{"embed", "layers.0", "layers.1", "head"}));
  EXPECT_EQ(three.forward_prefetch, 1);
  EXPECT_EQ(plan_of({{"stage", 2}, {"reduce_bucket_size", 130}}).spec.units,
            (Names{"embed", "layers", "head"}));
  const auto tight =
      plan_of(
          {{"stage", 3}, {"stage3_prefetch_bucket_size", 70}, {"stage3_max_live_parameters", 100}})
          .spec;
  EXPECT_EQ(tight.forward_prefetch, 0);
  EXPECT_EQ(tight.backward_prefetch, 0);
  EXPECT_EQ(
      plan_of({{"stage", 3}, {"stage3_param_persistence_threshold", 5}}).spec.keep_gathered_below,
      5);
}

TEST(DeepSpeedPlan, LayersOfExpertsAreNotDivided) {
  auto plugin = plugin_of({{"stage", 3}, {"stage3_prefetch_bucket_size", 45}});
  plugin.transformer_moe_cls_names = "Block";
  EXPECT_EQ(plan_from(plugin, NetImpl(), kFour).spec.units,
            (Names{"embed", "layers.0", "layers.1", "head"}));
  EXPECT_EQ(set_moe_leaf_modules(plugin, NetImpl()), (Names{"layers.0", "layers.1"}));
  plugin.transformer_moe_cls_names = "Experts";
  EXPECT_EQ(
      message_of<ConfigError>([&] { static_cast<void>(set_moe_leaf_modules(plugin, NetImpl())); }),
      "Could not find the transformer layer class Experts in the model.");
}

TEST(DeepSpeedPlan, OffloadsAsTheDevicesSay) {
  const auto cpu =
      plan_of({{"stage", 2},
               {"sub_group_size", 1000},
               {"offload_optimizer",
                Value::Dict{{"device", "cpu"}, {"pin_memory", true}, {"buffer_count", 7}}}})
          .spec.offload;
  EXPECT_EQ(cpu.optimizer, OffloadTarget::kCpu);
  EXPECT_EQ(cpu.parameters, OffloadTarget::kNone);
  EXPECT_TRUE(cpu.pin_memory);
  const auto folder = std::filesystem::temp_directory_path().string();
  const auto nvme =
      plan_of(
          {{"stage", 3}, {"offload_param", Value::Dict{{"device", "nvme"}, {"nvme_path", folder}}}})
          .spec.offload;
  EXPECT_EQ(nvme.parameters, OffloadTarget::kNvme);
  EXPECT_EQ(nvme.optimizer, OffloadTarget::kNvme);
  EXPECT_EQ(nvme.folder, folder);
  EXPECT_EQ(nvme.states_folder, "");
  const auto two =
      plan_of({{"stage", 3},
               {"offload_param", Value::Dict{{"device", "nvme"}, {"nvme_path", "/"}}},
               {"offload_optimizer", Value::Dict{{"device", "nvme"}, {"nvme_path", folder}}}})
          .spec.offload;
  EXPECT_EQ(two.folder, "/");
  EXPECT_EQ(two.states_folder, folder);
  const auto message = [](const Value::Dict& zero) {
    return message_of<ConfigError>([&] { static_cast<void>(plan_of(zero)); });
  };
  EXPECT_EQ(message({{"stage", 3},
                     {"offload_param", Value::Dict{{"device", "nvme"}, {"nvme_path", "/no/x"}}}}),
            "'zero_optimization.offload_param.nvme_path' in the DeepSpeed configuration is '/no/x',"
            " which is no folder. Name a folder on the drive.");
  EXPECT_NE(message({{"stage", 0}, {"offload_optimizer", Value::Dict{{"device", "cpu"}}}})
                .find("its stage is 0"),
            std::string::npos);
}

TEST(DeepSpeedPlan, OffloadOfParametersHasNoEffectBelowStageThree) {
  const Value::Dict cpu{{"device", "cpu"}};
  const auto two = plan_of({{"stage", 2}, {"offload_optimizer", cpu}, {"offload_param", cpu}});
  EXPECT_EQ(two.spec.offload.optimizer, OffloadTarget::kCpu);
  EXPECT_EQ(two.spec.offload.parameters, OffloadTarget::kNone);
  ASSERT_EQ(two.warnings.size(), 1U);
  EXPECT_NE(two.warnings[0].find("no effect below stage 3: its stage is 2"), std::string::npos);
  // The states of the optimizer do not follow them, and no folder is needed.
  const Value::Dict nvme{{"device", "nvme"}, {"nvme_path", "/no/x"}};
  const auto one = plan_of({{"stage", 1}, {"offload_param", nvme}});
  EXPECT_EQ(one.spec.offload.optimizer, OffloadTarget::kNone);
  EXPECT_TRUE(plan_of({{"stage", 3}, {"offload_param", cpu}}).warnings.empty());
}

TEST(DeepSpeedPlan, PartitionsOfANodeAreHybridSharding) {
  const ShardRun eight{.num_processes = 8, .processes_per_node = 4};
  EXPECT_EQ(plan_of({{"stage", 3}, {"zero_hpz_partition_size", 4}}, {}, eight).groups,
            (ShardGroups{2, 4}));
  EXPECT_EQ(plan_of({{"stage", 3}, {"mics_shard_size", 2}}, {}, eight).groups, (ShardGroups{4, 2}));
  EXPECT_EQ(message_of<ConfigError>([&] {
              static_cast<void>(plan_of({{"stage", 3}, {"mics_shard_size", 3}}, {}, eight));
            }),
            "zero_optimization.mics_shard_size has 3 processes, which does not divide the 8 "
            "processes of the run: each needs as many.");
}

TEST(DeepSpeedPlan, PartitionsBesideShardsOfTheMeshAreRefused) {
  const ShardRun run{
      .num_processes = 8, .processes_per_node = 4, .mesh = ShardGroups{2, 4}, .dp_shard_size = 4};
  for (const char* const key : {"zero_hpz_partition_size", "mics_shard_size"}) {
    EXPECT_EQ(message_of<ConfigError>(
                  [&] { static_cast<void>(plan_of({{"stage", 3}, {key, 2}}, {}, run)); }),
              std::string("'zero_optimization.") + key +
                  "' in the DeepSpeed configuration is 2, and dp_shard_size of "
                  "parallelism_config is 4: both say which processes share a model. Leave one of "
                  "them out.");
  }
}

// ---- the optimizer of the configuration
// -----------------------------------------------------------

DeepSpeedSettings optimizer(const char* type, Value::Dict params) {
  DeepSpeedSettings settings;
  settings.optimizer_type = type;
  settings.optimizer_params = std::move(params);
  return settings;
}

template <class Options>
const Options& options_of(const torch::optim::Optimizer& made, std::size_t group = 0) {
  return dynamic_cast<const GroupOptions<Options>&>(made.param_groups()[group].options()).values;
}

TEST(DummyOptim, BecomesTheOptimizerOfTheConfiguration) {
  const auto weight = torch::zeros({3}, torch::requires_grad());
  const DummyOptim dummy({weight}, {.lr = 0.1, .weight_decay = 0.2});
  const auto make = [&](const char* type, Value::Dict params) {
    return detail::sharding::make_optimizer(optimizer(type, std::move(params)), dummy);
  };
  const auto adamw = make("AdamW", {{"lr", 0.01}, {"betas", Value::List{0.8, 0.9}}});
  EXPECT_EQ(options_of<AdamWOptions>(*adamw).lr, 0.01);
  EXPECT_EQ(options_of<AdamWOptions>(*adamw).betas, (std::pair{0.8, 0.9}));
  EXPECT_EQ(options_of<AdamWOptions>(*adamw).weight_decay, 0);  // DeepSpeed's default
  EXPECT_TRUE(adamw->param_groups()[0].params()[0].is_same(weight));
  // Adam decouples its decay unless told otherwise.
  EXPECT_EQ(options_of<AdamWOptions>(*make("adam", {{"torch_adam", true}})).lr, 0.001);
  // AdamW does so whatever the flag says.
  for (const bool flag : {true, false}) {
    const auto flagged = make("AdamW", {{"torch_adam", true}, {"adam_w_mode", flag}});
    EXPECT_EQ(options_of<AdamWOptions>(*flagged).lr, 0.001);
  }
  const auto adam = make("Adam", {{"adam_w_mode", false}, {"weight_decay", 0.3}});
  EXPECT_EQ(options_of<AdamOptions>(*adam).weight_decay, 0.3);
  EXPECT_EQ(options_of<AdagradOptions>(*make("Adagrad", {})).lr, 0.01);
  EXPECT_EQ(options_of<LionOptions>(*make("Lion", {})).lr, 0.001);
  EXPECT_EQ(options_of<SGDOptions>(*make("SGD", {{"momentum", 0.9}})).momentum, 0.9);
}

TEST(DummyOptim, GroupsKeepWhatTheyHaveOfTheirOwn) {
  const DummyOptim dummy({{{torch::zeros({1})}, {.lr = 0.1, .weight_decay = 0.2}},
                          {{torch::zeros({2})}, {.lr = 0.1, .weight_decay = 0}}});
  const auto made = detail::sharding::make_optimizer(
      optimizer("AdamW", {{"lr", 0.1}, {"weight_decay", 0.2}}), dummy);
  EXPECT_EQ(options_of<AdamWOptions>(*made, 0).weight_decay, 0.2);
  EXPECT_EQ(options_of<AdamWOptions>(*made, 1).weight_decay, 0);
}

TEST(DummyOptim, RefusesWhatTheConfigurationCannotHave) {
  DummyOptim dummy({torch::zeros({3})});
  EXPECT_THROW(dummy.step(), StateError);
  const auto message = [&](const char* type, Value::Dict params) {
    return message_of<ConfigError>([&] {
      static_cast<void>(
          detail::sharding::make_optimizer(optimizer(type, std::move(params)), dummy));
    });
  };
  EXPECT_EQ(message("OneBitAdam", {}),
            "'optimizer.type' in the DeepSpeed configuration is 'OneBitAdam', which is not "
            "available. Choose one of: adam, adamw, adagrad, lion, sgd.");
  EXPECT_EQ(message("AdamW", {{"max_grad_norm", 1.0}}),
            "'optimizer.params' of AdamW in the DeepSpeed configuration: max_grad_norm is not its "
            "business. Set 'gradient_clipping' instead.");
  EXPECT_NE(message("AdamW", {{"bias_correction", false}}).find("bias_correction is false"),
            std::string::npos);
  EXPECT_NE(
      message("AdamW", {{"beta", 1.0}}).find("'optimizer.params' in the DeepSpeed configuration: "),
      std::string::npos);
}

TEST(DummyOptim, OnlySomeOptimizersMoveToTheHost) {
  const std::vector<at::Tensor> params{torch::zeros({3}, torch::requires_grad())};
  DeepSpeedSettings moved;
  moved.optimizer_device = "cpu";
  EXPECT_NO_THROW(detail::sharding::check_offloaded(moved, AdamW(params)));
  EXPECT_NO_THROW(detail::sharding::check_offloaded({}, SGD(params)));
  EXPECT_EQ(
      message_of<ConfigError>([&] { detail::sharding::check_offloaded(moved, RMSprop(params)); }),
      "The DeepSpeed configuration has offload_optimizer, but "
      "accelerate::OptimizerWith<accelerate::RMSpropOptions> has no form for the CPU there. Use "
      "AdamW, Adam, Adagrad or Lion, or set zero_force_ds_cpu_optimizer to false.");
  moved.force_cpu_optimizer = false;
  EXPECT_NO_THROW(detail::sharding::check_offloaded(moved, RMSprop(params)));
}

// ---- schedulers
// -----------------------------------------------------------------------------------

/// The learning rate before the first step and after each of `steps`.
std::vector<double> rates(LRScheduler& scheduler, int steps) {
  std::vector<double> lrs = scheduler.get_last_lr();
  for (int i = 0; i < steps; ++i) {
    scheduler.step();
    lrs.push_back(scheduler.get_last_lr()[0]);
  }
  return lrs;
}

void expect_near(const std::vector<double>& lrs, const std::vector<double>& expected) {
  ASSERT_EQ(lrs.size(), expected.size());
  for (std::size_t i = 0; i < lrs.size(); ++i) EXPECT_NEAR(lrs[i], expected[i], 1e-12) << i;
}

class DeepSpeedSchedulers : public ::testing::Test {
 protected:
  AdamW optimizer_{std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())}, {.lr = 2.0}};
};

TEST_F(DeepSpeedSchedulers, WarmupRisesByTheLogarithmOrLinearly) {
  WarmupLR by_log(optimizer_, {.warmup_min_lr = 1.0, .warmup_max_lr = 3.0, .warmup_num_steps = 4});
  const auto at = [](double n) { return 1 + 2 * std::log(n) / std::log(4.0); };
  expect_near(rates(by_log, 6), {1, 1, at(2), at(3), 3, 3, 3});
  WarmupLR linear(optimizer_,
                  {.warmup_max_lr = 4.0, .warmup_num_steps = 4, .warmup_type = "linear"});
  expect_near(rates(linear, 6), {0, 0, 1, 2, 3, 4, 4});
  // Two at least, also where DummyScheduler's default 0 is taken.
  WarmupLR none(optimizer_, {.warmup_max_lr = 4.0, .warmup_num_steps = 0, .warmup_type = "linear"});
  expect_near(rates(none, 3), {0, 0, 2, 4});
}

TEST_F(DeepSpeedSchedulers, WarmupDecayFallsToZero) {
  WarmupDecayLR decay(
      optimizer_,
      {.total_num_steps = 6, .warmup_max_lr = 4.0, .warmup_num_steps = 2, .warmup_type = "linear"});
  expect_near(rates(decay, 9), {0, 0, 2, 4, 3, 2, 1, 0, 0, 0});
}

TEST_F(DeepSpeedSchedulers, WarmupCosineFallsToItsLowestFactor) {
  WarmupCosineLR cosine(optimizer_, {.total_num_steps = 6,
                                     .warmup_min_ratio = 0.5,
                                     .warmup_num_steps = 2,
                                     .cos_min_ratio = 0.1,
                                     .warmup_type = "linear"});
  const auto at = [](double part) {
    return 2 * (0.1 + 0.9 * (1 + std::cos(std::numbers::pi * part)) / 2);
  };
  expect_near(rates(cosine, 8), {1, 1, 1.5, at(0.25), at(0.5), at(0.75), at(1), at(1), at(1)});
}

TEST_F(DeepSpeedSchedulers, RangeTestRisesInStepsOrSmoothly) {
  LRRangeTest smooth(optimizer_, {.lr_range_test_min_lr = 1.0, .lr_range_test_step_size = 2});
  expect_near(rates(smooth, 3), {1, 1.5, 2, 2.5});
  LRRangeTest stairs(
      optimizer_,
      {.lr_range_test_min_lr = 1.0, .lr_range_test_step_size = 2, .lr_range_test_staircase = true});
  expect_near(rates(stairs, 3), {1, 1, 2, 2});
}

TEST_F(DeepSpeedSchedulers, OneCycleTurnsTheMomentumTheOtherWay) {
  OneCycle cycle(optimizer_, {.cycle_min_lr = 1.0,
                              .cycle_max_lr = 3.0,
                              .decay_lr_rate = 1.0,
                              .cycle_first_step_size = 2,
                              .decay_step_size = 1});
  expect_near(rates(cycle, 2), {1, 2, 3});
  EXPECT_NEAR(optimizer_.options().betas.first, 0.8, 1e-12);
  expect_near(rates(cycle, 4), {3, 2, 1, 0.5, 1.0 / 3});
  EXPECT_NEAR(optimizer_.options().betas.first, 0.9, 1e-12);
}

TEST_F(DeepSpeedSchedulers, DummySchedulerBecomesTheOneOfTheConfiguration) {
  const DummyScheduler dummy(optimizer_, {.total_num_steps = 6});
  DeepSpeedSettings settings;
  settings.scheduler_type = "WarmupDecayLR";
  settings.scheduler_params = {{"total_num_steps", 6},
                               {"warmup_max_lr", 4.0},
                               {"warmup_num_steps", 2},
                               {"warmup_type", "linear"}};
  const auto made = detail::sharding::make_scheduler(settings, dummy, optimizer_);
  expect_near(rates(*made, 3), {0, 0, 2, 4});
  settings.scheduler_params.set("warmup_num_step", 1);
  EXPECT_EQ(message_of<ConfigError>([&] {
              static_cast<void>(detail::sharding::make_scheduler(settings, dummy, optimizer_));
            }),
            "'scheduler.params' in the DeepSpeed configuration has 'warmup_num_step', which is not "
            "known here. Did you mean 'warmup_num_steps'? It may have: total_num_steps, "
            "warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type.");
  settings.scheduler_params.erase("warmup_num_step");
  // The last step that was done, -1 for none.
  settings.scheduler_params.set("last_batch_iteration", -1);
  expect_near(rates(*detail::sharding::make_scheduler(settings, dummy, optimizer_), 3),
              {0, 0, 2, 4});
  settings.scheduler_params.set("last_batch_iteration", 1);
  expect_near(rates(*detail::sharding::make_scheduler(settings, dummy, optimizer_), 3),
              {2, 4, 3, 2});
  settings.scheduler_params.set("last_batch_iteration", -2);
  EXPECT_EQ(message_of<ConfigError>([&] {
              static_cast<void>(detail::sharding::make_scheduler(settings, dummy, optimizer_));
            }),
            "'scheduler.params.last_batch_iteration' in the DeepSpeed configuration is -2, but "
            "must be -1 (a new schedule) or more.");
  settings.scheduler_type = "Cosine";
  EXPECT_THROW(static_cast<void>(detail::sharding::make_scheduler(settings, dummy, optimizer_)),
               ConfigError);
  const DummyScheduler own(optimizer_, {.lr_scheduler_callable = [](auto& one) {
                             return std::make_shared<LRRangeTest>(one, LRRangeTestOptions{});
                           }});
  EXPECT_NE(std::dynamic_pointer_cast<LRRangeTest>(
                detail::sharding::make_scheduler(settings, own, optimizer_)),
            nullptr);
}

struct WideImpl : NetImpl, HiddenSizes {
  [[nodiscard]] std::vector<std::int64_t> hidden_sizes() const override { return {8, 16}; }
};

TEST_F(DeepSpeedSchedulers, ObjectsOfPrepareAreDescribed) {
  DeepSpeedObjects objects;
  const WideImpl wide;
  DummyOptim dummy({torch::zeros({3})}, {.lr = 0.5, .weight_decay = 0.25});
  const DummyScheduler scheduler(dummy, {.total_num_steps = 9, .warmup_num_steps = 2});
  detail::sharding::describe(objects, &wide, &dummy, &scheduler);
  EXPECT_TRUE(objects.has_model);
  EXPECT_EQ(objects.hidden_sizes, (std::vector<std::int64_t>{8, 16}));
  EXPECT_EQ(objects.optimizer, GivenObject::kDummy);
  EXPECT_EQ(objects.lr, 0.5);
  EXPECT_EQ(objects.weight_decay, 0.25);
  EXPECT_EQ(objects.scheduler, GivenObject::kDummy);
  EXPECT_EQ(objects.scheduler_lr, 0.5);
  EXPECT_EQ(objects.total_num_steps, 9);
  EXPECT_EQ(objects.warmup_num_steps, 2);
  DeepSpeedObjects real;
  const WarmupLR warmup(optimizer_, {});
  detail::sharding::describe(real, nullptr, &optimizer_, &warmup);
  EXPECT_FALSE(real.has_model);
  EXPECT_EQ(real.optimizer, GivenObject::kReal);
  EXPECT_EQ(real.scheduler, GivenObject::kReal);
}

// ---- who steps
// ------------------------------------------------------------------------------------

TEST(DeepSpeedSteps, BackwardStepsAtTheEndOfABatch) {
  detail::sharding::DeepSpeedSteps steps({.gradient_clipping = 0.5});
  std::vector<std::string> calls;
  bool overflow = false;
  const detail::sharding::StepParts parts{
      .clip =
          [&](double max_norm) {
            calls.push_back("clip " + std::to_string(max_norm));
            return torch::tensor(2.0);
          },
      .step =
          [&] {
            calls.emplace_back("step");
            return !overflow;
          },
      .zero_grad = [&] { calls.emplace_back("zero_grad"); },
      .step_scheduler = [&] { calls.emplace_back("scheduler"); }};
  EXPECT_FALSE(steps.clip_grad_norm_(0.5).defined());
  steps.after_backward(/*synchronizes=*/false, parts);
  EXPECT_TRUE(calls.empty());
  steps.after_backward(/*synchronizes=*/true, parts);
  EXPECT_EQ(calls, (Names{"clip 0.500000", "step", "zero_grad", "scheduler"}));
  EXPECT_EQ(steps.clip_grad_norm_(0.5).item<double>(), 2.0);

  calls.clear();
  overflow = true;
  steps.after_backward(/*synchronizes=*/true, parts);
  EXPECT_EQ(calls, (Names{"clip 0.500000", "step", "zero_grad"}));
}

TEST(DeepSpeedSteps, WithoutClippingTheNormIsStillKnown) {
  detail::sharding::DeepSpeedSteps steps(DeepSpeedSettings{});
  double most = 0;
  steps.after_backward(true, {.clip =
                                  [&](double max_norm) {
                                    most = max_norm;
                                    return torch::tensor(3.0);
                                  },
                              .step = [] { return true; },
                              .zero_grad = [] {},
                              .step_scheduler = [] {}});
  EXPECT_TRUE(std::isinf(most));
  EXPECT_EQ(steps.clip_grad_norm_(0).item<double>(), 3.0);
}

TEST(DeepSpeedSteps, TheProgramsOwnCallsDoNothing) {
  auto weight = torch::ones({2}, torch::requires_grad());
  const auto core = detail::optim::make_optimizer_core(
      std::make_shared<SGD>(std::vector<at::Tensor>{weight}, SGDOptions{.lr = 1.0}));
  core->stepped_in_backward = true;
  AcceleratedOptimizer handle(core);
  weight.mutable_grad() = torch::ones({2});
  handle.step();
  handle.zero_grad();
  EXPECT_TRUE(torch::equal(weight, torch::ones({2})));
  EXPECT_TRUE(weight.grad().defined());
  core->step();
  core->zero_grad();
  EXPECT_TRUE(torch::equal(weight, torch::zeros({2})));
  EXPECT_FALSE(weight.grad().defined());
}

TEST(DeepSpeedSteps, AnOverflowSkipsTheStepAndFollowsDeepSpeedsRule) {
  EXPECT_EQ(detail::sharding::loss_scaling({.fp16 = true}, /*on_cpu=*/true).scaling, nullptr);
  EXPECT_EQ(detail::sharding::loss_scaling({.bf16 = true}, /*on_cpu=*/false).scaling, nullptr);
  const auto [scaling, state] = detail::sharding::loss_scaling(
      {.fp16 = true, .initial_scale_power = 3, .hysteresis = 2}, /*on_cpu=*/false);
  auto weight = torch::ones({2}, torch::requires_grad());
  const auto core = detail::optim::make_optimizer_core(
      std::make_shared<SGD>(std::vector<at::Tensor>{weight}, SGDOptions{.lr = 1.0}));
  core->scaling = scaling;
  scaling->add(core);
  std::vector<double> factors;
  for (const double gradient :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity(), 4.0}) {
    static_cast<void>(scaling->scale(torch::ones({})));
    weight.mutable_grad() = torch::full({2}, gradient);
    core->step();
    EXPECT_EQ(core->step_was_skipped, std::isinf(gradient));
    factors.push_back(scaling->scaler().get_scale());
  }
  EXPECT_EQ(factors, (std::vector<double>{8, 4, 4}));
  EXPECT_TRUE(torch::equal(weight, torch::zeros({2})));  // 1 - 4 / 4

  // Another run goes on with the same factor, at the same place of the rule.
  const auto resumed = detail::sharding::loss_scaling(
      {.fp16 = true, .initial_scale_power = 16, .hysteresis = 2}, /*on_cpu=*/false);
  resumed.state->load_state_dict(state->state_dict());
  EXPECT_EQ(resumed.scaling->scaler().get_scale(), 4);
  EXPECT_EQ(resumed.state->state_dict(), state->state_dict());
}

TEST(DeepSpeedSteps, Bf16OnlySkipsStepsWhenAsked) {
  const auto scaling =
      detail::sharding::loss_scaling({.bf16 = true, .check_grad_overflow = true}, /*on_cpu=*/true)
          .scaling;
  ASSERT_NE(scaling, nullptr);
  EXPECT_EQ(scaling->scaler().get_scale(), 1);
}

// ---- functions of Python's names
// ------------------------------------------------------------------

TEST(ActivePlugin, IsThatOfTheRun) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  const auto plugin = std::make_shared<DeepSpeedPlugin>(plugin_of({{"stage", 2}}));
  {
    const AcceleratorState state({.cpu = true, .deepspeed_plugins = {{"default", plugin}}},
                                 {.deepspeed = true});
    EXPECT_EQ(get_active_deepspeed_plugin(state), plugin);
  }
  AcceleratorState::_reset_state();
  const AcceleratorState plain({.cpu = true}, {});
  EXPECT_NE(message_of<StateError>([&] {
              static_cast<void>(get_active_deepspeed_plugin(plain));
            }).find("Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled."),
            std::string::npos);
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
}

}  // namespace
}  // namespace accelerate
