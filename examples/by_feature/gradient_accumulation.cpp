// Gradient accumulation: two batches of 8 points make one step, as a batch of 16 would.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/gradient_accumulation
//
// Last line: "result: 99.3 % of 1000 test points right with 2 batches per step"
// One process: "result: 99.9 % of 1000 test points right with 2 batches per step"
#include <accelerate/accelerate.h>

#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  accelerate::Accelerator accelerator({.gradient_accumulation_steps = 2});
  accelerate::set_seed(42);

  // Every process makes the same points; prepare deals them out.
  constexpr int kEpochs = 8;
  auto data = accelerate::make_data_loader(task::spirals(2048), {.batch_size = 8, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  auto net = task::make_classifier();
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-2));
  // The scheduler steps with the optimizer: half as often as there are batches.
  const auto steps = kEpochs * data.size() / accelerator.gradient_accumulation_steps();
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = steps});

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  double percent = 0;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& [x, y] : loader) {
      // Until the scope ends, gradients are only added up, unless this batch completes a step.
      const auto accumulating = accelerator.accumulate(model);
      accelerator.backward(F::cross_entropy(model(x), y));
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();  // does nothing on the other batches, as the next two
      scheduler.step();
      optimizer.zero_grad();
    }
    percent = task::accuracy(accelerator, model, test_loader);
    accelerator.print("epoch", epoch, percent, "%");
  }
  accelerator.print("result:", percent, "% of 1000 test points right with",
                    accelerator.gradient_accumulation_steps(), "batches per step");
}

int main() { return accelerate::record(run); }
