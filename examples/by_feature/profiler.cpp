// The profiler: which operators take the time of a step, as a table and as a trace for
// https://ui.perfetto.dev.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/profiler
//
// Last line: "result: 6 steps recorded, aten::addmm called 18 times"
// One process: "result: 6 steps recorded, aten::addmm called 18 times"
#include <accelerate/accelerate.h>

#include <filesystem>
#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);

  auto data = accelerate::make_data_loader(task::spirals(512), {.batch_size = 16, .shuffle = true});
  auto net = task::make_classifier();
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-2));
  auto [model, optimizer, loader] = accelerator.prepare(net, std::move(adamw), std::move(data));

  // Of each six steps two pass, one warms the profiler up, and three are recorded; twice.
  std::int64_t steps = 0, products = 0;
  const accelerate::ProfileKwargs options{
      .schedule_option =
          accelerate::ProfileSchedule{.wait = 2, .warmup = 1, .active = 3, .repeat = 2},
      .on_trace_ready =
          [&](accelerate::Profiler& profiler) {
            const auto averages = profiler.key_averages();
            steps += averages.find("ProfilerStep*")->count;
            products += averages.find("aten::addmm")->count;
            accelerator.print(averages.table({.sort_by = "self_cpu_time_total", .row_limit = 8}));
          },
      .record_shapes = true,
      .output_trace_dir = std::filesystem::temp_directory_path() / "accelerate_profiler_example"};

  accelerator.profile(options, [&](accelerate::Profiler& profiler) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
      profiler.step();
    }
  });
  accelerator.print("result:", steps, "steps recorded, aten::addmm called", products, "times");
}

int main() { return accelerate::record(run); }
