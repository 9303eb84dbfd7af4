// One model cut over 2 processes, beside the same step of one process and beside what
// docs/parallelism.md says that it sends; model_parallel.py does the first with Python's own
// tensor parallelism.
//
//     bench_model_parallel tp|cp|sp    a step of a GPT, and bytes that it sends
//     bench_model_parallel pp          the part of a step in which stages wait, and what they send
//     bench_model_parallel memory_tp   memory of a process that trains a part of 100 million
//     bench_model_parallel memory_pp   parameters
//     bench_model_parallel memory_cp   memory of the activations of long sequences
//     bench_model_parallel memory_sp
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../examples/gpt_model.h"
#include "memory.h"
#include "model_parallel/sequence_messages.h"
#include "support.h"

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;
using accelerate::ParallelismConfig;
using accelerate::detail::model_parallel::sequence_traffic;

constexpr std::int64_t kBatch = 4;
constexpr double kMega = 1e6;
constexpr double kFloatBytes = 4;

ParallelismConfig config_of(std::string_view mode, std::int64_t processes) {
  if (mode.ends_with("tp")) return {.tp_size = processes};
  if (mode.ends_with("cp")) return {.cp_size = processes};
  if (mode.ends_with("sp")) return {.sp_size = processes};
  return {.pp_size = processes};
}

at::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& target) {
  return F::cross_entropy(scores.flatten(0, -2), target.flatten());
}

void cut_layers(const Accelerator& accelerator, examples::GptImpl& net) {
  using accelerate::TpStyle;
  accelerate::apply_tp_plan(net,
                            {{"tokens", TpStyle::kVocab},
                             {"blocks.*.attend", TpStyle::kColwise, 3},
                             {"blocks.*.attend_out", TpStyle::kRowwise},
                             {"blocks.*.expand", TpStyle::kColwise},
                             {"blocks.*.expand_out", TpStyle::kRowwise},
                             {"head", TpStyle::kColwiseRep}},
                            accelerator.torch_device_mesh());
}

// ---- steps of a GPT -----------------------------------------------------------------------------

/// What one process sends in a step, from what travels in each layer.
double bytes_by_the_table(std::string_view mode, const examples::GptConfig& config,
                          double processes) {
  const auto tokens = static_cast<double>(kBatch * config.block);
  const auto layers = static_cast<double>(config.layers);
  const double activation = kFloatBytes * tokens * static_cast<double>(config.width);
  if (mode == "tp") {
    // Sums: twice per block in each direction, the embedding and the input of the head; and the
    // scores, of which each process has a part.
    const double scores = kFloatBytes * tokens * static_cast<double>(config.vocab);
    return (4 * layers + 2) * activation + scores / processes;
  }
  const double others = processes - 1;
  const double mine = activation / processes;
  // Keys and values of a process forward and backward, and gradients of all keys and values back.
  if (mode == "cp") return layers * (2 * others * 2 * mine + processes * others * 2 * mine);
  // Query, key, value and result, in each direction.
  return layers * 2 * 4 * mine * others / processes;
}

class GptStep {
 public:
  GptStep(Accelerator& accelerator, std::string_view mode, const examples::GptConfig& config)
      : accelerator_(accelerator), mode_(mode), net_(config) {
    if (mode == "tp") cut_layers(accelerator, *net_);
    auto [model, optimizer] =
        accelerator.prepare(net_, accelerate::AdamW(net_->parameters(), {.lr = 1e-4}));
    model_ = std::move(model);
    optimizer_ = std::move(optimizer);
    const auto ids = torch::randint(config.vocab, {kBatch, config.block + 1});
    input_ = ids.slice(1, 0, config.block).contiguous();
    target_ = ids.slice(1, 1).contiguous();
    places_ = torch::arange(config.block).unsqueeze(0).repeat({kBatch, 1});
    if (mode == "sp") take_part();
  }
  ~GptStep() { accelerator_.free_memory(model_, optimizer_); }
  GptStep(const GptStep&) = delete;
  GptStep& operator=(const GptStep&) = delete;

  void run() {
    if (mode_ == "cp") {
      const auto split = accelerator_.maybe_context_parallel(
          {.buffers = {input_, target_, places_}, .buffer_seq_dims = {1, 1, 1}});
      train();
    } else {
      train();
    }
  }

 private:
  void train() {
    accelerator_.backward(loss_of(model_(input_, places_), target_));
    optimizer_.step();
    optimizer_.zero_grad();
  }

  /// Consecutive positions for each process.
  void take_part() {
    const auto part = [&](torch::Tensor& whole) {
      whole = whole.chunk(accelerator_.num_processes(), 1)[accelerator_.process_index()];
      whole = whole.contiguous();
    };
    for (auto* one : {&input_, &target_, &places_}) part(*one);
  }

  Accelerator& accelerator_;
  std::string mode_;
  examples::Gpt net_;
  accelerate::PreparedModel<examples::Gpt> model_;
  accelerate::AcceleratedOptimizer optimizer_;
  torch::Tensor input_, target_, places_;
};

/// The same step by LibTorch alone, of the whole batch.
class WholeStep {
 public:
  explicit WholeStep(const examples::GptConfig& config)
      : net_(config), optimizer_(net_->parameters(), {.lr = 1e-4}) {
    const auto ids = torch::randint(config.vocab, {kBatch, config.block + 1});
    input_ = ids.slice(1, 0, config.block).contiguous();
    target_ = ids.slice(1, 1).contiguous();
  }
  void run() {
    loss_of(net_(input_), target_).backward();
    optimizer_.step();
    optimizer_.zero_grad();
  }

 private:
  examples::Gpt net_;
  accelerate::AdamW optimizer_;
  torch::Tensor input_, target_;
};

/// What this process gives to the collectives of a step, the comparison of parameters left out.
double bytes_of(const std::function<void()>& step, std::string_view mode) {
  if (mode != "tp") {
    const auto sent = [] {
      const auto traffic = sequence_traffic();
      return static_cast<double>(traffic.all_gather_bytes + traffic.all_to_all_bytes);
    };
    const double before = sent();
    step();
    return sent() - before;
  }
  accelerate::Profiler profiler;
  profiler.start();
  step();
  profiler.stop();
  double bytes = 0;
  const auto averages = profiler.key_averages();
  for (const auto& one : averages.collectives()) {
    bytes += static_cast<double>(one.bytes);
  }
  return bytes;
}

void measure_steps(Accelerator& accelerator, const std::string& mode) {
  auto config = examples::GptConfig::small();
  if (mode != "tp") config.block = 512;  // long sequences
  GptStep cut(accelerator, mode, config);
  WholeStep whole(config);
  const std::vector<std::function<void()>> steps{[&] { whole.run(); }, [&] { cut.run(); }};
  for (const auto& step : steps) step();
  const auto times = bench::in_turns(steps, /*rounds=*/15, /*round=*/400'000);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times[0].size(); ++i) ratios.push_back(times[1][i] / times[0][i]);
  bench::report(mode + ": step of one process", bench::median(times[0]) / 1e3, "ms");
  bench::report(mode + ": step", bench::median(times[1]) / 1e3, "ms");
  bench::report(mode + ": step, of that of one process", bench::median(ratios), "x");
  bench::report(mode + ": bytes of a step", bytes_of(steps[1], mode) / kMega, "MB");
  bench::report(mode + ": bytes of a step, by the table",
                bytes_by_the_table(mode, config, accelerator.num_processes()) / kMega, "MB");
}

// ---- the bubble of a pipeline -------------------------------------------------------------------

torch::nn::Sequential equal_layers(std::int64_t count, std::int64_t width) {
  torch::nn::Sequential net;
  for (std::int64_t i = 0; i < count; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

void measure_bubble(Accelerator& accelerator) {
  constexpr std::int64_t kWidth = 512;
  constexpr std::int64_t kLayers = 8;
  constexpr std::int64_t kRows = 128;  // of a micro-batch
  const auto loss = [](const torch::Tensor& y, const torch::Tensor& target) {
    return torch::mse_loss(y, target);
  };
  const std::int64_t processes = accelerator.num_processes();
  using enum accelerate::PipelineSchedule;
  for (const auto schedule : {kGPipe, k1F1B, kInterleaved1F1B}) {
    for (const std::int64_t parts : {4, 8}) {
      const std::int64_t chunks = schedule == kInterleaved1F1B ? 2 : 1;
      auto net = equal_layers(kLayers, kWidth);
      accelerate::Pipeline pipeline(net, loss,
                                    {.schedule = schedule,
                                     .num_micro_batches = parts,
                                     .chunks = chunks,
                                     .broadcast_loss = false});
      auto [model, optimizer] =
          accelerator.prepare(pipeline, accelerate::SGD(net->parameters(), {.lr = 1e-3}));
      const auto x = torch::randn({parts * kRows, kWidth});
      // One stage by itself, on all processes at the same time.
      auto stage = equal_layers(kLayers / processes, kWidth);
      const auto input = torch::randn({kRows, kWidth}, torch::requires_grad());
      const auto alone = [&] {
        for (std::int64_t i = 0; i < parts; ++i) loss(stage->forward(input), input).backward();
      };
      const auto together = [&, &model = model] {
        model->forward_backward({x}, {x});
        net->zero_grad();
      };
      const auto times =
          bench::in_turns({std::function<void()>(alone), together}, /*rounds=*/9, 200'000);
      std::vector<double> bubbles;
      for (std::size_t i = 0; i < times[0].size(); ++i) {
        bubbles.push_back(1 - times[0][i] / times[1][i]);
      }
      const auto before = model->_bytes_sent();
      together();
      const auto sent = accelerator.reduce(torch::tensor(model->_bytes_sent() - before));
      const auto name = "pp, " + accelerate::to_string(schedule) + " of " + std::to_string(parts);
      bench::report(name + ": step", bench::median(times[1]) / 1e3, "ms");
      bench::report(name + ": bubble", 100 * bench::median(bubbles), "%");
      bench::report(name + ": bubble, in theory",
                    100 * accelerate::theoretical_bubble(
                              {.ranks = processes, .micro_batches = parts, .chunks = chunks}),
                    "%");
      bench::report(name + ": bytes of a step, all processes", sent.item<double>() / kMega, "MB");
      // Activations and their gradients pass each boundary between stages once.
      const auto boundaries = static_cast<double>(processes * chunks - 1);
      bench::report(name + ": bytes of a step, by the table",
                    2 * boundaries * kFloatBytes * static_cast<double>(x.numel()) / kMega, "MB");
      accelerator.free_memory(model, optimizer);
    }
  }
}

// ---- memory -------------------------------------------------------------------------------------

/// float32 parameters, gradients and two states of AdamW.
constexpr double kBytesOfAParameter = 16;

void report_memory(const std::string& mode, double most, double parameters) {
  double largest = 0, expected = 0;
  for (const auto& [held, own] :
       accelerate::gather_object(std::vector<std::pair<double, double>>{{most, parameters}})) {
    largest = std::max(largest, held);
    expected = std::max(expected, kBytesOfAParameter * own);
  }
  bench::report(mode + ": memory", largest / kMega, "MB");
  bench::report(mode + ": memory, by the parameters of a process", expected / kMega, "MB");
  bench::report(mode + ": memory above that", 100 * (largest / expected - 1), "%");
}

double elements_here(const torch::nn::Module& net) {
  double count = 0;
  for (const auto& one : net.parameters()) {
    if (!one.is_meta()) count += static_cast<double>(one.numel());
  }
  return count;
}

void measure_memory(Accelerator& accelerator, std::string_view mode) {
  // 8 blocks of 12.6 million parameters.
  const examples::GptConfig config{
      .vocab = 256, .block = 8, .layers = 8, .heads = 8, .width = 1024};
  mallopt(M_MMAP_THRESHOLD, 1 << 16);  // large tensors go back to the system at once
  {                                    // what the first step of a process allocates for good
    WholeStep(examples::GptConfig::tiny()).run();
  }
  malloc_trim(0);
  const double before = bench::private_bytes();
  examples::Gpt net(config);
  const auto ids = torch::randint(config.vocab, {1, config.block + 1});
  const auto input = ids.slice(1, 0, config.block).contiguous();
  const auto target = ids.slice(1, 1).contiguous();
  const auto measure = [&](const std::function<void()>& step) {
    for (int i = 0; i < 2; ++i) step();
    malloc_trim(0);
    bench::forget_peak();
    step();
    report_memory(mode == "memory_tp" ? "tp" : "pp", bench::peak_private_bytes() - before,
                  elements_here(*net));
  };
  if (mode == "memory_tp") {
    cut_layers(accelerator, *net);
    auto [model, optimizer] =
        accelerator.prepare(net, accelerate::AdamW(net->parameters(), {.lr = 1e-4}));
    measure([&, &model = model, &optimizer = optimizer] {
      accelerator.backward(loss_of(model(input), target));
      optimizer.step();
      optimizer.zero_grad();
    });
    return;
  }
  accelerate::Pipeline pipeline(net, loss_of, {.num_micro_batches = 1});
  auto [model, optimizer] =
      accelerator.prepare(pipeline, accelerate::AdamW(net->parameters(), {.lr = 1e-4}));
  measure([&, &model = model] { model(input, target); });
}

/// What a step needs beside what stays: activations, most of all.
double memory_of(const std::function<void()>& step) {
  for (int i = 0; i < 2; ++i) step();
  malloc_trim(0);
  const double before = bench::private_bytes();
  bench::forget_peak();
  step();
  return bench::peak_private_bytes() - before;
}

void measure_activations(Accelerator& accelerator, const std::string& mode) {
  auto config = examples::GptConfig::small();
  config.block = 2048;
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  GptStep cut(accelerator, mode, config);
  WholeStep whole(config);
  const double of_one = memory_of([&] { whole.run(); });
  const double own = memory_of([&] { cut.run(); });
  bench::report(mode + ": memory of a step of one process", of_one / kMega, "MB");
  bench::report(mode + ": memory of a step", own / kMega, "MB");
  bench::report(mode + ": memory of a step, of that of one process", own / of_one, "x");
  bench::report(mode + ": the same, in theory", 1.0 / accelerator.num_processes(), "x");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "tp";
  ::setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true", 1);
  const int processes = accelerate::PartialState({.cpu = true}).num_processes();
  if (processes < 2) {
    std::cerr << "bench_model_parallel needs several processes: accelerate launch --cpu "
                 "--num_processes 2\n";
    return 2;
  }
  Accelerator accelerator({.cpu = true, .parallelism_config = config_of(mode, processes)});
  at::set_num_threads(1);
  accelerate::set_seed(1);
  bench::settle();
  if (mode == "pp") {
    measure_bubble(accelerator);
  } else if (mode == "memory_cp" || mode == "memory_sp") {
    measure_activations(accelerator, mode.substr(mode.size() - 2));
  } else if (mode.starts_with("memory")) {
    measure_memory(accelerator, mode);
  } else {
    measure_steps(accelerator, mode);
  }
}
