// Saving and loading the state of a run: a model, its AdamW and the random states, three times the
// size of the model (BENCH_STATES_MB: megabytes of the model, 300). states.py does the same with
// Python Accelerate; its stall is its whole save. Beside them the rate of the disk.
#include <accelerate/accelerate.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "disk.h"

namespace {

namespace fs = std::filesystem;
using bench::report;
using bench::seconds;
using bench::write_plain;

constexpr int kRounds = 3;

/// Median, after one call that is not counted. `before` is not timed.
double median_seconds(const std::function<void()>& f, const std::function<void()>& before = [] {}) {
  std::vector<double> times;
  for (int i = 0; i <= kRounds; ++i) {
    before();
    const double time = seconds(f);
    if (i > 0) times.push_back(time);
  }
  std::ranges::sort(times);
  return times[times.size() / 2];
}

std::int64_t megabytes() {
  const char* text = std::getenv("BENCH_STATES_MB");
  return text != nullptr ? std::atoll(text) : 300;
}

torch::nn::Sequential make_model() {
  torch::nn::Sequential net;
  const auto layers = std::max<std::int64_t>(1, megabytes() / 64);
  for (std::int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(4096, 4096).bias(false)));
  }
  return net;
}

}  // namespace

int main() {
  const auto folder = fs::temp_directory_path() / ("bench_states." + std::to_string(::getpid()));
  fs::create_directories(folder);
  accelerate::Accelerator accelerator;
  auto net = make_model();
  net->to(accelerator.device());
  accelerate::AdamW adamw(net->parameters(), {.lr = 1e-3});
  auto [model, optimizer] = accelerator.prepare(net, std::move(adamw));
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  optimizer.zero_grad();
  std::int64_t bytes = 0;
  for (const auto& parameter : net->parameters())
    bytes += 3 * static_cast<std::int64_t>(parameter.nbytes());
  const double mb = static_cast<double>(bytes) / 1e6;

  const auto state = folder / "state";
  const auto start_clean = [&] {
    fs::remove_all(state);
    fs::remove(folder / "plain");
    ::sync();
  };
  report("disk: write and fsync",
         mb / median_seconds([&] { write_plain(folder / "plain", bytes); }, start_clean), "MB/s");
  const double save = median_seconds([&] { accelerator.save_state(state); }, start_clean);
  report("save_state, with fsync", mb / save, "MB/s");
  // A second save begins when the one before is on the disk: what is measured is the copy.
  report("stall of an asynchronous save_state",
         1e3 * median_seconds([&] { accelerator.save_state(state, {.asynchronous = true}); },
                              [&] {
                                accelerator.wait_for_save_state();
                                start_clean();
                              }),
         "ms");
  accelerator.wait_for_save_state();
  report("load_state", mb / median_seconds([&] { accelerator.load_state(state); }), "MB/s");
  report("load_state, without checksums",
         mb / median_seconds([&] { accelerator.load_state(state, {.verify = false}); }), "MB/s");
  fs::remove_all(folder);
}
