// A captured step: a GPU repeats the whole step from a recording; a CPU runs it as it is.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/captured_step
//
// Last line: "result: 99.3 % of 1000 test points right"
// One process: "result: 99.9 % of 1000 test points right"
#include <accelerate/accelerate.h>

#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);

  constexpr int kEpochs = 8;
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  auto net = task::make_classifier();
  // Of accelerate/optim.h: its learning rate and step count can live on the device.
  auto adamw = accelerate::AdamW(net->parameters(), {.lr = 1e-2});
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = kEpochs * data.size()});
  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  using Batch = std::pair<torch::Tensor, torch::Tensor>;
  auto step = accelerator.capture(
      [&, &model = model, &optimizer = optimizer, &scheduler = scheduler](Batch& batch) {
        const auto accumulating = accelerator.accumulate(model);
        const auto loss = F::cross_entropy(model(batch.first), batch.second);
        accelerator.backward(loss);
        if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
        optimizer.step();
        scheduler.step();
        optimizer.zero_grad();
        return loss;
      });

  double percent = 0;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    auto total = torch::zeros({}, accelerator.device());
    for (auto& batch : loader) total += step(batch);
    percent = task::accuracy(accelerator, model, test_loader);
    accelerator.print("epoch", epoch, "loss", total.item<double>() / loader.size());
  }
  accelerator.print("result:", percent, "% of 1000 test points right");
}

int main() { return accelerate::record(run); }
