// Tracking: the main process writes the numbers of the run, for TensorBoard and as JSON Lines.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/tracking
//     tensorboard --logdir runs
//
// Last line: "result: 99 % of 1000 test points right, 7 lines in runs/spirals/metrics.jsonl"
#include <accelerate/accelerate.h>
#include <accelerate/tracking/summary_writer.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  using accelerate::LoggerType;
  accelerate::Accelerator accelerator(
      {.log_with = {LoggerType::kTensorboard, "jsonl"}, .project_dir = "runs"});
  accelerate::set_seed(42);
  if (accelerator.is_main_process()) std::filesystem::remove_all("runs/spirals");

  constexpr int kEpochs = 6;
  constexpr double kLearningRate = 1e-2;
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  auto net = task::make_classifier();
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(kLearningRate));
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = kEpochs * data.size()});

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));
  accelerator.init_trackers("spirals", {{"learning_rate", kLearningRate}, {"epochs", kEpochs}});

  double percent = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
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
    accelerator.log({{"loss", metrics.read().at("loss")}, {"accuracy", percent}}, epoch);

    // What the interface of all trackers does not have. Null on other processes.
    auto* writer = accelerator.get_tracker<accelerate::SummaryWriter*>("tensorboard");
    if (writer != nullptr) {
      const auto weights = net->parameters()[0].detach().to(torch::kDouble).contiguous();
      const auto* first = weights.const_data_ptr<double>();
      writer->add_histogram("weights", {first, static_cast<std::size_t>(weights.numel())}, epoch);
    }
  }
  accelerator.end_training();

  std::ifstream file("runs/spirals/metrics.jsonl");
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  accelerator.print("result:", percent, "% of 1000 test points right,", lines,
                    "lines in runs/spirals/metrics.jsonl");
}

int main() { return accelerate::record(run); }
