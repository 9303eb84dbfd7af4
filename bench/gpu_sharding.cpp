// Sharded training on one GPU, where nothing is sent: what the engine itself takes, and optimizer
// states that are kept on the host.
//
//     bench_gpu_sharding [engine|offload]...    parts; by default all
//
//   BENCH_GPU_ROUNDS   rounds of each median, 5
//
// Without a GPU a tiny model shows that the program works.
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "gpu_models.h"
#include "sharding/sharded_engine.h"
#include "support.h"

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;
using accelerate::Value;
using accelerate::detail::sharding::ShardedEngine;
using accelerate::detail::sharding::ShardLevel;
using accelerate::detail::sharding::ShardProcesses;
using accelerate::detail::sharding::ShardSpec;

constexpr int kSteps = 20;

accelerate::AcceleratorOptions fresh(accelerate::AcceleratorOptions options) {
  accelerate::AcceleratorState::_reset_state();
  accelerate::GradientState::_reset_state();
  return options;
}

/// 8 sequences of all tokens that the model sees, in bf16.
class Training {
 public:
  using Model = accelerate::PreparedModel<examples::Gpt>;
  using Prepare = std::function<Model(Accelerator&, examples::Gpt)>;

  Training(accelerate::AcceleratorOptions options, const Prepare& prepare)
      : accelerator_(fresh(std::move(options))),
        config_(bench::gpt124()),
        net_(bench::made_on<examples::Gpt>(accelerator_.device(), config_)) {
    for (const auto& parameter : net_->parameters()) parameters_ += parameter.numel();
    accelerate::AdamW adamw(net_->parameters(), {.lr = 1e-4});
    model_ = prepare(accelerator_, net_);
    optimizer_ = accelerator_.prepare(std::move(adamw));
    const auto on_device = torch::TensorOptions(accelerator_.device()).dtype(torch::kLong);
    input_ = torch::randint(config_.vocab, {8, config_.block}, on_device);
    target_ = torch::randint(config_.vocab, {8, config_.block}, on_device);
  }

  [[nodiscard]] double milliseconds() {
    const auto wait = [&] {
      if (bench::on_gpu()) torch::cuda::synchronize();
    };
    return bench::time_of([&] { step(); }, wait, kSteps) / 1e3;
  }
  [[nodiscard]] double parameters() const { return static_cast<double>(parameters_); }

 private:
  void step() {
    const auto accumulating = accelerator_.accumulate(model_);
    const auto loss = F::cross_entropy(model_(input_).flatten(0, -2), target_.flatten());
    accelerator_.backward(loss);
    optimizer_.step();
    optimizer_.zero_grad();
  }

  Accelerator accelerator_;
  examples::GptConfig config_;
  examples::Gpt net_;
  std::int64_t parameters_ = 0;
  Model model_;
  accelerate::AcceleratedOptimizer optimizer_;
  torch::Tensor input_, target_;
};

Training::Model replicated(Accelerator& accelerator, examples::Gpt net) {
  return accelerator.prepare(std::move(net));
}

/// Each block is a unit, which is gathered and released though this process has all of it.
Training::Model sharded(Accelerator& accelerator, examples::Gpt net) {
  ShardSpec spec{.level = ShardLevel::kParameters};
  for (int i = 0; i < net->config().layers; ++i) {
    spec.units.push_back("blocks." + std::to_string(i));
  }
  auto model = accelerator.prepare_model(net, {.evaluation_mode = true});
  const auto group = accelerator.state().process_group();
  model._core()->use(std::make_shared<ShardedEngine>(
      *net, spec, ShardProcesses{.shard = group, .all = group}, accelerator.device()));
  return model;
}

void measure_engine() {
  const accelerate::AcceleratorOptions bf16{.mixed_precision = accelerate::PrecisionType::kBf16};
  const double plain = Training(bf16, replicated).milliseconds();
  const double engine = Training(bf16, sharded).milliseconds();
  bench::report("GPT 124 M: level 0, step", plain, "ms");
  bench::report("GPT 124 M: level 3, step", engine, "ms");
  bench::report("GPT 124 M: level 3, operators and units", 100 * (engine / plain - 1), "%");
}

accelerate::AcceleratorOptions deepspeed(bool offloads) {
  Value::Dict zero{{"stage", 2}};
  if (offloads) {
    zero.set("offload_optimizer", Value::Dict{{"device", "cpu"}, {"pin_memory", true}});
  }
  return {.deepspeed_plugin = accelerate::DeepSpeedPlugin{
              .hf_ds_config = Value::Dict{{"bf16", Value::Dict{{"enabled", true}}},
                                          {"zero_optimization", std::move(zero)},
                                          {"gradient_accumulation_steps", 1},
                                          {"train_micro_batch_size_per_gpu", 8}}}};
}

/// GB/s between pinned memory and the device.
double pinned_rate() {
  if (!bench::on_gpu()) return 0;
  const auto host =
      torch::empty({512 << 20}, torch::TensorOptions(torch::kByte).pinned_memory(true));
  const auto there = torch::empty_like(host, torch::kCUDA);
  const auto time = bench::time_of([&] { there.copy_(host, /*non_blocking=*/true); },
                                   [] { torch::cuda::synchronize(); }, 4);
  return static_cast<double>(host.nbytes()) / time / 1e3;
}

/// The step of as many numbers on the host.
double milliseconds_of_adamw(double numbers) {
  const auto parameter = torch::zeros({static_cast<std::int64_t>(numbers)}).requires_grad_();
  parameter.mutable_grad() = torch::ones_like(parameter);
  accelerate::AdamW adamw({parameter}, {.lr = 1e-4});
  return bench::time_of([&] { adamw.step(); }, [] {}, 2) / 1e3;
}

void measure_offload() {
  const double resident = Training(deepspeed(false), replicated).milliseconds();
  double offloaded = 0, parameters = 0;
  {
    Training training(deepspeed(true), replicated);
    offloaded = training.milliseconds();
    parameters = training.parameters();
  }
  // Gradients go down as float32, weights come up as bf16.
  const double gigabytes = parameters * (4 + 2) / 1e9;
  const double rate = pinned_rate();
  bench::report("DeepSpeed, stage 2: step", resident, "ms");
  bench::report("DeepSpeed, offload_optimizer cpu: step", offloaded, "ms");
  bench::report("  AdamW of the host", milliseconds_of_adamw(parameters), "ms");
  bench::report("  moved", gigabytes, "GB");
  if (rate <= 0) return;
  bench::report("  pinned memory to the GPU", rate, "GB/s");
  bench::report("  moved at that rate", 1e3 * gigabytes / rate, "ms");
  bench::report("  bytes by the time above the resident step, of that rate",
                100 * gigabytes / (offloaded - resident) * 1e3 / rate, "%");
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    const std::vector<std::string> parts(argv + 1, argv + argc);
    for (const auto& part : parts) {
      if (part == "engine" || part == "offload") continue;
      throw accelerate::ConfigError("'" + part + "' is no part. Choose engine or offload.");
    }
    const auto wanted = [&](const char* part) {
      return parts.empty() || std::ranges::find(parts, part) != parts.end();
    };
    // A group of one process, without a launcher.
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    [[maybe_unused]] const accelerate::PartialState state(
        {.store = store, .rank = 0, .world_size = 1, .local_rank = 0, .local_world_size = 1});
    if (!bench::on_gpu()) std::cerr << "bench_gpu_sharding: no GPU, so a tiny model on the CPU\n";
    if (wanted("engine")) measure_engine();
    if (wanted("offload")) measure_offload();
  });
}
