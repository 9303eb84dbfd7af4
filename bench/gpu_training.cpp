// Steps of a prepared loop in bf16 on a GPU, as they are and captured, with their peak memory, and
// the time from the start of the program to the end of the first step; gpu_training.py does the
// same in Python, with torch.compile in place of captured steps.
//
//     bench_gpu_training [PART...]
//
//   gpt3m     3.3 million parameters
//   gpt124    124 million: examples/gpt_model.h, of nn::Linear and otherwise plain torch::nn
//   modules   the same size of the modules of nn.h
//   resnet    a ResNet
//   wide      4 layers of width 4096 in bf16
//   fp8       the same in fp8
//
//   BENCH_GPU_PARTS    the parts if no argument names them; by default all
//   BENCH_GPU_ROUNDS   rounds of each median, 5
//
// Without a GPU one round of tiny models shows that the program works.
#include <ATen/DeviceAccelerator.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpu_models.h"
#include "module_gpt.h"
#include "resnet.h"
#include "since_start.h"
#include "support.h"

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;
using accelerate::PrecisionType;
using examples::GptConfig;
using torch::Tensor;

/// Of the current device since the last call, in GB. The allocator has begun once a tensor is
/// there.
double peak_memory() {
  if (!bench::on_gpu()) return 0;
  const auto index = at::accelerator::getDeviceIndex();
  const auto stats = at::accelerator::getDeviceStats(index);
  at::accelerator::resetPeakStats(index);
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<double>(stats.allocated_bytes[kAll].peak) / 1e9;
}

/// After the first step of the program.
void report_start(double prepared) {
  static bool first = true;
  if (!std::exchange(first, false)) return;
  bench::report("start to a model on the device", prepared, "ms");
  bench::report("start to the end of the first step", bench::milliseconds_since_start(), "ms");
}

/// `loss_of` calls the prepared model with a batch.
template <class Net, class Optimizer, class LossOf>
void measure(Accelerator& accelerator, const std::string& name, Net net, Optimizer own,
             Tensor input, Tensor target, int steps, const LossOf& loss_of) {
  auto [model, optimizer] = accelerator.prepare(net, std::move(own));
  const double prepared = bench::milliseconds_since_start();
  const auto body = [&, &model = model, &optimizer = optimizer](const Tensor& x, const Tensor& y) {
    auto accumulating = accelerator.accumulate(model);
    optimizer.zero_grad();
    accelerator.backward(loss_of(model, x, y));
    optimizer.step();
  };
  // Reading a parameter waits for the device.
  const auto wait = [&] { net->parameters().back().sum().template item<float>(); };
  peak_memory();
  body(input, target);
  wait();
  report_start(prepared);
  const auto report = [&](const std::string& what, const auto& step) {
    bench::report(name + what, bench::time_of(step, wait, steps), "us");
    bench::report(name + what + ", peak memory", peak_memory(), "GB");
  };
  report("step", [&] { body(input, target); });
  auto captured = accelerator.capture(body);
  report("captured step", [&] { captured(input, target); });
  accelerator.free_memory(model, optimizer);
}

const auto loss_of_scores = [](auto& model, const Tensor& x, const Tensor& y) {
  return F::cross_entropy(model(x).flatten(0, -2), y.flatten());
};

/// 8 sequences of all tokens that the model sees.
template <class Net, class LossOf>
void measure_gpt(Accelerator& accelerator, const std::string& name, const GptConfig& config,
                 Net net, int steps, const LossOf& loss_of) {
  const auto on_device = torch::TensorOptions(accelerator.device()).dtype(torch::kLong);
  const auto ids = torch::randint(config.vocab, {8, config.block}, on_device);
  const auto target = torch::randint(config.vocab, {8, config.block}, on_device);
  measure(accelerator, name, net, accelerate::AdamW(net->parameters(), {.lr = 1e-4}), ids, target,
          steps, loss_of);
}

void measure_gpt3m(Accelerator& accelerator) {
  torch::manual_seed(0);
  const auto config = bench::sized(GptConfig::small());
  measure_gpt(accelerator, "GPT 3.3 M, 8 x 128: ", config, examples::Gpt(config), 200,
              loss_of_scores);
}

void measure_gpt124(Accelerator& accelerator) {
  const auto config = bench::gpt124();
  measure_gpt(accelerator, "GPT 124 M, 8 x 1024: ", config,
              bench::made_on<examples::Gpt>(accelerator.device(), config), 20, loss_of_scores);
}

void measure_modules(Accelerator& accelerator) {
  const auto config = bench::gpt124();
  measure_gpt(accelerator, "GPT 124 M, modules: ", config,
              bench::made_on<bench::ModuleGpt>(accelerator.device(), config), 20,
              [](auto& model, const Tensor& x, const Tensor& y) { return model(x, y); });
}

void measure_resnet(Accelerator& accelerator) {
  torch::manual_seed(0);
  auto net = bench::make_resnet();
  const std::int64_t batch = bench::on_gpu() ? 64 : 2;
  const auto images = torch::randn({batch, 3, 64, 64}, accelerator.device());
  const auto labels =
      torch::randint(100, {batch}, torch::TensorOptions(accelerator.device()).dtype(torch::kLong));
  measure(accelerator, "ResNet, 64 x 3 x 64 x 64: ", net,
          accelerate::SGD(net->parameters(), {.lr = 1e-2, .momentum = 0.9}), images, labels, 50,
          loss_of_scores);
}

/// 1.2 billion parameters in few and wide layers, whose products take most of the time.
void measure_wide(Accelerator& accelerator) {
  const auto config =
      bench::sized({.vocab = 50304, .block = 1024, .layers = 4, .heads = 32, .width = 4096});
  const auto precision = accelerator.mixed_precision();
  measure_gpt(accelerator, "wide GPT: " + std::string(accelerate::to_string(precision)) + " ",
              config, bench::made_on<examples::Gpt>(accelerator.device(), config), 4,
              loss_of_scores);
}

struct Part {
  std::string name;
  void (*measure)(Accelerator&);
  PrecisionType precision = PrecisionType::kBf16;
};

const std::vector<Part>& all_parts() {
  static const std::vector<Part> parts{
      {"gpt3m", measure_gpt3m},     {"gpt124", measure_gpt124},
      {"modules", measure_modules}, {"resnet", measure_resnet},
      {"wide", measure_wide},       {"fp8", measure_wide, PrecisionType::kFp8}};
  return parts;
}

std::vector<Part> chosen_parts(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty()) {
    std::istringstream words(bench::variable("BENCH_GPU_PARTS", ""));
    for (std::string word; words >> word;) names.push_back(word);
  }
  if (names.empty()) return all_parts();
  std::vector<Part> chosen;
  for (const auto& name : names) {
    const auto found = std::ranges::find(all_parts(), name, &Part::name);
    if (found == all_parts().end()) {
      throw accelerate::ConfigError("'" + name +
                                    "' is no part. Choose from: gpt3m gpt124 modules resnet wide "
                                    "fp8");
    }
    chosen.push_back(*found);
  }
  return chosen;
}

void measure_parts(const std::vector<Part>& parts, PrecisionType precision) {
  const auto wanted = [&](const Part& part) { return part.precision == precision; };
  if (std::ranges::none_of(parts, wanted)) return;
  accelerate::AcceleratorState::_reset_state();
  accelerate::AcceleratorOptions options{.mixed_precision = precision};
  if (precision == PrecisionType::kFp8) {
    options.kwargs_handlers = {
        accelerate::AORecipeKwargs{.config = accelerate::Float8LinearConfig{
                                       .pad_inner_dim = true, .emulate = !bench::on_gpu()}}};
  }
  Accelerator accelerator(options);
  static bool first = true;
  if (std::exchange(first, false)) {
    bench::report("start to the accelerator", bench::milliseconds_since_start(), "ms");
  }
  for (const auto& part : parts) {
    if (wanted(part)) part.measure(accelerator);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    const auto parts = chosen_parts(argc, argv);
    if (!bench::on_gpu()) std::cerr << "bench_gpu_training: no GPU, so tiny models on the CPU\n";
    measure_parts(parts, PrecisionType::kBf16);
    measure_parts(parts, PrecisionType::kFp8);
  });
}
