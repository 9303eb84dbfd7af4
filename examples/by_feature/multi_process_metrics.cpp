// Metrics of several processes: the F1 score needs the predictions for all points at once. The last
// batches are filled up with repeated points so that all processes have equally many;
// `gather_for_metrics` leaves those out again.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/multi_process_metrics
//
// Last line: "result: 99.3 % F1 of 1000 test points; gather alone has 1024"
// One process: "result: 99.9 % F1 of 1000 test points; gather alone has 1000"
#include <accelerate/accelerate.h>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "task.h"

namespace F = torch::nn::functional;

/// The mean over classes of the harmonic mean of precision and recall.
double macro_f1(const torch::Tensor& predictions, const torch::Tensor& labels) {
  const auto f1 = [&](int arm) {
    const auto predicted = predictions == arm, truth = labels == arm;
    const auto both = (predicted & truth).sum().item<double>();
    return 2 * both / (predicted.sum() + truth.sum()).item<double>();
  };
  return (f1(0) + f1(1) + f1(2)) / 3;
}

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

  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
  }

  const torch::NoGradGuard no_grad;
  model.eval();
  std::vector<torch::Tensor> predictions, labels;
  std::int64_t with_repeats = 0;
  for (auto& [x, y] : test_loader) {
    const auto predicted = model(x).argmax(1);
    // Any tree of tensors is gathered in one message.
    const auto [p, l] = accelerator.gather_for_metrics(std::pair{predicted, y});
    predictions.push_back(p);
    labels.push_back(l);
    with_repeats += accelerator.gather(y).numel();
  }
  const auto all = torch::cat(labels);
  accelerator.print("result:", std::round(1000 * macro_f1(torch::cat(predictions), all)) / 10,
                    "% F1 of", all.numel(), "test points; gather alone has", with_repeats);
}

int main() { return accelerate::record(run); }
