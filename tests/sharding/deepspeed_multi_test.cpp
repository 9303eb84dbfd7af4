// Programs that a DeepSpeed plugin trains: what they do under data parallelism, they do with it.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "sharding/sharded_nets.h"
#include "sharding/swap_files.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using test::anew;
using test::has;
using test::message_of;
using test::TinyGpt;
namespace F = torch::nn::functional;
using Dict = Value::Dict;

/// A file with a unit per block, and with vectors that stay gathered in stage 3.
DeepSpeedPlugin plugin_of(std::int64_t stage, const Dict& more = {}, const Dict& zero = {}) {
  Dict section{{"stage", stage},
               {"reduce_bucket_size", 40'000},
               {"stage3_prefetch_bucket_size", 40'000},
               {"stage3_param_persistence_threshold", 200}};
  for (const auto& [key, value] : zero) section.set(key.to_string(), value);
  Dict tree{{"train_micro_batch_size_per_gpu", 4}, {"zero_optimization", std::move(section)}};
  for (const auto& [key, value] : more) tree.set(key.to_string(), value);
  return {.hf_ds_config = std::move(tree)};
}

TinyGpt make_net() {
  torch::manual_seed(3);
  return TinyGpt();
}

torch::Tensor words_of(int rank, int batch) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * batch + rank);
  return torch::randint(64, {4, 9}, generator, torch::TensorOptions(torch::kLong));
}

/// A training program that is written as any other.
struct Program {
  /// `max_norm` is what it asks to be clipped to, if not 0.
  template <class Optimizer, class Scheduler>
  Program(const AcceleratorOptions& options, const TinyGpt& own, Optimizer own_optimizer,
          Scheduler own_scheduler, double clips_to = 0)
      : accelerator(options), net(own), max_norm(clips_to) {
    auto prepared = accelerator.prepare(net, std::move(own_optimizer), std::move(own_scheduler));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
    scheduler = std::get<2>(prepared);
  }

  std::vector<double> train(int first, int batches) {
    std::vector<double> losses;
    for (int batch = first; batch < first + batches; ++batch) {
      const auto accumulating = accelerator.accumulate(model);
      const auto words = words_of(accelerator.process_index(), batch);
      const auto scores = model(words.slice(1, 0, 8)).reshape({-1, 64});
      const auto loss = F::cross_entropy(scores.to(torch::kFloat), words.slice(1, 1).reshape(-1));
      accelerator.backward(loss);
      if (max_norm > 0 && accelerator.sync_gradients()) {
        norms.push_back(
            accelerator.clip_grad_norm_(model.parameters(), max_norm).template item<double>());
      }
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      losses.push_back(loss.template item<double>());
      rates.push_back(optimizer.param_groups()[0].options().get_lr());
    }
    return losses;
  }

  std::vector<torch::Tensor> parameters() {
    return gathered_parameters(model, {}, [&] {
      std::vector<torch::Tensor> all;
      for (const auto& one : net->parameters()) {
        all.push_back(one.detach().to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true));
      }
      return all;
    });
  }

  Accelerator accelerator;
  TinyGpt net;
  PreparedModel<TinyGpt> model;
  AcceleratedOptimizer optimizer;
  AcceleratedScheduler scheduler;
  double max_norm;
  std::vector<double> norms = {}, rates = {};
};

AcceleratorOptions options_of(const std::optional<DeepSpeedPlugin>& plugin, int steps = 1) {
  return anew({.gradient_accumulation_steps = steps, .deepspeed_plugin = plugin});
}

/// With an optimizer and a scheduler of its own.
Program own_program(const AcceleratorOptions& options, double max_norm = 0) {
  auto net = make_net();
  auto adamw = std::make_shared<AdamW>(net->parameters(), AdamWOptions{.lr = 0.01});
  auto halving = std::make_shared<ExponentialLR>(*adamw, ExponentialLROptions{.gamma = 0.5});
  return {options, net, adamw, halving, max_norm};
}

/// With those of the configuration.
Program dummy_program(const AcceleratorOptions& options, double max_norm = 0) {
  auto net = make_net();
  auto dummy = std::make_shared<DummyOptim>(net->parameters(), DummyOptimOptions{.lr = 0.02});
  auto schedule = std::make_shared<DummyScheduler>(
      *dummy, DummySchedulerOptions{.total_num_steps = 12, .warmup_num_steps = 3});
  return {options, net, dummy, schedule, max_norm};
}

void expect_equal(const std::vector<torch::Tensor>& parameters,
                  const std::vector<torch::Tensor>& wanted, const std::string& what) {
  ASSERT_EQ(parameters.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(parameters[i].equal(wanted[i]))
        << what << ", parameter " << i << ": " << test::distance(parameters[i], wanted[i]);
  }
}

void expect_near(const std::vector<double>& numbers, const std::vector<double>& wanted,
                 double tolerance, const std::string& what) {
  ASSERT_EQ(numbers.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(numbers[i], wanted[i], tolerance) << what << ", number " << i;
  }
}

TEST(DeepSpeed, AllStagesTrainAsDataParallelismDoes) {
  on_processes(2, [] {
    auto plain = own_program(options_of(std::nullopt));
    const auto wanted = plain.train(0, 4);
    for (const int stage : {0, 1, 2, 3}) {
      const auto what = "stage " + std::to_string(stage);
      auto run = own_program(options_of(plugin_of(stage)));
      EXPECT_EQ(run.accelerator.distributed_type(), DistributedType::kDeepspeed);
      EXPECT_EQ(run.train(0, 4), wanted) << what;
      EXPECT_EQ(run.rates, plain.rates) << what;
      expect_equal(run.parameters(), plain.parameters(), what);
    }
  });
}

TEST(DeepSpeed, AccumulatesAndClipsAsTheFileSays) {
  on_processes(2, [] {
    auto plain = own_program(options_of(std::nullopt, 2), 0.5);
    const auto wanted = plain.train(0, 6);
    for (const int stage : {0, 1, 2, 3}) {
      const auto what = "stage " + std::to_string(stage);
      // The program asks for no accumulation: the file's number counts, with a warning.
      auto run = own_program(options_of(plugin_of(stage, {{"gradient_accumulation_steps", 2},
                                                          {"gradient_clipping", 0.5}})),
                             0.5);
      EXPECT_EQ(run.accelerator.gradient_accumulation_steps(), 2);
      expect_near(run.train(0, 6), wanted, 2e-5, what);
      expect_near(run.norms, plain.norms, 1e-5, what);
      EXPECT_EQ(run.rates, plain.rates) << what;
    }
  });
}

TEST(DeepSpeed, WhatIsAutoComesFromTheProgram) {
  on_processes(2, [] {
    Accelerator accelerator(options_of(
        DeepSpeedPlugin{.hf_ds_config =
                            Dict{{"train_batch_size", "auto"},
                                 {"train_micro_batch_size_per_gpu", "auto"},
                                 {"gradient_accumulation_steps", "auto"},
                                 {"gradient_clipping", "auto"},
                                 {"optimizer",
                                  Dict{{"type", "AdamW"},
                                       {"params", Dict{{"lr", "auto"}, {"weight_decay", "auto"}}}}},
                                 {"zero_optimization", Dict{{"stage", 2}}}}},
        3));
    auto net = make_net();
    DummyOptim dummy(net->parameters(), {.lr = 0.25, .weight_decay = 0.125});
    auto data =
        make_data_loader(std::pair{torch::zeros({32, 2}), torch::zeros({32})}, {.batch_size = 8});
    // The loader first, by itself.
    auto loader = accelerator.prepare(std::move(data));
    auto [model, optimizer] = accelerator.prepare(net, dummy);
    const auto plugin = accelerator.deepspeed_plugin();
    EXPECT_EQ(plugin->get_value("train_micro_batch_size_per_gpu"), Value(8));
    EXPECT_EQ(plugin->get_value("train_batch_size"), Value(8 * 3 * 2));
    EXPECT_EQ(plugin->get_value("gradient_clipping"), Value(1.0));
    auto& options =
        dynamic_cast<GroupOptions<AdamWOptions>&>(optimizer.param_groups()[0].options()).values;
    EXPECT_EQ(options.lr, 0.25);
    EXPECT_EQ(options.weight_decay, 0.125);
  });
}

TEST(DeepSpeed, TheOptimizerAndTheSchedulerOfTheFileTrain) {
  on_processes(2, [] {
    const Dict file{{"gradient_accumulation_steps", 2},
                    {"optimizer", Dict{{"type", "AdamW"}, {"params", Dict{{"lr", "auto"}}}}},
                    {"scheduler", Dict{{"type", "WarmupDecayLR"},
                                       {"params", Dict{{"warmup_min_lr", "auto"},
                                                       {"warmup_max_lr", "auto"},
                                                       {"warmup_num_steps", "auto"},
                                                       {"total_num_steps", "auto"}}}}}};
    // The same by hand: 12 steps of one process are 6 of two, and a step is one of the schedule.
    auto net = make_net();
    auto options = options_of(std::nullopt, 2);
    options.step_scheduler_per_process = false;
    auto adamw =
        std::make_shared<AdamW>(net->parameters(), AdamWOptions{.lr = 0.02, .weight_decay = 0});
    auto decay = std::make_shared<WarmupDecayLR>(
        *adamw,
        WarmupDecayLROptions{.total_num_steps = 6, .warmup_max_lr = 0.02, .warmup_num_steps = 3});
    Program plain(options, net, adamw, decay);
    const auto wanted = plain.train(0, 8);
    EXPECT_NE(plain.rates.front(), plain.rates.back());
    for (const int stage : {0, 2, 3}) {
      const auto what = "stage " + std::to_string(stage);
      auto run = dummy_program(options_of(plugin_of(stage, file), 2));
      expect_near(run.train(0, 8), wanted, 2e-5, what);
      EXPECT_EQ(run.rates, plain.rates) << what;
    }
    // A program that names neither gets both.
    Accelerator accelerator(options_of(
        plugin_of(2, {{"optimizer", Dict{{"type", "SGD"}, {"params", Dict{{"lr", 0.5}}}}},
                      {"scheduler", Dict{{"type", "WarmupLR"},
                                         {"params", Dict{{"warmup_max_lr", 0.5},
                                                         {"warmup_min_lr", 0.25},
                                                         {"warmup_type", "linear"},
                                                         {"warmup_num_steps", 2}}}}}})));
    auto bare = make_net();
    auto model = accelerator.prepare(bare);
    const auto before = bare->head->weight.detach().clone();
    const auto words = words_of(accelerator.process_index(), 0);
    accelerator.backward(model(words).pow(2).mean());
    EXPECT_FALSE(bare->head->weight.equal(before));
  });
}

TEST(DeepSpeed, OnlyBackwardSteps) {
  on_processes(2, [] {
    auto run = own_program(options_of(plugin_of(2, {{"gradient_clipping", 0.5}})));
    auto& accelerator = run.accelerator;
    EXPECT_FALSE(accelerator.clip_grad_norm_(run.model.parameters(), 0.5).defined());
    const auto words = words_of(accelerator.process_index(), 0);
    accelerator.backward(run.model(words).pow(2).mean());
    const auto stepped = run.net->head->weight.detach().clone();
    for (const auto& one : run.net->parameters()) EXPECT_FALSE(one.grad().defined());
    run.optimizer.step();
    run.optimizer.zero_grad();
    EXPECT_TRUE(run.net->head->weight.equal(stepped));
    EXPECT_GT(accelerator.clip_grad_norm_(run.model.parameters(), 0.5).item<double>(), 0);
    EXPECT_EQ(accelerator.scaler(), nullptr);
    EXPECT_TRUE(has(message_of<UnsupportedError>(
                        [&] { accelerator.clip_grad_value_(run.model.parameters(), 1.0); }),
                    "DeepSpeed does not support `clip_grad_value_`"));
  });
}

TEST(DeepSpeed, Bf16KeepsFloat32MastersInEveryStage) {
  on_processes(2, [] {
    const auto wanted = own_program(options_of(std::nullopt)).train(0, 4);
    std::vector<std::vector<double>> losses;
    for (const int stage : {0, 1, 2, 3}) {
      const auto what = "stage " + std::to_string(stage);
      auto options = options_of(plugin_of(stage, {{"communication_data_type", "fp32"}}));
      options.mixed_precision = PrecisionType::kBf16;
      auto run = own_program(options);
      EXPECT_EQ(run.net->head->weight.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(run.optimizer.param_groups()[0].params()[0].scalar_type(), torch::kFloat);
      losses.push_back(run.train(0, 4));
      expect_near(losses.back(), wanted, 0.1, what);
      EXPECT_EQ(losses.back(), losses.front()) << what;
    }
  });
}

TEST(DeepSpeed, WhatIsOffloadedToTheHostTrainsTheSame) {
  on_processes(2, [] {
    const auto wanted = own_program(options_of(std::nullopt)).train(0, 3);
    const Dict cpu{{"device", "cpu"}};
    for (const int stage : {1, 2, 3}) {
      auto run = own_program(options_of(plugin_of(stage, {}, {{"offload_optimizer", cpu}})));
      EXPECT_EQ(run.train(0, 3), wanted) << "stage " << stage;
    }
    auto run = own_program(
        options_of(plugin_of(3, {}, {{"offload_optimizer", cpu}, {"offload_param", cpu}})));
    EXPECT_EQ(run.train(0, 3), wanted);
  });
}

/// Pages of files that this process has in memory, in bytes.
std::int64_t resident_file_bytes() {
  std::ifstream status("/proc/self/status");
  std::int64_t bytes = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssFile:") || line.starts_with("RssShmem:")) {
      bytes += 1024 * std::stoll(line.substr(line.find(':') + 1));
    }
  }
  return bytes;
}

TEST(SwapFiles, HoldTensorsThatLeaveMemoryAndKeepTheirValues) {
  const test::Folder folder;
  detail::sharding::SwapFiles files(folder.path());
  const auto values = torch::arange(4 << 20, torch::kFloat);
  const auto placed = files.place(values);
  EXPECT_TRUE(files.holds(placed));
  EXPECT_FALSE(files.holds(values));
  EXPECT_EQ(files.bytes(), 16 << 20);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));  // no name is left behind
  const auto before = resident_file_bytes();
  files.release();
  EXPECT_LT(resident_file_bytes(), before - (15 << 20));
  EXPECT_TRUE(placed.equal(values));
  EXPECT_TRUE(has(message_of<ConfigError>([] { detail::sharding::SwapFiles("/no/such/folder"); }),
                  "No file for offload to nvme can be made in '/no/such/folder': No such file"));
}

TEST(SwapFiles, AFullDriveIsAnErrorBeforeTheFirstStep) {
  const test::Folder folder;
  // A file that may not grow is what a full drive is.
  struct rlimit old = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
  detail::sharding::SwapFiles files(folder.path());
  const struct rlimit little = {1 << 20, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &little), 0);
  const auto message = message_of<Error>([&] { (void)files.place(torch::zeros({1 << 20})); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, signal_before);
  EXPECT_TRUE(has(message, "has no room for 4.0 MB more"));
}

TEST(DeepSpeed, WhatIsOffloadedToADriveTrainsTheSameAndGoesOn) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    auto plain = own_program(options_of(std::nullopt));
    const auto wanted = plain.train(0, 4);
    const Dict nvme{{"device", "nvme"}, {"nvme_path", folder.path().string()}};
    const Dict other{{"device", "nvme"},
                     {"nvme_path", std::filesystem::temp_directory_path().string()}};
    for (const int stage : {1, 2, 3}) {
      const auto what = "stage " + std::to_string(stage);
      Dict zero{{"offload_optimizer", nvme}};
      if (stage == 3) zero.set("offload_param", other);
      const auto plugin = plugin_of(stage, {}, std::move(zero));
      auto run = own_program(options_of(plugin));
      auto losses = run.train(0, 2);
      const auto state = folder.path() / what;
      run.accelerator.save_state(state);
      auto resumed = own_program(options_of(plugin));
      (void)resumed.train(20, 1);
      resumed.accelerator.load_state(state);
      for (const auto loss : resumed.train(2, 2)) losses.push_back(loss);
      EXPECT_EQ(losses, wanted) << what;
      expect_equal(resumed.parameters(), plain.parameters(), what);
    }
  });
}

TEST(DeepSpeed, KeysOfReductionsKeepTheMean) {
  on_processes(3, [] {
    const auto wanted = own_program(options_of(std::nullopt)).train(0, 3);
    for (const int stage : {0, 2}) {
      for (const auto& more :
           {Dict{{"prescale_gradients", true}}, Dict{{"gradient_predivide_factor", 2.0}}}) {
        auto run = own_program(options_of(plugin_of(stage, more, {{"overlap_comm", false}})));
        expect_near(run.train(0, 3), wanted, 2e-5, "stage " + std::to_string(stage));
      }
    }
  });
}

TEST(DeepSpeed, GoesOnExactlyWhereItWasSaved) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    const Dict file{
        {"gradient_accumulation_steps", 2},
        {"gradient_clipping", 0.5},
        {"optimizer", Dict{{"type", "AdamW"}, {"params", Dict{{"lr", 0.02}}}}},
        {"scheduler", Dict{{"type", "WarmupLR"},
                           {"params", Dict{{"warmup_max_lr", 0.02}, {"warmup_num_steps", 5}}}}}};
    for (const int stage : {0, 1, 3}) {
      const auto what = "stage " + std::to_string(stage);
      const auto state = folder.path() / ("stage_" + std::to_string(stage));
      auto run = dummy_program(options_of(plugin_of(stage, file), 2));
      // In the middle of a step, where gradients are kept whole.
      const int saved_after = stage < 2 ? 3 : 2;
      (void)run.train(0, saved_after);
      run.accelerator.save_state(state);
      if (stage > 0) {
        EXPECT_TRUE(std::filesystem::exists(state / "pytorch_model" / ".metadata")) << what;
        EXPECT_TRUE(std::filesystem::exists(state / "latest")) << what;
      }
      const auto wanted = run.train(saved_after, 4);
      const auto rates = std::vector(run.rates.begin() + saved_after, run.rates.end());
      auto resumed = dummy_program(options_of(plugin_of(stage, file), 2));
      (void)resumed.train(40, 2);
      resumed.accelerator.load_state(state);
      resumed.rates.clear();
      EXPECT_EQ(resumed.train(saved_after, 4), wanted) << what;
      EXPECT_EQ(resumed.rates, rates) << what;
    }
    // Another stage reads it too.
    auto other = dummy_program(options_of(plugin_of(2, file), 2));
    other.accelerator.load_state(folder.path() / "stage_3");
    EXPECT_EQ(other.train(2, 1).size(), 1u);
  });
}

TEST(DeepSpeed, WeightsOfStageThreeAreGatheredIfTheFileAllowsIt) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    auto closed = own_program(options_of(plugin_of(3)));
    EXPECT_TRUE(
        has(message_of<ConfigError>([&] { (void)closed.accelerator.get_state_dict(closed.model); }),
            "Cannot get 16bit model weights because "
            "`stage3_gather_16bit_weights_on_model_save` in DeepSpeed config is False"));
    auto options =
        options_of(plugin_of(3, {}, {{"stage3_gather_16bit_weights_on_model_save", true}}));
    options.mixed_precision = PrecisionType::kBf16;
    auto open = own_program(options);
    (void)open.train(0, 1);
    const auto state = open.accelerator.get_state_dict(open.model);
    EXPECT_EQ(state.size() > 0, open.accelerator.is_main_process());
    if (open.accelerator.is_main_process()) {
      EXPECT_EQ(state["head.weight"].scalar_type(), torch::kBFloat16);
      EXPECT_EQ(state["head.weight"].sizes(), (std::vector<std::int64_t>{64, 64}));
    }
    open.accelerator.save_model(open.model, folder.path() / "model");
    open.accelerator.wait_for_everyone();
    EXPECT_TRUE(std::filesystem::exists(folder.path() / "model" / "model.safetensors"));
  });
}

TEST(DeepSpeed, Zero3InitBuildsOnTheFirstProcessAlone) {
  on_processes(2, [] {
    const auto wanted = own_program(options_of(std::nullopt)).train(0, 2);
    Accelerator accelerator(options_of(plugin_of(3)));
    const auto plugin = accelerator.deepspeed_plugin();
    auto building = zero3_init_context_manager(*plugin, *plugin->zero3_init_flag);
    auto net = make_net();
    building.reset();
    EXPECT_EQ(net->head->weight.is_meta(), !accelerator.is_main_process());
    auto adamw = std::make_shared<AdamW>(net->parameters(), AdamWOptions{.lr = 0.01});
    auto halving = std::make_shared<ExponentialLR>(*adamw, ExponentialLROptions{.gamma = 0.5});
    Program run(options_of(plugin_of(3)), net, adamw, halving);
    EXPECT_EQ(run.train(0, 2), wanted);
  });
}

TEST(DeepSpeed, WrongConfigurationsAreNamed) {
  on_processes(2, [] {
    const auto message = [](const DeepSpeedPlugin& plugin, bool dummy) {
      return message_of<ConfigError>([&] {
        dummy ? static_cast<void>(dummy_program(options_of(plugin)))
              : static_cast<void>(own_program(options_of(plugin)));
      });
    };
    const Dict sgd{{"optimizer", Dict{{"type", "SGD"}, {"params", Dict{{"lr", 0.1}}}}}};
    EXPECT_TRUE(has(message(plugin_of(2, sgd), false),
                    "You cannot specify an optimizer in the config file and in the code"));
    EXPECT_TRUE(has(message(plugin_of(2), true),
                    "You cannot create a `DummyOptim` without specifying an optimizer"));
    EXPECT_TRUE(has(message(plugin_of(2, sgd), true),
                    "Either specify a scheduler in the config file or pass in the"));
    EXPECT_TRUE(has(message(plugin_of(2, {{"train_micro_batch_size_per_gpu", "auto"}}), false),
                    "'train_micro_batch_size_per_gpu' is 'auto'"));
    EXPECT_TRUE(
        has(message(plugin_of(2, {{"train_batch_size", 7}}), false), "train_batch_size is 7"));
    EXPECT_TRUE(has(message(plugin_of(2, {}, {{"reduce_bucket_size", "auto"}}), false),
                    "The model does not tell its hidden sizes"));
    EXPECT_TRUE(has(
        message(plugin_of(2, {}, {{"ignore_unused_parameters", false}}), false),
        "'zero_optimization.ignore_unused_parameters' in the DeepSpeed configuration is false"));
    Accelerator accelerator(options_of(plugin_of(2)));
    EXPECT_TRUE(
        has(message_of<ArgumentError>([&] { (void)accelerator.prepare(make_net(), make_net()); }),
            "You can't use same `Accelerator()` instance with multiple models"));
    DummyOptim alone(make_net()->parameters());
    EXPECT_TRUE(has(message_of<ConfigError>([&] { (void)accelerator.prepare(alone); }),
                    "You cannot create a `DummyOptim`"));
    // Elsewhere nothing makes an optimizer of it.
    Accelerator plain(options_of(std::nullopt));
    EXPECT_TRUE(has(message_of<StateError>([&] { (void)plain.prepare(alone); }),
                    "This run does not use DeepSpeed"));
  });
}

TEST(DeepSpeed, OneProcessTrainsToo) {
  on_processes(1, [] {
    const auto wanted = own_program(options_of(std::nullopt)).train(0, 3);
    for (const int stage : {0, 1, 2, 3}) {
      auto run = own_program(options_of(plugin_of(stage)));
      EXPECT_EQ(run.accelerator.distributed_type(), DistributedType::kDeepspeed);
      EXPECT_EQ(run.train(0, 3), wanted) << "stage " << stage;
    }
  });
}

TEST(DeepSpeed, AProcessThatDiesIsNamed) {
  const auto outcomes = run_processes(2, {}, [] {
    auto run = own_program(options_of(plugin_of(3)));
    (void)run.train(0, 2);
    if (run.accelerator.process_index() == 1) std::raise(SIGKILL);
    (void)run.train(2, 2);
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_FALSE(outcomes[0].ok());
  EXPECT_FALSE(outcomes[0].timed_out);
  EXPECT_TRUE(has(outcomes[0].output, "rank 1"));
}

}  // namespace
}  // namespace accelerate
