// Fully sharded training: each process keeps a part of the weights, gradients and states of the
// optimizer. The blocks of the model are whole only while they are used; the loop is that of
// ../basic.cpp.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/fsdp
//
// Last line: "result: 99.9 % of 1000 test points right, 17056 of 33731 weights on this process"
// One process: "result: 99.9 % of 1000 test points right, 33731 of 33731 weights on this process"
#include <accelerate/accelerate.h>

#include <cstddef>
#include <cstdint>
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
  ClassifierImpl() {
    for (int i = 0; i < 8; ++i) blocks->push_back(Block());
    register_module("first", first);
    register_module("blocks", blocks);
    register_module("last", last);
  }
  torch::Tensor forward(const torch::Tensor& points) {
    auto x = first(points);
    for (std::size_t i = 0; i < blocks->size(); ++i) x = blocks->ptr<BlockImpl>(i)->forward(x);
    return last(torch::relu(x));
  }
  torch::nn::Linear first{2, 32}, last{32, 3};
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Classifier);

std::int64_t elements_of(const std::vector<torch::Tensor>& tensors) {
  std::int64_t elements = 0;
  for (const auto& one : tensors) elements += one.numel();
  return elements;
}

void run() {
  // What is gathered together: each module of this class. The rest of the model is one more unit.
  accelerate::FullyShardedDataParallelPlugin plugin{
      .fsdp_version = 2,
      .auto_wrap_policy = accelerate::AutoWrapPolicy::kTransformerBasedWrap,
      .transformer_cls_names_to_wrap = std::vector<std::string>{"Block"}};
  accelerate::Accelerator accelerator({.fsdp_plugin = plugin});
  accelerate::set_seed(42);

  // Every process makes the same points; prepare deals them out.
  constexpr int kEpochs = 8;
  auto data =
      accelerate::make_data_loader(task::spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});

  Classifier net;
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

  // The whole weights, collected block by block on the first process.
  const auto state = accelerator.get_state_dict(model);
  accelerator.print("collected", state.size(), "tensors, blocks.7.down.weight among them:",
                    state.contains("blocks.7.down.weight"));
  // The optimizer steps what this process keeps.
  accelerator.print("result:", percent, "% of 1000 test points right,",
                    elements_of(optimizer.param_groups()[0].params()), "of",
                    elements_of(model.parameters()), "weights on this process");
}

int main() { return accelerate::record(run); }
