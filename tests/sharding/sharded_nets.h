// tests/sharding/sharded_nets.h - a small transformer of blocks.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <set>

namespace accelerate::test {

/// All sizes are multiples of 64 unless `width` is not.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width)
      : norm(torch::nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        up(width, 2 * width),
        down(2 * width, width) {
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(const torch::Tensor& x) {  // [batch, time, width]
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto weights = torch::softmax(parts[0].matmul(parts[1].transpose(1, 2)) / 8, -1);
    const auto mixed = x + out(weights.matmul(parts[2]));
    if (skips_mlp) return mixed;
    return mixed + down(torch::gelu(up(mixed)));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear qkv, out, up, down;
  bool skips_mlp = false;
};
TORCH_MODULE(Block);

constexpr std::int64_t kWords = 64;
constexpr int kBlocks = 3;

struct TinyGptImpl : torch::nn::Module {
  explicit TinyGptImpl(std::int64_t width = 64)
      : tokens(kWords, width),
        norm(torch::nn::LayerNormOptions({width})),
        head(torch::nn::LinearOptions(width, kWords).bias(false)) {
    register_module("tokens", tokens);
    register_module("blocks", blocks);
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block(width));
    register_module("norm", norm);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& words) {  // [batch, time]
    auto x = tokens(words);
    for (int i = 0; i < kBlocks; ++i) {
      if (at_block) watch(x, i);
      if (!skipped.contains(i)) x = blocks->ptr(i)->as<Block>()->forward(x);
    }
    return head(norm(x));
  }
  torch::nn::Embedding tokens;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
  /// Blocks that this process does not use.
  std::set<int> skipped = {};
  /// Called before a block in forward, and after it in backward.
  std::function<void(int block, bool backward)> at_block = {};

 private:
  void watch(const torch::Tensor& x, int block) const {
    at_block(block, /*backward=*/false);
    if (!x.requires_grad()) return;
    x.register_hook([f = at_block, block](const torch::Tensor&) { f(block, /*backward=*/true); });
  }
};
TORCH_MODULE(TinyGpt);

}  // namespace accelerate::test
