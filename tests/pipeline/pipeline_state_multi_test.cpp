// What is saved with one number of stages is loaded with another.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "accelerate/errors.h"
#include "pipeline/nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using namespace test;

constexpr PipelineOptions kOptions{.num_micro_batches = 2};

AcceleratorOptions stages(std::int64_t pp) {
  return {.cpu = true, .parallelism_config = ParallelismConfig{.pp_size = pp}};
}

/// Trains for two steps, or goes on for two from a checkpoint.
Trained two_steps(const AcceleratorOptions& options, const std::filesystem::path& load,
                  const std::filesystem::path& save) {
  Accelerator accelerator(options);
  TiedNet net;
  if (!load.empty()) {
    const torch::NoGradGuard no_grad;
    for (auto& one : net->parameters()) one.zero_();
  }
  auto adamw = AdamW(net->parameters(), {.lr = 1e-2});
  auto [model, optimizer] = accelerator.prepare(Pipeline(net, entropy, kOptions), std::move(adamw));
  if (!load.empty()) accelerator.load_state(load);
  Trained result;
  for (int step = 0; step < 2; ++step) {
    const auto [x, y] = tokens(load.empty() ? step : step + 2);
    result.losses.push_back(model(x, y).item<double>());
    result.norms.push_back(0);
  }
  result.weights = accelerator.get_state_dict(model);
  if (!save.empty()) accelerator.save_state(save);
  return result;
}

Trained expected_last_steps() {
  TiedNet net;
  AdamW optimizer(net->parameters(), {.lr = 1e-2});
  Trained result;
  for (int step = 0; step < 4; ++step) {
    const auto [x, y] = tokens(step);
    const auto loss = entropy(net->forward(x), y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step >= 2) result.losses.push_back(loss.item<double>());
  }
  result.norms = {0, 0};
  result.weights = state_dict(*net);
  return result;
}

TEST(PipelineState, OfTwoStagesIsLoadedByOneAndByFour) {
  const SharedFolder shared;
  on_processes(2, shared.options(), [&] { (void)two_steps(stages(2), "", shared.path() / "two"); });
  on_processes(1, shared.options(), [&] {
    expect_equal(two_steps({.cpu = true}, shared.path() / "two", ""), expected_last_steps());
  });
  on_processes(4, shared.options(), [&] {
    expect_equal(two_steps(stages(4), shared.path() / "two", ""), expected_last_steps());
  });
}

TEST(PipelineState, OfOneProcessIsLoadedByTwoStages) {
  const SharedFolder shared;
  on_processes(1, shared.options(),
               [&] { (void)two_steps({.cpu = true}, "", shared.path() / "one"); });
  on_processes(2, shared.options(), [&] {
    expect_equal(two_steps(stages(2), shared.path() / "one", ""), expected_last_steps());
  });
}

TEST(PipelineState, SavedAsAModelHasTheWholeModel) {
  const SharedFolder shared;
  on_processes(2, shared.options(), [&] {
    Accelerator accelerator(stages(2));
    auto model = accelerator.prepare(Pipeline(TiedNet(), entropy, kOptions));
    accelerator.save_model(model, shared.path());
    accelerator.wait_for_everyone();
    TiedNet expected;
    TiedNet loaded;
    const torch::NoGradGuard no_grad;
    for (auto& one : loaded->parameters()) one.zero_();
    load_checkpoint_in_model(*loaded, shared.path());
    for (const auto& entry : expected->named_parameters()) {
      EXPECT_TRUE(torch::equal(entry.value(), loaded->named_parameters()[entry.key()]));
    }
  });
}

/// Layers of `layers()`, under the names that they have there.
torch::nn::Sequential some_layers(std::size_t begin, std::size_t end) {
  const auto whole = layers();
  torch::nn::Sequential some;
  for (auto i = begin; i < end; ++i) {
    some->push_back(std::to_string(i),
                    torch::nn::AnyModule(*(whole->begin() + static_cast<std::ptrdiff_t>(i))));
  }
  return some;
}

TEST(PipelineState, OfStagesThatProcessesBuildThemselvesIsThatOfTheModel) {
  const SharedFolder shared;
  const auto whole = [&] {
    auto plain = plain_training(layers(), mean_squares, [](int i) { return numbers(i); }, 4);
    plain.norms = {0, 0};
    return plain;
  };
  on_processes(4, shared.options(), [&] {
    auto options = stages(2);
    options.parallelism_config->dp_replicate_size = 2;
    Accelerator accelerator(options);
    const auto stage = accelerator.pipeline_parallel_rank();
    auto net = stage == 0 ? some_layers(0, 3) : some_layers(3, 7);
    AdamW adamw(net->parameters(), {.lr = 1e-2});
    const Pipeline pipeline(PipelineStage{net.ptr(), stage, 2}, mean_squares,
                            {.num_micro_batches = 2, .max_grad_norm = 1.0});
    auto [model, optimizer] = accelerator.prepare(pipeline, std::move(adamw));
    EXPECT_EQ(model.parameters().size(), 8U);
    for (int step = 0; step < 2; ++step) {
      const auto [x, y] = numbers(step);
      const auto copy = accelerator.data_parallel_rank();
      EXPECT_NEAR(model(x.narrow(0, 4 * copy, 4), y.narrow(0, 4 * copy, 4)).item<double>(),
                  whole().losses[static_cast<std::size_t>(step)], 1e-12);
    }
    accelerator.save_state(shared.path() / "own");
  });
  on_processes(1, shared.options(), [&] {
    Accelerator accelerator({.cpu = true});
    auto net = layers();
    auto [model, optimizer] =
        accelerator.prepare(Pipeline(net, mean_squares, {.max_grad_norm = 1.0}),
                            AdamW(net->parameters(), {.lr = 1e-2}));
    accelerator.load_state(shared.path() / "own");
    Trained result;
    for (int step = 2; step < 4; ++step) {
      const auto [x, y] = numbers(step);
      result.losses.push_back(model(x, y).item<double>());
      result.norms.push_back(0);
    }
    result.weights = accelerator.get_state_dict(model);
    auto wanted = whole();
    wanted.losses.erase(wanted.losses.begin(), wanted.losses.begin() + 2);
    expect_equal(result, wanted);
  });
}

TEST(PipelineState, OfStagesThatDoNotFitTogetherIsAnError) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto stage = accelerator.pipeline_parallel_rank();
    const auto refused = [&](const PipelineStage& one) {
      return message_of<ArgumentError>(
          [&] { (void)accelerator.prepare(Pipeline(one, mean_squares)); });
    };
    EXPECT_TRUE(has(refused({some_layers(0, 3).ptr(), stage, 2}), "both have a '0.weight'"));
    EXPECT_TRUE(has(refused({some_layers(0, 3).ptr(), 0, 2}), "process 1 of a pipeline"));
    EXPECT_TRUE(has(refused({some_layers(0, 3).ptr(), 0, 3}), "pp_size is 2"));
    EXPECT_TRUE(has(message_of<StateError>([&] {
                      (void)Pipeline(PipelineStage{layers().ptr(), stage, 2}, mean_squares)
                          ->forward_backward({numbers(0).x}, {numbers(0).y});
                    }),
                    "prepare it"));
  });
}

TEST(PipelineState, IsSavedWhenOneProcessIsToldToStop) {
  const SharedFolder shared;
  const auto options = [&] {
    auto result = stages(2);
    result.project_config = ProjectConfiguration{.project_dir = shared.path().string(),
                                                 .automatic_checkpoint_naming = true,
                                                 .save_on_preemption = true};
    return result;
  };
  const auto outcomes = run_processes(2, shared.options(), [&] {
    Accelerator accelerator(options());
    TiedNet net;
    auto [model, optimizer] = accelerator.prepare(Pipeline(net, entropy, kOptions),
                                                  AdamW(net->parameters(), {.lr = 1e-2}));
    for (int step = 0; step < 20000; ++step) {
      if (step == 3 && accelerator.process_index() == 1) ::raise(SIGTERM);
      const auto [x, y] = tokens(step);
      (void)model(x, y);
      accelerator.check_preemption();
    }
  });
  for (const auto& one : outcomes) EXPECT_EQ(one.exit_code, 75) << one.output;
  EXPECT_TRUE(std::filesystem::exists(shared.path() / "checkpoints" / "checkpoint_0"));
}

}  // namespace
}  // namespace accelerate
