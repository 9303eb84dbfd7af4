// bench/gpu_models.h - what benchmarks of a GPU share: large models that are made on the device,
// and tiny ones where there is none, so that the programs can be tried anywhere.
#pragma once

#include <torch/torch.h>

#include <cstdlib>
#include <string>

#include "../examples/gpt_model.h"
#include "support.h"

namespace bench {

inline bool on_gpu() { return torch::cuda::is_available(); }

inline std::string variable(const char* name, const char* fallback) {
  const char* const text = std::getenv(name);
  return text != nullptr ? text : fallback;
}

/// Of each median.
inline int gpu_rounds() {
  return on_gpu() ? std::max(1, std::stoi(variable("BENCH_GPU_ROUNDS", "5"))) : 1;
}

inline examples::GptConfig sized(const examples::GptConfig& config) {
  return on_gpu() ? config : examples::GptConfig{.tied = config.tied};
}

inline examples::GptConfig gpt124() {
  auto config = examples::GptConfig::gpt2();
  config.vocab = 50304;  // a multiple of 64, which kernels like
  return sized(config);
}

/// A GPT that is made on the device: random numbers of the CPU take seconds for large ones.
template <class Net>
Net made_on(torch::Device device, const examples::GptConfig& config) {
  auto net = accelerate::init_empty_weights([&] { return Net(config); });
  const torch::NoGradGuard no_grad;
  for (const auto& item : net->named_parameters()) {
    const auto& shape = item.value().sizes();
    auto value = torch::zeros(shape, device);
    if (shape.size() > 1) {
      value.normal_(0, 0.02);
    } else if (item.key().ends_with("weight")) {
      value.fill_(1);
    }
    accelerate::set_module_tensor_to_device(*net, item.key(), device, {.value = value});
  }
  return net;
}

/// Microseconds of a step; `wait` waits for the device.
template <class Step, class Wait>
double time_of(const Step& step, const Wait& wait, int steps) {
  if (!on_gpu()) steps = 1;
  for (int i = 0; i < std::min(8, 2 * steps); ++i) step();
  std::vector<double> times;
  for (int round = 0; round < gpu_rounds(); ++round) {
    wait();
    times.push_back(microseconds(1,
                                 [&] {
                                   for (int i = 0; i < steps; ++i) step();
                                   wait();
                                 }) /
                    steps);
  }
  return median(times);
}

}  // namespace bench
