// Steps of a prepared loop that trains a GPT on a GPU in bf16 with a fused AdamW, and the time from
// the start of the program to the end of the first step; gpu_training.py does the same in Python.
#include <torch/torch.h>

#include <string_view>

#include "../examples/gpt_model.h"
#include "since_start.h"
#include "support.h"

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;
using examples::GptConfig;

void measure(Accelerator& accelerator, const std::string& name, const GptConfig& config,
             int steps) {
  torch::manual_seed(0);
  examples::Gpt net(config);
  auto [model, optimizer] =
      accelerator.prepare(net, accelerate::AdamW(net->parameters(), {.lr = 1e-4}));
  const double prepared = bench::milliseconds_since_start();
  const auto on_device = torch::TensorOptions(accelerator.device()).dtype(torch::kLong);
  const auto ids = torch::randint(config.vocab, {8, config.block}, on_device);
  const auto target = torch::randint(config.vocab, {8, config.block}, on_device);
  const auto step = [&, &model = model, &optimizer = optimizer] {
    auto accumulating = accelerator.accumulate(model);
    optimizer.zero_grad();
    const auto loss = F::cross_entropy(model(ids).flatten(0, 1), target.flatten());
    accelerator.backward(loss);
    optimizer.step();
  };
  step();
  // Reading a parameter waits for the device.
  const auto wait = [&] { net->parameters().back().sum().item<float>(); };
  wait();
  static bool first = true;
  if (std::exchange(first, false)) {
    bench::report("start to a model on the device", prepared, "ms");
    bench::report("start to the end of the first step", bench::milliseconds_since_start(), "ms");
  }
  for (int i = 0; i < 8; ++i) step();
  std::vector<double> times;
  for (int round = 0; round < 5; ++round) {
    wait();
    times.push_back(bench::microseconds(1,
                                        [&] {
                                          for (int i = 0; i < steps; ++i) step();
                                          wait();
                                        }) /
                    steps);
  }
  bench::report(name + ": step", bench::median(times), "us");
  accelerator.free_memory(model, optimizer);
}

}  // namespace

int main() {
  Accelerator accelerator({.mixed_precision = accelerate::PrecisionType::kBf16});
  bench::report("start to the accelerator", bench::milliseconds_since_start(), "ms");
  measure(accelerator, "GPT 3.3 M, 8 x 128", GptConfig::small(), 200);
  auto large = GptConfig::gpt2();
  large.vocab = 50304;  // a multiple of 64, which kernels like
  measure(accelerator, "GPT 124 M, 8 x 1024", large, 20);
}
