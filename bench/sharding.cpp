// Sharded training at levels 1 to 3 beside data parallelism; sharding.py does the same with torch's
// fully_shard.
//
//     bench_sharding          time of a step and bytes that it sends, for 2 processes or more
//     bench_sharding memory   memory of a process that trains 100 million parameters
//
// What is measured stands beside what docs/sharding.md says it is.
#include <malloc.h>
#include <torch/torch.h>

#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "../examples/gpt_model.h"
#include "memory.h"
#include "sharding/sharded_engine.h"
#include "support.h"

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;
using accelerate::detail::sharding::ShardedEngine;
using accelerate::detail::sharding::ShardLevel;
using accelerate::detail::sharding::ShardSpec;

constexpr double kMega = 1e6;

/// A GPT whose blocks are units, by data parallelism at level 0.
class Training {
 public:
  Training(Accelerator& accelerator, int level, const examples::GptConfig& config,
           std::int64_t batch, std::int64_t time)
      : accelerator_(accelerator), net_(config) {
    if (level == 0) {
      model_ = accelerator.prepare(net_);
    } else {
      ShardSpec spec{.level = static_cast<ShardLevel>(level)};
      for (int i = 0; i < config.layers; ++i) spec.units.push_back("blocks." + std::to_string(i));
      model_ = accelerator.prepare_model(net_, {.evaluation_mode = true});
      const auto group =
          accelerator.use_distributed() ? accelerator.state().process_group() : nullptr;
      engine_ = std::make_shared<ShardedEngine>(
          *net_, spec, accelerate::detail::sharding::ShardProcesses{.shard = group, .all = group},
          accelerator.device());
      model_._core()->use(engine_);
    }
    optimizer_ = accelerator.prepare(accelerate::AdamW(net_->parameters(), {.lr = 1e-4}));
    const auto ids = torch::randint(config.vocab, {batch, time + 1});
    input_ = ids.slice(1, 0, time);
    target_ = ids.slice(1, 1).contiguous();
  }
  ~Training() { accelerator_.free_memory(model_, optimizer_); }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void step() {
    const auto loss = F::cross_entropy(model_(input_).flatten(0, -2), target_.flatten());
    accelerator_.backward(loss);
    optimizer_.step();
    optimizer_.zero_grad();
  }
  [[nodiscard]] const std::shared_ptr<ShardedEngine>& engine() const { return engine_; }

 private:
  Accelerator& accelerator_;
  examples::Gpt net_;
  accelerate::PreparedModel<examples::Gpt> model_;
  accelerate::AcceleratedOptimizer optimizer_;
  std::shared_ptr<ShardedEngine> engine_;
  torch::Tensor input_, target_;
};

std::string name_of(int level) {
  return level == 0 ? "data parallelism" : "level " + std::to_string(level);
}

struct Elements {
  explicit Elements(const examples::GptConfig& config) {
    const examples::Gpt net(config);
    for (const auto& one : net->named_parameters()) {
      all += one->numel();
      if (one.key().starts_with("blocks.0.")) block += one->numel();
    }
    root = all - config.layers * block;
  }
  std::int64_t all = 0, block = 0, root = 0;
};

// ---- time and bytes -----------------------------------------------------------------------------

double cpu_microseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

/// What the table of docs/sharding.md says.
double bytes_by_the_table(int level, const Elements& elements, double processes) {
  const double others = (processes - 1) / processes;
  double sent = 2.0 * static_cast<double>(elements.all);
  if (level == 3) sent = static_cast<double>(3 * elements.all - elements.root - elements.block);
  return 4 * others * sent;
}

void measure_steps(Accelerator& accelerator) {
  auto config = examples::GptConfig::small();
  const Elements elements(config);
  const double processes = accelerator.num_processes();
  std::vector<std::unique_ptr<Training>> trainings;
  std::vector<std::function<void()>> steps;
  std::vector<double> cpu(4);
  std::vector<int> calls(4);
  for (int level = 0; level < 4; ++level) {
    trainings.push_back(std::make_unique<Training>(accelerator, level, config, 4, config.block));
    steps.push_back([&cpu, &calls, level, training = trainings.back().get()] {
      const double before = cpu_microseconds();
      training->step();
      cpu[level] += cpu_microseconds() - before;
      ++calls[level];
    });
  }
  for (auto& step : steps) step();
  const auto times = bench::in_turns(steps, /*rounds=*/15, /*round=*/400'000);
  for (int level = 0; level < 4; ++level) {
    const auto name = name_of(level);
    bench::report(name + ": step", bench::median(times[level]) / 1e3, "ms");
    bench::report(name + ": CPU time of a step", cpu[level] / calls[level] / 1e3, "ms");
    if (level == 0) continue;
    std::vector<double> ratios;
    for (std::size_t i = 0; i < times[level].size(); ++i) {
      ratios.push_back(times[level][i] / times[0][i]);
    }
    bench::report(name + ": step, of data parallelism", bench::median(ratios), "x");
    const auto& stats = trainings[level]->engine()->stats();
    const auto sent = [&] {
      return static_cast<double>(stats.all_gather.bytes + stats.reduce_scatter.bytes +
                                 2 * stats.all_reduce.bytes) *
             (processes - 1) / processes;
    };
    const double before = sent();
    trainings[level]->step();
    bench::report(name + ": bytes of a step", (sent() - before) / kMega, "MB");
    bench::report(name + ": bytes of a step, by the table",
                  bytes_by_the_table(level, elements, processes) / kMega, "MB");
  }
}

// ---- memory -------------------------------------------------------------------------------------

/// What the table of docs/sharding.md says: with `prefetch` 1, two reduce buffers and that of the
/// root, whose gradients come first and last.
double memory_by_the_table(int level, const Elements& elements, double processes) {
  const auto all = static_cast<double>(elements.all);
  const auto block = static_cast<double>(elements.block);
  const auto root = static_cast<double>(elements.root);
  if (level == 0) return 16 * all;
  const double buffers = 4 * (2 * block + root);
  if (level < 3) return 4 * all + 12 * all / processes + buffers;
  return 16 * all / processes + 4 * (2 * block + root) + buffers;
}

void measure_memory(Accelerator& accelerator) {
  // 8 blocks of 12.6 million parameters.
  const examples::GptConfig config{
      .vocab = 256, .block = 8, .layers = 8, .heads = 8, .width = 1024};
  const Elements elements(config);
  // Large tensors go back to the system at once.
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  // Once, small: what the first step of a process allocates for good.
  {
    Training(accelerator, 0, examples::GptConfig::tiny(), 1, 8).step();
  }
  bench::report("parameters", static_cast<double>(elements.all) / kMega, "M");
  for (int level = 3; level >= 0; --level) {
    malloc_trim(0);
    const double before = bench::private_bytes();
    Training training(accelerator, level, config, 1, config.block);
    for (int i = 0; i < 2; ++i) training.step();
    bench::forget_peak();
    training.step();
    const double most = bench::peak_private_bytes() - before;
    double largest = 0;
    for (const double one : accelerate::gather_object(std::vector<double>{most})) {
      largest = std::max(largest, one);
    }
    const double expected = memory_by_the_table(level, elements, accelerator.num_processes());
    const auto name = name_of(level);
    bench::report(name + ": memory", largest / kMega, "MB");
    bench::report(name + ": memory, by the table", expected / kMega, "MB");
    bench::report(name + ": memory above the table", 100 * (largest / expected - 1), "%");
  }
}

}  // namespace

int main(int argc, char** argv) {
  Accelerator accelerator({.cpu = true});
  at::set_num_threads(1);
  accelerate::set_seed(accelerator.process_index());
  if (accelerator.use_distributed()) bench::settle();
  if (argc > 1 && std::string_view(argv[1]) == "memory") {
    measure_memory(accelerator);
  } else {
    measure_steps(accelerator);
  }
}
