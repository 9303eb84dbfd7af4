// Automatic batch size: begins with 128 points per process, and takes a tenth less as long as
// memory runs out.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/automatic_batch_size
//
// Last line: "result: 98.5 % of 1000 test points right with batches of 92"
// One process: "result: 99.3 % of 1000 test points right with batches of 92"
#include <accelerate/accelerate.h>

#include <cstdint>
#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

/// Stands in for a device that has room for 100 points, with the error that LibTorch throws.
void allocate(std::int64_t batch_size) {
  TORCH_CHECK_WITH(OutOfMemoryError, batch_size <= 100, "no room for ", batch_size, " points");
}

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);

  const auto train_with = [&](std::int64_t batch_size) {
    accelerator.free_memory();  // what an attempt that did not fit has prepared
    accelerator.print("trying batches of", batch_size);
    allocate(batch_size);

    // Every process makes the same points; prepare deals them out.
    constexpr int kEpochs = 16;
    auto data = accelerate::make_data_loader(task::spirals(2048),
                                             {.batch_size = batch_size, .shuffle = true});
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
    return percent;
  };

  // All processes take the same size. All must run out of memory at the same place, as they do with
  // equal devices: a single one would leave the others waiting for it.
  auto train = accelerate::find_executable_batch_size(train_with, {.agree_across_processes = true});
  const auto percent = train();
  accelerator.print("result:", percent, "% of 1000 test points right with batches of",
                    train.batch_size());
}

int main() { return accelerate::record(run); }
