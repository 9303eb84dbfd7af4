#include "accelerate/parallel/megatron.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "accelerate/optim.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;

const Environment kEmpty;

TEST(MegatronLMArguments, CollectsWhatPythonsMethodsSet) {
  const torch::nn::Linear net(2, 2);
  const AdamW adamw(net->parameters(), {.lr = 0.5, .betas = {0.8, 0.9}, .weight_decay = 0.25});
  MegatronLMArguments arguments(resolved(
      MegatronLMPlugin{.context_parallel_size = 1, .num_micro_batches = 4, .min_lr = 0.125},
      kEmpty));

  arguments.set_mixed_precision("bf16");
  arguments.set_training_args(/*micro_batch_size=*/2, /*dp_degree=*/3);
  arguments.set_optimizer_type(adamw);
  arguments.set_scheduler_args(/*total_num_steps=*/31, /*warmup_num_steps=*/7);

  const auto& all = arguments.megatron_lm_default_args();
  EXPECT_EQ(all.at("bf16"), Value(true));
  EXPECT_EQ(all.at("DDP_impl"), Value("local"));
  EXPECT_EQ(all.at("global_batch_size"), Value(24));
  EXPECT_EQ(all.at("optimizer"), Value("adam"));
  EXPECT_EQ(all.at("adam_beta1"), Value(0.8));
  EXPECT_EQ(all.at("lr"), Value(0.5));
  EXPECT_EQ(all.at("weight_decay"), Value(0.25));
  EXPECT_EQ(all.at("train_iters"), Value(10));
  EXPECT_EQ(all.at("lr_warmup_iters"), Value(2));
  EXPECT_EQ(all.at("min_lr"), Value(0.125));
}

TEST(MegatronLMPlugin, HasThePythonMethodsToo) {
  const torch::nn::Linear net(2, 2);
  SGD sgd(net->parameters(), {.lr = 0.5, .momentum = 0.75});
  MegatronLMPlugin plugin{.context_parallel_size = 1, .num_micro_batches = 4, .min_lr = 0.125};
  plugin.set_mixed_precision("bf16");
  plugin.set_training_args(/*micro_batch_size=*/2, /*dp_degree=*/3);
  plugin.set_optimizer_type(sgd);
  plugin.set_scheduler_args(
      MegatronLMDummyScheduler(sgd, {.total_num_steps = 31, .warmup_num_steps = 7}));

  const auto all = plugin.megatron_lm_default_args();
  EXPECT_EQ(all.at("bf16"), Value(true));
  EXPECT_EQ(all.at("global_batch_size"), Value(24));
  EXPECT_EQ(all.at("sgd_momentum"), Value(0.75));
  EXPECT_EQ(all.at("train_iters"), Value(10));
  EXPECT_EQ(all.at("lr_warmup_iters"), Value(2));
  EXPECT_EQ(all.at("clip_grad"), Value(1.0));
  EXPECT_THROW(plugin.set_network_size_args(*net), UnsupportedError);
  EXPECT_THROW(plugin.set_tensorboard_logging_options(), UnsupportedError);
}

TEST(MegatronLMArguments, RefusesWhatReadsPythonObjects) {
  const torch::nn::Linear net(2, 2);
  EXPECT_NE(message_of<UnsupportedError>([&] {
              MegatronLMArguments::set_network_size_args(*net);
            }).find("Give prepare a Pipeline"),
            std::string::npos);
  EXPECT_THROW(MegatronLMArguments::set_tensorboard_logging_options(), UnsupportedError);
}

// The formulas of OptimizerParamScheduler of Megatron-LM.
TEST(MegatronLMSchedule, GoesUpAndThenDown) {
  MegatronLMSchedule schedule{
      .lr_decay_style = "linear", .warmup_steps = 4, .decay_steps = 12, .min_lr = 0.1};
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 0), 0);
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 2), 0.5);
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 4), 1);
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 8), 0.1 + 0.5 * 0.9);
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 12), 0.1);
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 99), 0.1);
  schedule.lr_decay_style = "cosine";
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 6), 0.1 + 0.5 * (std::cos(M_PI / 4) + 1) * 0.9);
  schedule.lr_decay_style = "constant";
  EXPECT_DOUBLE_EQ(schedule.lr(1.0, 99), 1);
}

TEST(MegatronLMSchedule, RaisesTheWeightDecay) {
  MegatronLMSchedule schedule{.weight_decay_incr_style = "linear",
                              .start_weight_decay = 0.0,
                              .end_weight_decay = 0.4,
                              .train_steps = 8};
  EXPECT_DOUBLE_EQ(*schedule.weight_decay(2), 0.1);
  EXPECT_DOUBLE_EQ(*schedule.weight_decay(9), 0.4);
  schedule.weight_decay_incr_style = "cosine";
  EXPECT_DOUBLE_EQ(*schedule.weight_decay(2), 0.5 * (std::cos(M_PI * 0.75) + 1) * 0.4);
  EXPECT_EQ(MegatronLMSchedule{}.weight_decay(3), std::nullopt);
}

TEST(MegatronLMDummyScheduler, SetsRatesAndDecayOfTheOptimizer) {
  const torch::nn::Linear net(2, 2);
  AdamW adamw(net->parameters(), {.lr = 1.0, .weight_decay = 0.5});
  MegatronLMDummyScheduler scheduler(adamw);
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), std::vector<double>{1.0});  // without a schedule
  MegatronLMDummyScheduler other(adamw);
  other._follow({.warmup_steps = 2,
                 .decay_steps = 4,
                 .weight_decay_incr_style = "linear",
                 .start_weight_decay = 0.0,
                 .end_weight_decay = 1.0,
                 .train_steps = 4});
  EXPECT_DOUBLE_EQ(adamw.param_groups()[0].options().get_lr(), 0);
  other.step();
  EXPECT_DOUBLE_EQ(adamw.param_groups()[0].options().get_lr(), 0.5);
  // A step without a gradient only decays: by 0.5 * 0.25.
  const auto before = net->weight.detach().clone();
  net->weight.mutable_grad() = torch::zeros_like(net->weight);
  adamw.step();
  EXPECT_TRUE(torch::allclose(net->weight, before * 0.875));
}

}  // namespace
}  // namespace accelerate
