// Steps of a prepared training loop, and what they take above the same loop of plain LibTorch;
// training.py does the same with Python Accelerate.
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "../examples/gpt_model.h"
#include "mlp.h"
#include "support.h"

namespace {
std::atomic<std::int64_t> allocations = 0;
}

// Counts what this program and the libraries below it allocate.
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

namespace F = torch::nn::functional;
using accelerate::Accelerator;

/// The steps of a user's loop over one batch.
template <class Model, class Optimizer>
std::function<void()> prepared_step(Accelerator& accelerator, Model model, Optimizer optimizer,
                                    torch::Tensor input, torch::Tensor target) {
  return [=, &accelerator]() mutable {
    auto accumulating = accelerator.accumulate(model);
    const auto scores = model(input);
    const auto loss = F::cross_entropy(scores.flatten(0, -2), target.flatten());
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
  };
}

/// One process: steps of which a profiler records all operators, in turns with steps without it.
void measure_profiler(Accelerator& accelerator, const std::string& name, int repeats,
                      const std::function<void()>& step) {
  std::vector<double> without, with;
  for (int round = 0; round < 6; ++round) {
    const double plain = bench::microseconds(repeats, step);
    double recorded = 0;
    accelerator.profile({}, [&] { recorded = bench::microseconds(repeats, step); });
    if (round == 0) continue;  // the first recording loads what it needs
    without.push_back(plain);
    with.push_back(recorded);
  }
  bench::report(name + ": recorded step", bench::median(with), "us");
  bench::report(name + ": recorded above plain",
                100 * (bench::median(with) / bench::median(without) - 1), "%");
}

void measure_mlp(Accelerator& accelerator, const std::string& name,
                 const std::vector<std::int64_t>& widths) {
  const auto input = torch::randn({64, widths.front()});
  const auto target = torch::randint(widths.back(), {64});
  auto net = bench::make_mlp(widths);
  auto [model, optimizer] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01)));
  const auto step = prepared_step(accelerator, model, optimizer, input, target);
  bench::report(name + ": step", bench::median(bench::in_turns({step}, 11, 60'000)[0]), "us");
  if (accelerator.num_processes() == 1) measure_profiler(accelerator, name, 100, step);
  accelerator.free_memory(model, optimizer);
}

void measure_gpt(Accelerator& accelerator) {
  const auto config = examples::GptConfig::small();
  const auto ids = torch::randint(config.vocab, {2, config.block + 1});
  examples::Gpt net(config);
  auto [model, optimizer] = accelerator.prepare(
      net, torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-4)));
  const auto step = prepared_step(accelerator, model, optimizer, ids.slice(1, 0, config.block),
                                  ids.slice(1, 1).contiguous());
  bench::report("GPT 3.3 M: step", bench::median(bench::in_turns({step}, 5, 500'000)[0]), "us");
  if (accelerator.num_processes() == 1) measure_profiler(accelerator, "GPT 3.3 M", 10, step);
  accelerator.free_memory(model, optimizer);
}

std::vector<double> differences(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> result;
  for (std::size_t i = 0; i < a.size(); ++i) result.push_back(a[i] - b[i]);
  return result;
}

/// Several processes: what comparing parameters adds to a step.
void measure_drift_check(Accelerator& accelerator) {
  const std::vector<std::int64_t> widths{784, 256, 10};
  const auto input = torch::randn({64, widths.front()});
  const auto target = torch::randint(widths.back(), {64});
  Accelerator unchecked({.cpu = true, .drift_check = 0});
  const auto step_of = [&](Accelerator& own) {
    auto net = bench::make_mlp(widths);
    auto [model, optimizer] = own.prepare(net, accelerate::SGD(net->parameters(), {.lr = 0.01}));
    return prepared_step(own, model, optimizer, input, target);
  };
  const auto times = bench::in_turns({step_of(unchecked), step_of(accelerator)}, 101, 20'000);
  const double without = bench::median(times[0]);
  const double added = bench::median(differences(times[1], times[0]));
  bench::report("MLP 784-256-10: step, drift_check = 0", without, "us");
  bench::report("MLP 784-256-10: drift_check = 1 above it", added, "us");
  bench::report("MLP 784-256-10: drift_check = 1 above it", 100 * added / without, "%");
  accelerator.free_memory();
}

std::int64_t allocations_of(const std::function<void()>& f) {
  for (int i = 0; i < 10; ++i) f();
  const auto before = allocations.load();
  for (int i = 0; i < 100; ++i) f();
  return (allocations.load() - before) / 100;
}

/// One process: what the prepared loop takes above a loop that calls the same kernels itself.
void measure_overhead(Accelerator& accelerator) {
  const std::vector<std::int64_t> widths{256, 512, 256, 10};
  const auto input = torch::randn({64, widths.front()});
  const auto target = torch::randint(widths.back(), {64});
  auto raw_net = bench::make_mlp(widths);
  accelerate::SGD raw_optimizer(raw_net->parameters(), {.lr = 0.01});
  const auto raw = [&] {
    const auto loss = F::cross_entropy(raw_net->forward(input).flatten(0, -2), target.flatten());
    loss.backward();
    raw_optimizer.step();
    raw_optimizer.zero_grad();
  };
  auto net = bench::make_mlp(widths);
  auto [model, optimizer] =
      accelerator.prepare(net, accelerate::SGD(net->parameters(), {.lr = 0.01}));
  const auto prepared = prepared_step(accelerator, model, optimizer, input, target);
  const auto times = bench::in_turns({raw, prepared}, 101, 20'000);
  bench::report("MLP 256-512-256-10: raw loop", bench::median(times[0]), "us");
  bench::report("MLP 256-512-256-10: prepared above raw",
                bench::median(differences(times[1], times[0])), "us");
  bench::report("allocations of a raw step", static_cast<double>(allocations_of(raw)), "");
  bench::report("allocations of a prepared step", static_cast<double>(allocations_of(prepared)),
                "");
  accelerator.free_memory(model, optimizer);
}

}  // namespace

int main() {
  Accelerator accelerator({.cpu = true});
  at::set_num_threads(1);
  accelerate::set_seed(accelerator.process_index());  // data of its own for each process
  if (accelerator.use_distributed()) bench::settle();
  if (accelerator.num_processes() == 1) measure_overhead(accelerator);
  if (accelerator.use_distributed()) measure_drift_check(accelerator);
  measure_mlp(accelerator, "MLP 784-128-10", {784, 128, 10});
  measure_mlp(accelerator, "MLP 784-1024-1024-10", {784, 1024, 1024, 10});
  measure_gpt(accelerator);
}
