// Activation checkpointing: what the blocks of a model save for backward is not kept, but computed
// again when backward needs it. Results are the same, a step takes less memory and more time.
//
//     accelerate launch --cpu --num_processes 2
//     build/dev/examples/by_feature/activation_checkpointing
//
// Last line: "result: 99.9 % of 1000 test points right, 8 blocks computed again"
// One process: "result: 99.9 % of 1000 test points right, 8 blocks computed again"
#include <accelerate/accelerate.h>

#include <cstddef>
#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::relu(up(x))); }
  torch::nn::Linear up{32, 64}, down{64, 32};
};
TORCH_MODULE(Block);

struct ClassifierImpl : torch::nn::Module {
  explicit ClassifierImpl(int layers) {
    for (int i = 0; i < layers; ++i) blocks->push_back(Block());
    register_module("first", first);
    register_module("blocks", blocks);
    register_module("last", last);
  }
  torch::Tensor forward(const torch::Tensor& points) {
    auto x = first(points);
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      // Plainly, or again in backward if the block is marked.
      x = accelerate::maybe_activation_checkpoint(blocks->ptr<BlockImpl>(i), x);
    }
    // Always again in backward: a function keeps what it captures by value.
    return accelerate::activation_checkpoint(
        [last = last](const torch::Tensor& hidden) mutable { return last(torch::relu(hidden)); },
        x);
  }
  torch::nn::Linear first{2, 32}, last{32, 3};
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Classifier);

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);

  // Every process makes the same points; prepare deals them out.
  constexpr int kEpochs = 8;
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  Classifier net(8);
  const auto marked =
      accelerate::apply_activation_checkpointing(*net, [](const torch::nn::Module& module) {
        return accelerate::module_class_name(module) == "Block";
      });
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(3e-3));
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = kEpochs * data.size()});

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  double percent = 0;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    percent = task::accuracy(accelerator, model, test_loader);
    accelerator.print("epoch", epoch, percent, "%");
  }
  accelerator.print("result:", percent, "% of 1000 test points right,", marked.size(),
                    "blocks computed again");
}

int main() { return accelerate::record(run); }
