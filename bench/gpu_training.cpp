// Steps of a prepared loop in bf16 on a GPU, as they are and captured, with their peak memory, and
// the time from the start of the program to the end of the first step; gpu_training.py does the
// same in Python, with torch.compile in place of captured steps.
#include <ATen/DeviceAccelerator.h>
#include <torch/torch.h>

#include <string>
#include <utility>

#include "../examples/gpt_model.h"
#include "resnet.h"
#include "since_start.h"
#include "support.h"

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;
using examples::GptConfig;
using torch::Tensor;

/// Of the device since the last call, in GB.
double peak_memory(torch::Device device) {
  const auto stats = at::accelerator::getDeviceStats(device.index());
  at::accelerator::resetPeakStats(device.index());
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<double>(stats.allocated_bytes[kAll].peak) / 1e9;
}

/// Microseconds of a step.
template <class Step, class Wait>
double time_of(const Step& step, const Wait& wait, int steps) {
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
  return bench::median(times);
}

template <class Net, class Optimizer>
void measure(Accelerator& accelerator, const std::string& name, Net net, Optimizer own,
             Tensor input, Tensor target, int steps) {
  auto [model, optimizer] = accelerator.prepare(net, std::move(own));
  const double prepared = bench::milliseconds_since_start();
  const auto body = [&, &model = model, &optimizer = optimizer](const Tensor& x, const Tensor& y) {
    auto accumulating = accelerator.accumulate(model);
    optimizer.zero_grad();
    const auto loss = F::cross_entropy(model(x).flatten(0, -2), y.flatten());
    accelerator.backward(loss);
    optimizer.step();
  };
  // Reading a parameter waits for the device.
  const auto wait = [&] { net->parameters().back().sum().template item<float>(); };
  peak_memory(accelerator.device());
  body(input, target);
  wait();
  static bool first = true;
  if (std::exchange(first, false)) {
    bench::report("start to a model on the device", prepared, "ms");
    bench::report("start to the end of the first step", bench::milliseconds_since_start(), "ms");
  }
  const auto report = [&](const std::string& what, const auto& step) {
    bench::report(name + ": " + what, time_of(step, wait, steps), "us");
    bench::report(name + ": " + what + ", peak memory", peak_memory(accelerator.device()), "GB");
  };
  report("step", [&] { body(input, target); });
  auto captured = accelerator.capture(body);
  report("captured step", [&] { captured(input, target); });
  accelerator.free_memory(model, optimizer);
}

void measure_gpt(Accelerator& accelerator, const std::string& name, const GptConfig& config,
                 int steps) {
  torch::manual_seed(0);
  examples::Gpt net(config);
  const auto on_device = torch::TensorOptions(accelerator.device()).dtype(torch::kLong);
  const auto ids = torch::randint(config.vocab, {8, config.block}, on_device);
  const auto target = torch::randint(config.vocab, {8, config.block}, on_device);
  measure(accelerator, name, net, accelerate::AdamW(net->parameters(), {.lr = 1e-4}), ids, target,
          steps);
}

void measure_resnet(Accelerator& accelerator) {
  torch::manual_seed(0);
  auto net = bench::make_resnet();
  const auto images = torch::randn({64, 3, 64, 64}, accelerator.device());
  const auto labels =
      torch::randint(100, {64}, torch::TensorOptions(accelerator.device()).dtype(torch::kLong));
  measure(accelerator, "ResNet, 64 x 3 x 64 x 64", net,
          accelerate::SGD(net->parameters(), {.lr = 1e-2, .momentum = 0.9}), images, labels, 50);
}

}  // namespace

int main() {
  Accelerator accelerator({.mixed_precision = accelerate::PrecisionType::kBf16});
  bench::report("start to the accelerator", bench::milliseconds_since_start(), "ms");
  measure_gpt(accelerator, "GPT 3.3 M, 8 x 128", GptConfig::small(), 200);
  auto large = GptConfig::gpt2();
  large.vocab = 50304;  // a multiple of 64, which kernels like
  measure_gpt(accelerator, "GPT 124 M, 8 x 1024", large, 20);
  measure_resnet(accelerator);
}
