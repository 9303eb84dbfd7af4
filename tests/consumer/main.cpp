// The page that a user of the library writes first: one loop, for one process and for several.
#include <accelerate/accelerate.h>

#include <iostream>

namespace {

const auto inputs = [] {
  torch::manual_seed(7);
  return torch::randn({512, 8});
}();
const auto labels = inputs.slice(1, 0, 3).argmax(1);

torch::nn::Sequential make_classifier() {
  return torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 3));
}

}  // namespace

int main() {
  accelerate::Accelerator accelerator(
      {.mixed_precision = accelerate::PrecisionType::kBf16, .gradient_accumulation_steps = 4});
  accelerate::set_seed(42);

  auto net = make_classifier();
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(2e-2));
  auto data =
      accelerate::make_data_loader(std::pair{inputs, labels}, {.batch_size = 16, .shuffle = true});
  auto schedule = accelerate::CosineAnnealingLR(adamw, {.t_max = 100});

  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(net, std::move(adamw), std::move(data), std::move(schedule));
  double first = 0, last = 0;
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (auto& [x, y] : loader) {
      auto accumulating = accelerator.accumulate(model);
      auto loss = torch::nn::functional::cross_entropy(model(x), y);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      last = loss.item<double>();
      if (first == 0) first = last;
    }
  }
  accelerator.print(accelerator.num_processes(), "processes, loss", first, "->", last);
  return last < first / 2 ? 0 : 1;
}
