// What `prepare` makes of DeepSpeed configurations and dummies, whatever the calls they come in.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "parallel/engine.h"
#include "sharding/sharded_nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate::deepspeed_prepare_test {
namespace {

using test::anew;
using test::has;
using test::message_of;
using test::Mlp;
using test::TinyGpt;
using Dict = Value::Dict;

const Dict kSgd{{"optimizer", Dict{{"type", "SGD"}, {"params", Dict{{"lr", 0.5}}}}}};
const Dict kWarmup{{"type", "WarmupLR"},
                   {"params", Dict{{"warmup_max_lr", 1.0},
                                   {"warmup_min_lr", 0.1},
                                   {"warmup_type", "linear"},
                                   {"warmup_num_steps", 10},
                                   {"last_batch_iteration", -1}}}};

DeepSpeedPlugin plugin_of(std::int64_t stage, const Dict& more = {}) {
  Dict zero{{"stage", stage}, {"stage3_param_persistence_threshold", 0}};
  Dict tree{{"train_micro_batch_size_per_gpu", 4}, {"zero_optimization", std::move(zero)}};
  for (const auto& [key, value] : more) tree.set(key.to_string(), value);
  return {.hf_ds_config = std::move(tree)};
}

Mlp make_net() {
  torch::manual_seed(3);
  return Mlp();
}

torch::Tensor input(const Accelerator& accelerator) {
  return test::input_of(accelerator.process_index(), /*step=*/0);
}

/// The bias of the last layer after one step.
torch::Tensor stepped(Accelerator& accelerator, PreparedModel<Mlp>& model) {
  accelerator.backward(model(input(accelerator)).pow(2).mean());
  return gathered_parameters(model, {}, [&] { return model.parameters().back().detach().clone(); });
}

struct WideGptImpl : test::TinyGptImpl, HiddenSizes {
  [[nodiscard]] std::vector<std::int64_t> hidden_sizes() const override { return {64}; }
};
TORCH_MODULE(WideGpt);

/// With the keys of the files that Python Accelerate's own tests train by.
Dict file_of_python(std::int64_t stage) {
  Dict zero{{"stage", stage},
            {"offload_optimizer", Dict{{"device", "cpu"}, {"pin_memory", true}}},
            {"overlap_comm", true},
            {"contiguous_gradients", true},
            {"reduce_bucket_size", "auto"}};
  if (stage == 3) {
    zero.set("offload_param", Dict{{"device", "cpu"}, {"nvme_path", "/nvme"}});
    zero.set("sub_group_size", 1e9);
    zero.set("stage3_prefetch_bucket_size", "auto");
    zero.set("stage3_param_persistence_threshold", "auto");
    zero.set("stage3_gather_16bit_weights_on_model_save", "auto");
  }
  const Dict adam{
      {"lr", "auto"}, {"weight_decay", "auto"}, {"torch_adam", true}, {"adam_w_mode", true}};
  return {{"fp16", Dict{{"enabled", "auto"}, {"loss_scale", 0}}},
          {"bf16", Dict{{"enabled", "auto"}}},
          {"optimizer", Dict{{"type", "AdamW"}, {"params", adam}}},
          {"scheduler", Dict{{"type", "WarmupLR"},
                             {"params", Dict{{"warmup_min_lr", "auto"},
                                             {"warmup_max_lr", "auto"},
                                             {"warmup_num_steps", "auto"}}}}},
          {"zero_optimization", std::move(zero)},
          {"gradient_accumulation_steps", 1},
          {"gradient_clipping", "auto"},
          {"steps_per_print", 2000},
          {"train_batch_size", "auto"},
          {"train_micro_batch_size_per_gpu", 4},
          {"wall_clock_breakdown", false}};
}

TEST(DeepSpeedPrepare, TakesTheFilesOfPythonsTests) {
  on_processes(2, [] {
    for (const std::int64_t stage : {1, 2, 3}) {
      Accelerator accelerator(
          anew({.deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = file_of_python(stage)}}));
      auto net = WideGpt();
      DummyOptim dummy(net->parameters(), {.lr = 0.01});
      DummyScheduler schedule(dummy, {.total_num_steps = 8, .warmup_num_steps = 2});
      auto [model, optimizer, scheduler] =
          accelerator.prepare(net, std::move(dummy), std::move(schedule));
      accelerator.backward(model(torch::zeros({1, 4}, torch::kLong)).pow(2).mean());
      EXPECT_EQ(accelerator.deepspeed_plugin()->get_value("train_batch_size"), Value(8));
    }
  });
}

TEST(DeepSpeedPrepare, FieldsOfAPluginAskForOffloadOfStageTwoAsPythonsTestDoes) {
  on_processes(2, [] {
    Accelerator accelerator(
        anew({.gradient_accumulation_steps = 1,
              .deepspeed_plugin = DeepSpeedPlugin{.gradient_accumulation_steps = std::int64_t{1},
                                                  .gradient_clipping = 1.0,
                                                  .zero_stage = 2,
                                                  .offload_optimizer_device = "cpu",
                                                  .offload_param_device = "cpu",
                                                  .zero3_init_flag = false}}));
    auto net = make_net();
    auto data =
        make_data_loader(std::pair{torch::zeros({8, 3}), torch::zeros({8})}, {.batch_size = 4});
    auto [model, optimizer, loader] =
        accelerator.prepare(net, AdamW(net->parameters(), {.lr = 0.1}), std::move(data));
    EXPECT_FALSE(stepped(accelerator, model).equal(make_net()->second->bias));
  });
}

TEST(DeepSpeedPrepare, SeveralAcceleratorsShareThePluginsOfTheFirst) {
  const OnProcessesOptions launched{.environment = {{"ACCELERATE_USE_DEEPSPEED", "true"},
                                                    {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"}}};
  on_processes(2, launched, [] {
    Accelerator first(
        anew({.deepspeed_plugins = {{"student", plugin_of(2)}, {"teacher", plugin_of(3)}}}));
    Accelerator second;
    EXPECT_EQ(second.deepspeed_plugin()->zero_stage, 2);
    auto net = make_net();
    auto [student, optimizer] = first.prepare(net, SGD(net->parameters(), {.lr = 0.5}));
    first.state().select_deepspeed_plugin("teacher");
    EXPECT_EQ(second.deepspeed_plugin()->zero_stage, 3);
    auto frozen = TinyGpt();
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    const auto teacher = second.prepare(frozen);
    EXPECT_TRUE(teacher._core()->engine->is_sharded());
    first.state().select_deepspeed_plugin("student");
    EXPECT_FALSE(stepped(first, student).equal(make_net()->second->bias));
  });
}

TEST(DeepSpeedPrepare, EachRunAccumulatesAsItsConfigurationSays) {
  on_processes(2, [] {
    Accelerator first(anew(
        {.deepspeed_plugins = {{"two", plugin_of(2, {{"gradient_accumulation_steps", 2}})},
                               {"three", plugin_of(2, {{"gradient_accumulation_steps", 3}})}}}));
    Accelerator second;
    auto one = make_net();
    auto other = make_net();
    auto [model, optimizer] = first.prepare(one, SGD(one->parameters(), {.lr = 0.5}));
    first.state().select_deepspeed_plugin("three");
    auto [last, stepper] = second.prepare(other, SGD(other->parameters(), {.lr = 0.5}));
    EXPECT_EQ(first.gradient_accumulation_steps(), 2);
    EXPECT_EQ(second.gradient_accumulation_steps(), 3);
    std::vector<bool> steps, others;
    for (int batch = 0; batch < 6; ++batch) {
      const auto x = torch::ones({2, 3});
      {
        const auto accumulating = first.accumulate(model);
        first.backward(model(x).pow(2).mean());
        steps.push_back(first.sync_gradients());
      }
      const auto accumulating = second.accumulate(last);
      second.backward(last(x).pow(2).mean());
      others.push_back(second.sync_gradients());
    }
    EXPECT_EQ(steps, (std::vector<bool>{false, true, false, true, false, true}));
    EXPECT_EQ(others, (std::vector<bool>{false, false, true, false, false, true}));
  });
}

TEST(DeepSpeedPrepare, ASecondAcceleratorTakesTheFsdpPluginOfTheFirst) {
  const OnProcessesOptions launched{.environment = {{"ACCELERATE_USE_FSDP", "true"}}};
  on_processes(2, launched, [] {
    const Accelerator first(
        anew({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2}}));
    const Accelerator second;
    EXPECT_TRUE(second.is_fsdp2());
    second.wait_for_everyone();
  });
}

TEST(DeepSpeedPrepare, ProcessesThatShareABatchCountOnce) {
  on_processes(2, [] {
    const auto options = [](const Dict& more) {
      return anew({.deepspeed_plugin = plugin_of(2, more),
                   .parallelism_config = ParallelismConfig{.sp_size = 2}});
    };
    for (const Value& batch : {Value("auto"), Value(4)}) {
      Accelerator accelerator(options({{"train_batch_size", batch}}));
      auto net = make_net();
      auto prepared = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.5}));
      EXPECT_EQ(accelerator.deepspeed_plugin()->get_value("train_batch_size"), Value(4));
    }
    Accelerator accelerator(options({{"train_batch_size", 6}}));
    EXPECT_TRUE(has(message_of<ConfigError>([&] { (void)accelerator.prepare(make_net()); }),
                    "train_batch_size is 6"));
  });
}

TEST(DeepSpeedPrepare, ObjectsThatComeLaterAreThoseOfTheFile) {
  on_processes(2, [] {
    Dict file = kSgd;
    file.set("scheduler", kWarmup);
    const auto options = anew({.deepspeed_plugin = plugin_of(2, file)});
    const auto wanted = [&] {
      Accelerator together(options);
      auto net = make_net();
      DummyOptim dummy(net->parameters());
      DummyScheduler schedule(dummy);
      auto [model, optimizer, scheduler] =
          together.prepare(net, std::move(dummy), std::move(schedule));
      (void)stepped(together, model);
      const auto weights = stepped(together, model);
      return std::pair(weights, scheduler.get_last_lr());
    }();
    AcceleratorState::_reset_state();
    Accelerator apart(anew({.deepspeed_plugin = plugin_of(2, file)}));
    auto net = make_net();
    auto model = apart.prepare(net);
    auto dummy = std::make_shared<DummyOptim>(net->parameters());
    auto optimizer = apart.prepare(dummy);
    auto schedule = std::make_shared<DummyScheduler>(*dummy);
    auto scheduler = apart.prepare(schedule);
    auto again = apart.prepare(schedule);
    (void)stepped(apart, model);
    EXPECT_TRUE(stepped(apart, model).equal(wanted.first));
    EXPECT_EQ(scheduler.get_last_lr(), wanted.second);
    EXPECT_EQ(again.get_last_lr(), wanted.second);
    auto late = std::make_shared<DummyScheduler>(
        *dummy, DummySchedulerOptions{.lr_scheduler_callable = [](auto& one) {
          return std::make_shared<WarmupLR>(one, WarmupLROptions{});
        }});
    EXPECT_TRUE(has(message_of<StateError>([&] { (void)apart.prepare(late); }),
                    "Prepare it in the same call as its model"));
  });
}

TEST(DeepSpeedPrepare, WholeWeightsOfStagesOneAndTwoAreOnEveryProcess) {
  on_processes(2, [] {
    auto options = anew({.deepspeed_plugin = plugin_of(2)});
    options.mixed_precision = PrecisionType::kBf16;
    Accelerator accelerator(options);
    auto net = make_net();
    auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.5}));
    (void)stepped(accelerator, model);
    const auto state = accelerator.get_state_dict(model);
    ASSERT_EQ(state.size(), 4U);
    EXPECT_EQ(state["second.bias"].scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(state["second.bias"].equal(net->second->bias));
  });
}

}  // namespace
}  // namespace accelerate::deepspeed_prepare_test
