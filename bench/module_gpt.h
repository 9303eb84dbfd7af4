// bench/module_gpt.h - examples/gpt_model.h of the modules of accelerate/nn.h: sums and norms are
// one kernel, also across blocks, and forward ends with the loss.
#pragma once

#include <accelerate/nn.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "../examples/gpt_model.h"

namespace bench {

namespace nn = accelerate::nn;

struct ModuleBlockImpl : torch::nn::Module {
  explicit ModuleBlockImpl(const examples::GptConfig& config) {
    const auto width = config.width;
    ln1 = register_module("ln1", nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attend = register_module("attend", nn::CausalSelfAttention(nn::CausalSelfAttentionOptions{
                                           .embed_dim = width, .num_heads = config.heads}));
    ln2 = register_module("ln2", nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    expand = register_module("expand", nn::Linear(width, 4 * width, nn::Activation::kGeluTanh));
    expand_out = register_module("expand_out", nn::Linear(4 * width, width));
  }

  nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  nn::CausalSelfAttention attend{nullptr};
  nn::Linear expand{nullptr}, expand_out{nullptr};
};
TORCH_MODULE(ModuleBlock);

/// The head uses the weights of the token embedding.
struct ModuleGptImpl : torch::nn::Module {
  explicit ModuleGptImpl(const examples::GptConfig& config) {
    tokens = register_module("tokens", torch::nn::Embedding(config.vocab, config.width));
    positions = register_module("positions", torch::nn::Embedding(config.block, config.width));
    for (std::int64_t i = 0; i < config.layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), ModuleBlock(config)));
    }
    ln = register_module("ln", nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
  }

  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& target) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1), ids.options()));
    torch::Tensor y, change;  // what a block adds to x, by the next norm
    for (auto& block : blocks) {
      if (change.defined()) {
        std::tie(y, x) = block->ln1->forward_add(change, x);
      } else {
        y = block->ln1(x);
      }
      std::tie(y, x) = block->ln2->forward_add(block->attend(y), x);
      change = block->expand_out(block->expand(y));
    }
    y = ln->forward_add(change, x).first;
    return nn::cross_entropy(torch::linear(y, tokens->weight).flatten(0, 1), target.flatten());
  }

  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  std::vector<ModuleBlock> blocks;
  nn::LayerNorm ln{nullptr};
};
TORCH_MODULE(ModuleGpt);

}  // namespace bench
