// Pipeline parallelism: each process computes and trains some of the layers.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/pipeline
//
// Last line: "result: 99.3 % of 1000 test points right with 2 stages"
// One process: "result: 99.9 % of 1000 test points right with 1 stages"
#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  // Every process is a stage. With dp_replicate_size as well there would be several pipelines.
  const accelerate::PartialState state;
  accelerate::Accelerator accelerator(
      {.parallelism_config = accelerate::ParallelismConfig{.pp_size = state.num_processes()}});
  accelerate::set_seed(42);
  if (accelerator.is_main_process() && state.num_processes() > 1) {
    const accelerate::PipelineShape shape{.ranks = state.num_processes(), .micro_batches = 4};
    const auto schedule = accelerate::PipelineSchedule::k1F1B;
    std::cout << to_picture(simulate_pipeline(schedule, shape));
  }

  // All stages read the same batches.
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  auto net = task::make_classifier();
  auto adamw = accelerate::AdamW(net->parameters(), {.lr = 1e-2});
  const auto loss = [](const torch::Tensor& scores, const torch::Tensor& arms) {
    return F::cross_entropy(scores, arms);
  };
  accelerate::Pipeline pipeline(net, loss, {.num_micro_batches = 4, .max_grad_norm = 1.0});
  auto [model, optimizer, loader, test_loader] =
      accelerator.prepare(pipeline, std::move(adamw), std::move(data), std::move(test_data));

  for (int epoch = 1; epoch <= 8; ++epoch) {
    double sum = 0;
    // One call is a whole step: forwards and backwards of four micro-batches, clipping, AdamW.
    for (auto& [x, y] : loader) sum += model(x, y).item<double>();
    accelerator.print("epoch", epoch, "loss", sum / static_cast<double>(loader.size()));
  }

  // The last stage has the outputs.
  model.eval();
  std::int64_t right = 0;
  for (auto& [x, y] : test_loader) {
    const auto scores = model(x);
    if (scores.defined()) right += (scores.argmax(1) == y).sum().item<std::int64_t>();
  }
  right =
      accelerator.reduce(torch::tensor(right), accelerate::Reduction::kSum).item<std::int64_t>();
  accelerator.print("result:", std::round(right) / 10, "% of 1000 test points right with",
                    state.num_processes(), "stages");
}

int main() { return accelerate::record(run); }
