// Early stopping: the process whose loss is small enough raises a flag, and all stop together.
// A `break` on one process alone would leave the others waiting for it.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/early_stopping
//
// Last line: "result: 98.7 % of 1000 test points right, stopped in epoch 2..4 of 20"
// One process: "result: 99 % of 1000 test points right, stopped in epoch 2..4 of 20"
#include <accelerate/accelerate.h>

#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);

  // Every process makes the same points; prepare deals them out.
  constexpr int kEpochs = 20;
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  auto net = task::make_classifier();
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-2));
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = kEpochs * data.size()});

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  double percent = 0;
  int epoch = 0;
  while (epoch < kEpochs) {
    ++epoch;
    accelerate::DeferredMetrics metrics;
    for (auto& [x, y] : loader) {
      const auto loss = F::cross_entropy(model(x), y);
      accelerator.backward(loss);
      metrics.add("loss", loss);
      accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    percent = task::accuracy(accelerator, model, test_loader);
    accelerator.print("epoch", epoch, percent, "%");

    // `read` is the mean over the batches of this process: the others may have seen another one.
    if (metrics.read().at("loss").as_double() < 0.04) accelerator.set_trigger();
    if (accelerator.check_trigger()) break;
  }
  accelerator.print("result:", percent, "% of 1000 test points right, stopped in epoch", epoch,
                    "of", kEpochs);
}

int main() { return accelerate::record(run); }
