// Context parallelism: each process holds a part of every sequence, and attention sees all of it.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/context_parallel
//
// Last line: "result: loss 5.55 -> 2.19 after 40 steps; a process holds 128 of 256 tokens"
// One process: "result: loss 5.55 -> 2.19 after 40 steps; a process holds 256 of 256 tokens"
#include <accelerate/accelerate.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "../gpt_data.h"
#include "../gpt_model.h"

namespace F = torch::nn::functional;

void run() {
  // Context parallelism comes with a sharded model: FSDP of version 2.
  const accelerate::PartialState state;
  accelerate::AcceleratorOptions options{
      .parallelism_config = accelerate::ParallelismConfig{.cp_size = state.num_processes()}};
  if (state.use_distributed()) options.fsdp_plugin = {.fsdp_version = 2};
  accelerate::Accelerator accelerator(options);
  accelerate::set_seed(42);

  constexpr std::int64_t kLength = 256;
  constexpr int kSteps = 40;
  auto data = accelerate::make_data_loader(
      examples::TextWindows(examples::make_text(/*count=*/600, /*seed=*/42), kLength),
      {.batch_size = 2});
  examples::Gpt net(examples::GptConfig{.block = kLength});
  accelerate::AdamW adamw(net->parameters(), {.lr = 5e-3});
  auto [model, optimizer, loader] = accelerator.prepare(net, std::move(adamw), std::move(data));

  double first = 0, last = 0;
  std::int64_t held = 0;
  int step = 0;
  for (auto& [x, y] : loader) {
    // In place, until the end of the step: the same batch on all processes becomes a part of it.
    // A model that knows of places in the text needs theirs.
    const auto places = torch::arange(kLength, x.options());
    const auto split = accelerator.maybe_context_parallel(
        {.buffers = {x, y, places}, .buffer_seq_dims = {1, 1, 0}});
    held = x.size(1);
    const auto loss = F::cross_entropy(model(x, places).transpose(1, 2), y);
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    last = accelerator.reduce(loss.detach(), accelerate::Reduction::kMean).item<double>();
    if (step == 0) first = last;
    if (++step == kSteps) break;
  }
  const auto rounded = [](double x) { return std::round(x * 100) / 100; };
  accelerator.print("result: loss", rounded(first), "->", rounded(last), "after", step,
                    "steps; a process holds", held, "of", kLength, "tokens");
}

int main() { return accelerate::record(run); }
