// Communication hooks: gradients are sent between processes in 16 bits instead of 32.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/ddp_comm_hook
//
// Last line: "result: 99.3 % of 1000 test points right"
// One process: "result: 99.9 % of 1000 test points right"
#include <accelerate/accelerate.h>

#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  using Hook = accelerate::DDPCommunicationHookType;  // also kFp16, kPowerSgd, kBatchedPowerSgd
  const accelerate::DistributedDataParallelKwargs halved{.comm_hook = Hook::kBf16};
  accelerate::Accelerator accelerator({.kwargs_handlers = {halved}});
  accelerate::set_seed(42);

  // Every process makes the same points; prepare deals them out.
  constexpr int kEpochs = 8;
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  auto net = task::make_classifier();
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-2));
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = kEpochs * data.size()});

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  double percent = 0;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    percent = task::accuracy(accelerator, model, test_loader);
    accelerator.print("epoch", epoch, percent, "%");
  }
  accelerator.print("result:", percent, "% of 1000 test points right");
}

int main() { return accelerate::record(run); }
