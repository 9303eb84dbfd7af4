// A training program on one page, for one process or many: which arm of a spiral is a point on?
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/basic
//
// Last line: "result: 99.3 % of 1000 test points right"
// One process: "result: 99.9 % of 1000 test points right"
#include <accelerate/accelerate.h>

#include <cmath>
#include <cstdint>
#include <utility>

namespace F = torch::nn::functional;

namespace task {  // the programs in by_feature/ have this in task.h

/// Points on three spiral arms, [count, 2], and the arm of each.
std::pair<torch::Tensor, torch::Tensor> spirals(std::int64_t count) {
  const auto arms = torch::randint(3, {count});
  const auto radius = torch::rand({count}).sqrt();
  const auto angle = 5 * radius + 2 * M_PI / 3 * arms + 0.2 * torch::randn({count});
  return {torch::stack({radius * angle.cos(), radius * angle.sin()}, 1), arms};
}

torch::nn::Sequential make_classifier() {
  using namespace torch::nn;
  return Sequential(Linear(2, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 3));
}

/// How many percent of the points of all processes, each counted once, are put on their arm.
double accuracy(accelerate::Accelerator& accelerator, auto& model, auto& loader) {
  const torch::NoGradGuard no_grad;
  model.eval();
  std::int64_t right = 0, seen = 0;
  for (auto& [x, y] : loader) {
    const torch::Tensor hits = accelerator.gather_for_metrics(model(x).argmax(1) == y);
    right += hits.sum().item<std::int64_t>();
    seen += hits.numel();
  }
  model.train();
  return std::round(1000.0 * right / seen) / 10;
}

}  // namespace task

void run() {
  accelerate::Accelerator accelerator;
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

// An exception becomes a message and an exit code that launchers understand.
int main() { return accelerate::record(run); }
