// Activation checkpoints in training on two processes: the bits of the plain model.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::anew;
using test::input_of;
using test::same_everywhere;

using Kwargs = DistributedDataParallelKwargs;

/// Blocks with dropout, of which the last is left out by odd steps, and a head.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(bool checkpoint) : checkpointed(checkpoint) {
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back(torch::nn::Linear(3, 8), torch::nn::GELU(), torch::nn::Dropout(0.5),
                          torch::nn::Linear(8, 3));
      register_module("block" + std::to_string(i), blocks.back());
    }
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x, bool skips_last) {
    for (std::size_t i = 0; i < blocks.size() - (skips_last ? 1 : 0); ++i) {
      x = x + (checkpointed ? activation_checkpoint(blocks[i], x) : blocks[i]->forward(x));
    }
    return head(x);
  }
  bool checkpointed;
  std::vector<torch::nn::Sequential> blocks;
  torch::nn::Linear head{3, 2};
};
TORCH_MODULE(Stack);

struct Case {
  std::string name;
  AcceleratorOptions options = {};
  bool skips = false;
};

/// The parameters after a few steps.
std::vector<torch::Tensor> trained(const Case& one, bool checkpointed) {
  Accelerator accelerator(anew(one.options));
  set_seed(3);
  Stack net(checkpointed);
  auto [model, optimizer] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05)));
  set_seed(7, {.device_specific = true});
  for (int step = 0; step < 6; ++step) {
    const auto accumulating = accelerator.accumulate(model);
    const auto x = input_of(accelerator.process_index(), step);
    accelerator.backward(model(x, one.skips && step % 2 == 1).pow(2).mean());
    accelerator.clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_TRUE(same_everywhere(net->parameters())) << one.name;
  return net->parameters();
}

TEST(ActivationCheckpointOnProcesses, TrainsTheBitsOfThePlainModel) {
  on_processes(2, [](PartialState&) {
    const std::vector<Case> cases{
        {.name = "plain"},
        {.name = "bucket views",
         .options = {.kwargs_handlers = {Kwargs{.gradient_as_bucket_view = true}}}},
        {.name = "unused parameters",
         .options = {.kwargs_handlers = {Kwargs{.find_unused_parameters = true}}},
         .skips = true},
        {.name = "static graph", .options = {.kwargs_handlers = {Kwargs{.static_graph = true}}}},
        {.name = "accumulated", .options = {.gradient_accumulation_steps = 2}},
        {.name = "bfloat16", .options = {.mixed_precision = PrecisionType::kBf16}},
    };
    for (const auto& one : cases) {
      const auto plain = trained(one, false);
      const auto again = trained(one, true);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(torch::equal(plain[i], again[i])) << one.name << ", parameter " << i;
      }
    }
  });
}

}  // namespace
}  // namespace accelerate
