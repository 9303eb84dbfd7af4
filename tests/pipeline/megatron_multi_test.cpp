#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "pipeline/nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using namespace test;

AcceleratorOptions megatron(MegatronLMPlugin plugin) {
  return {.cpu = true, .megatron_lm_plugin = std::move(plugin)};
}

struct Run {
  Trained trained;
  std::vector<double> rates;
};

/// The loop of a program that was written for Megatron-LM.
Run train(Accelerator& accelerator, const std::function<Batch(int)>& batches, int steps) {
  auto net = layers();
  auto adamw = AdamW(net->parameters(), {.lr = 1e-2});
  const auto copies = accelerator.parallelism_config()->data_parallel_size();
  MegatronLMDummyScheduler schedule(
      adamw, {.total_num_steps = steps * copies, .warmup_num_steps = 2 * copies});
  auto [model, optimizer, scheduler] =
      accelerator.prepare(Pipeline(net, mean_squares), std::move(adamw), std::move(schedule));
  Run run;
  for (int step = 0; step < steps; ++step) {
    run.rates.push_back(optimizer.param_groups()[0].options().get_lr());
    const auto [x, y] = batches(step);
    const auto loss = model(x, y);
    accelerator.backward(loss);  // nothing, as the next three
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    run.trained.losses.push_back(loss.template item<double>());
    run.trained.norms.push_back(0);
  }
  run.trained.weights = accelerator.get_state_dict(model);
  return run;
}

/// One process with the same schedule.
Run expected(const std::function<Batch(int)>& batches, int steps) {
  auto net = layers();
  AdamW optimizer(net->parameters(), {.lr = 1e-2});
  Run run;
  for (int step = 0; step < steps; ++step) {
    const double up = step / 2.0;
    const double down = 1.0 - static_cast<double>(step - 2) / (steps - 2);
    run.rates.push_back(1e-2 * (step <= 2 ? up : down));
    optimizer.param_groups()[0].options().set_lr(run.rates.back());
    const auto [x, y] = batches(step);
    const auto loss = mean_squares(net->forward(x), y);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    run.trained.losses.push_back(loss.item<double>());
    run.trained.norms.push_back(0);
  }
  run.trained.weights = state_dict(*net);
  return run;
}

void expect_equal_runs(const Run& one, const Run& other, double tolerance = 1e-12) {
  expect_equal(one.trained, other.trained, tolerance);
  ASSERT_EQ(one.rates.size(), other.rates.size());
  for (std::size_t i = 0; i < one.rates.size(); ++i) {
    EXPECT_NEAR(one.rates[i], other.rates[i], 1e-15);
  }
}

TEST(MegatronRun, OneCallIsOneStepWithItsSchedule) {
  on_processes(2, [] {
    Accelerator accelerator(megatron({.pp_degree = 2, .num_micro_batches = 4}));
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::kMegatronLm);
    EXPECT_EQ(accelerator.is_main_process(), accelerator.process_index() == 1);
    EXPECT_EQ(accelerator.pipeline_parallel_rank(), accelerator.process_index());
    const auto batches = [](int i) { return numbers(i); };
    expect_equal_runs(train(accelerator, batches, 6), expected(batches, 6));
  });
}

TEST(MegatronRun, OfOneProcessIsTheSameLoop) {
  on_processes(1, [] {
    testing::internal::CaptureStderr();
    Accelerator accelerator(megatron({.use_precision_aware_optimizer = true,
                                      .num_micro_batches = 2,
                                      .recompute_activations = true}));
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::kMegatronLm);
    const auto batches = [](int i) { return numbers(i); };
    expect_equal_runs(train(accelerator, batches, 6), expected(batches, 6));
    EXPECT_TRUE(has(message_of<UnsupportedError>([&] { (void)accelerator.prepare(layers()); }),
                    "accelerate::Pipeline"));
    const auto warnings = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(has(warnings, "recompute_activations"));
    EXPECT_TRUE(has(warnings, "use_precision_aware_optimizer of MegatronLMPlugin has no effect"));
  });
}

TEST(MegatronRun, StepsItsScheduleOncePerStepAndSaysNothingElse) {
  on_processes(2, [] {
    testing::internal::CaptureStderr();
    Accelerator accelerator(
        megatron({.pp_degree = 2, .train_samples = 48, .lr_warmup_samples = 16}));
    const auto batches = [](int i) { return numbers(i); };
    expect_equal_runs(train(accelerator, batches, 6), expected(batches, 6));
    const auto warnings = testing::internal::GetCapturedStderr();
    EXPECT_EQ(warnings.find("Each step of a prepared scheduler"), std::string::npos) << warnings;
    if (!accelerator.is_main_process()) return;
    EXPECT_TRUE(has(warnings, "Ignoring `train_samples`"));
    EXPECT_TRUE(has(warnings, "Ignoring `lr_warmup_samples`"));
  });
}

TEST(MegatronRun, TakesTheLossOfThePlugin) {
  on_processes(2, [] {
    Accelerator accelerator(megatron(
        {.pp_degree = 2, .custom_loss_function = [](const Value& batch, const at::Tensor& output) {
           return 3 * mean_squares(output, batch.items()[0].as_tensor());
         }}));
    auto model = accelerator.prepare(Pipeline(layers(), mean_squares));
    model->eval();
    const auto [x, y] = numbers(0);
    EXPECT_NEAR(model(x, y).item<double>(),
                3 * mean_squares(layers()->forward(x), y).item<double>(), 1e-12);
  });
}

TEST(MegatronRun, DividesTheOptimizerStateOverCopiesOfStages) {
  on_processes(4, [] {
    Accelerator accelerator(
        megatron({.pp_degree = 2, .num_micro_batches = 2, .use_distributed_optimizer = true}));
    const auto copy = accelerator.process_index() % 2;
    const auto whole = [](int i) { return numbers(i); };
    const auto half = [&](int i) {
      const auto [x, y] = whole(i);
      return Batch{x.narrow(0, 4 * copy, 4), y.narrow(0, 4 * copy, 4)};
    };
    // The norm of divided gradients has the precision of float32.
    expect_equal_runs(train(accelerator, half, 4), expected(whole, 4), 1e-8);
  });
}

TEST(MegatronRun, RefusesToCompressGradientsThatAreDivided) {
  on_processes(2, [] {
    auto options = megatron({.use_distributed_optimizer = true});
    options.kwargs_handlers = {
        DistributedDataParallelKwargs{.comm_hook = DDPCommunicationHookType::kBf16}};
    Accelerator accelerator(options);
    EXPECT_TRUE(has(message_of<ConfigError>(
                        [&] { (void)accelerator.prepare(Pipeline(layers(), mean_squares)); }),
                    "comm_hook of DistributedDataParallelKwargs is 'bf16'"));
  });
}

TEST(MegatronRun, FollowsTheFieldsThatDivideLayers) {
  on_processes(2, [] {
    const auto stages_of = [](const MegatronLMPlugin& plugin) {
      AcceleratorState::_reset_state();
      Accelerator accelerator(megatron(plugin));
      return accelerator.prepare(Pipeline(TiedNet(), entropy))->stages();
    };
    using Stages = std::vector<std::vector<std::string>>;
    EXPECT_EQ(stages_of({.pp_degree = 2, .decoder_last_pipeline_num_layers = 1}),
              (Stages{{"embed", "first", "second"}, {"head"}}));
    EXPECT_EQ(
        stages_of(
            {.pp_degree = 2, .num_micro_batches = 2, .num_layers_per_virtual_pipeline_stage = 1}),
        (Stages{{"embed"}, {"first"}, {"second"}, {"head"}}));
  });
}

TEST(MegatronRun, LeavesOptionsOfThePipelineThatThePluginDoesNotGive) {
  on_processes(1, [] {
    const auto options_of = [](const MegatronLMPlugin& plugin, const PipelineOptions& options) {
      AcceleratorState::_reset_state();
      GradientState::_reset_state();
      Accelerator accelerator(megatron(plugin));
      Pipeline pipeline(layers(), mean_squares, options);
      (void)accelerator.prepare(pipeline);
      return pipeline->options();
    };
    const auto own = options_of({}, {.num_micro_batches = 8, .max_grad_norm = 0.5});
    EXPECT_EQ(own.num_micro_batches, 8);
    EXPECT_EQ(own.max_grad_norm, 0.5);
    EXPECT_EQ(options_of({}, {}).max_grad_norm, 1.0) << "that of Megatron-LM";
    const auto given = options_of({.num_micro_batches = 4, .gradient_clipping = 0.0}, {});
    EXPECT_EQ(given.num_micro_batches, 4);
    EXPECT_EQ(given.max_grad_norm, std::nullopt);
    EXPECT_TRUE(has(message_of<ConfigError>([&] {
                      (void)options_of({.num_micro_batches = 4}, {.num_micro_batches = 8});
                    }),
                    "num_micro_batches of MegatronLMPlugin is 4, but num_micro_batches of "
                    "PipelineOptions 8"));
    EXPECT_TRUE(has(message_of<ConfigError>([&] {
                      (void)options_of({.gradient_clipping = 1.0}, {.max_grad_norm = 0.5});
                    }),
                    "Set one of them only"));
    EXPECT_TRUE(has(message_of<ConfigError>([&] {
                      (void)options_of({.decoder_last_pipeline_num_layers = 1,
                                        .num_layers_per_virtual_pipeline_stage = 1},
                                       {});
                    }),
                    "but decoder_last_pipeline_num_layers is set, too"));
  });
}

TEST(MegatronRun, ComesFromTheVariablesOfTheLauncher) {
  const OnProcessesOptions launched{.environment = {{"ACCELERATE_USE_MEGATRON_LM", "true"},
                                                    {"MEGATRON_LM_PP_DEGREE", "2"},
                                                    {"MEGATRON_LM_NUM_MICRO_BATCHES", "2"},
                                                    {"MEGATRON_LM_GRADIENT_CLIPPING", "0.5"},
                                                    {"MEGATRON_LM_RECOMPUTE_GRANULARITY", "full"}}};
  on_processes(2, launched, [] {
    Accelerator accelerator({.cpu = true});
    const auto model = accelerator.prepare(Pipeline(layers(), mean_squares));
    EXPECT_EQ(model->options().num_micro_batches, 2);
    EXPECT_EQ(model->options().max_grad_norm, 0.5);
    EXPECT_EQ(model->options().recompute, PipelineRecompute::kUniform);
    EXPECT_EQ(model->stages().size(), 2U);
  });
}

TEST(MegatronRun, IsSavedAndLoadedByAnotherNumberOfStages) {
  const SharedFolder shared;
  const auto run = [&](const MegatronLMPlugin& plugin, bool loads) {
    Accelerator accelerator(megatron(plugin));
    auto net = layers();
    auto adamw = AdamW(net->parameters(), {.lr = 1e-2});
    auto [model, optimizer] = accelerator.prepare(Pipeline(net, mean_squares), std::move(adamw));
    if (loads) accelerator.load_state(shared.path() / "state");
    Trained result;
    for (int step = loads ? 1 : 0; step < (loads ? 3 : 1); ++step) {
      const auto [x, y] = numbers(step);
      result.losses.push_back(model(x, y).template item<double>());
      result.norms.push_back(0);
    }
    result.weights = accelerator.get_state_dict(model);
    if (!loads) accelerator.save_state(shared.path() / "state");
    return result;
  };
  // The optimizer states of each stage are divided over its copies, and put together again.
  on_processes(4, shared.options(), [&] {
    (void)run({.pp_degree = 2, .num_micro_batches = 2, .use_distributed_optimizer = true}, false);
  });
  const auto expect_goes_on = [&](const MegatronLMPlugin& plugin, double tolerance) {
    auto plain = plain_training(layers(), mean_squares, [](int i) { return numbers(i); }, 3);
    plain.losses.erase(plain.losses.begin());
    plain.norms = {0, 0};
    expect_equal(run(plugin, true), plain, tolerance);
  };
  on_processes(2, shared.options(),
               [&] { expect_goes_on({.pp_degree = 2, .num_micro_batches = 4}, 1e-8); });
  on_processes(4, shared.options(), [&] {
    expect_goes_on({.pp_degree = 2, .num_micro_batches = 2, .use_distributed_optimizer = true},
                   1e-8);
  });
}

TEST(MegatronRun, RefusesByNameWhatItHasNoEquivalentFor) {
  on_processes(2, [] {
    const auto message = [](const MegatronLMPlugin& plugin) {
      AcceleratorState::_reset_state();
      return message_of<Error>([&] { Accelerator accelerator(megatron(plugin)); });
    };
    EXPECT_TRUE(has(message({.lr_decay_samples = 8}), "use lr_decay_iters"));
    EXPECT_TRUE(has(message({.train_iters = 2, .train_samples = 8}), "use train_iters alone"));
    EXPECT_TRUE(has(message({.attention_dropout = 0.1}), "attention_dropout"));
    EXPECT_TRUE(has(message({.context_parallel_size = 2}), "Use cp_size of ParallelismConfig"));
    EXPECT_TRUE(has(message({.pp_degree = 3}), "2 processes, which is no multiple of 3"));
    EXPECT_TRUE(has(message({.tp_degree = 2, .pp_degree = 2}), "which is no multiple of 4"));
    AcceleratorState::_reset_state();
    Accelerator accelerator(megatron({.pp_degree = 2}));
    auto net = layers();
    EXPECT_TRUE(has(message_of<UnsupportedError>([&] { (void)accelerator.prepare(net); }),
                    "accelerate::Pipeline"));
    EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                      (void)accelerator.prepare(Adagrad(net->parameters(), {.lr = 0.1}));
                    }),
                    "is not supported by Megatron-LM"));
    auto adamw = AdamW(net->parameters(), {.lr = 0.1});
    EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                      (void)accelerator.prepare(adamw, CosineAnnealingLR(adamw, {.t_max = 4}));
                    }),
                    "MegatronLMDummyScheduler"));
    EXPECT_TRUE(has(message_of<UnsupportedError>([] { MegatronLMDummyDataLoader(); }),
                    "Give a data loader to prepare"));
  });
}

}  // namespace
}  // namespace accelerate
