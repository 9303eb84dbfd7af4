// What is saved with one number of stages is loaded with another.
#include <gtest/gtest.h>

#include "pipeline/nets.h"
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

}  // namespace
}  // namespace accelerate
