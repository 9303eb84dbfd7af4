// A GPT-2 like language model: learned positions, normalisation before each part, causal attention.
#pragma once

#include <accelerate/nn.h>
#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace examples {

struct GptConfig {
  std::int64_t vocab = 256;  // bytes
  std::int64_t block = 64;   // tokens that the model sees at once
  std::int64_t layers = 2;
  std::int64_t heads = 4;
  std::int64_t width = 64;
  bool tied = false;  // the head uses the weights of the token embedding

  /// 0.14 million parameters: learns something in seconds on a CPU.
  static GptConfig tiny() { return {}; }
  /// 3.3 million parameters.
  static GptConfig small() { return {256, 128, 4, 4, 256, false}; }
  /// 124 million parameters, the smallest of GPT-2.
  static GptConfig gpt2() { return {50257, 1024, 12, 12, 768, true}; }
};

class GptBlockImpl : public torch::nn::Module {
 public:
  explicit GptBlockImpl(const GptConfig& config) : head_width_(config.width / config.heads) {
    const auto width = config.width;
    ln1_ = register_module("ln1", torch::nn::LayerNorm(norm(width)));
    attend_ = register_module("attend", accelerate::nn::Linear(width, 3 * width));
    attend_out_ = register_module("attend_out", accelerate::nn::Linear(width, width));
    ln2_ = register_module("ln2", torch::nn::LayerNorm(norm(width)));
    expand_ = register_module("expand", accelerate::nn::Linear(width, 4 * width));
    expand_out_ = register_module("expand_out", accelerate::nn::Linear(4 * width, width));
  }

  torch::Tensor forward(torch::Tensor x) {  // [batch, time, width]
    x = x + attention(ln1_(x));
    return x + expand_out_(torch::gelu(expand_(ln2_(x)), "tanh"));
  }

 private:
  static torch::nn::LayerNormOptions norm(std::int64_t width) {
    return torch::nn::LayerNormOptions({width});
  }

  torch::Tensor attention(const torch::Tensor& x) {
    const auto parts = attend_(x).chunk(3, -1);
    // As many heads as this process has, by tensor parallelism a part of them.
    const auto by_head = [&](const torch::Tensor& part) {  // [batch, heads, time, head_width]
      return part.unflatten(-1, {-1, head_width_}).transpose(1, 2);
    };
    const auto y = at::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]),
                                                    by_head(parts[2]), /*attn_mask=*/{},
                                                    /*dropout_p=*/0.0, /*is_causal=*/true);
    return attend_out_(y.transpose(1, 2).flatten(2));
  }

  std::int64_t head_width_;
  torch::nn::LayerNorm ln1_ = nullptr, ln2_ = nullptr;
  accelerate::nn::Linear attend_ = nullptr, attend_out_ = nullptr;
  accelerate::nn::Linear expand_ = nullptr, expand_out_ = nullptr;
};
TORCH_MODULE(GptBlock);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptConfig& config) : config_(config) {
    tokens_ = register_module("tokens", torch::nn::Embedding(config.vocab, config.width));
    positions_ = register_module("positions", torch::nn::Embedding(config.block, config.width));
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < config.layers; ++i) blocks_->push_back(GptBlock(config));
    ln_ = register_module("ln", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    if (!config.tied) {
      const auto options = torch::nn::LinearOptions(config.width, config.vocab).bias(false);
      head_ = register_module("head", accelerate::nn::Linear(options));
    }
    initialize();
  }

  [[nodiscard]] const GptConfig& config() const { return config_; }

  /// The scores of the token that follows each of `ids`: [batch, time] to [batch, time, vocab].
  /// `positions` are those of `ids` in their text: 0, 1, ... unless given.
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& positions = {}) {
    auto x =
        tokens_(ids) +
        positions_(positions.defined() ? positions : torch::arange(ids.size(1), ids.options()));
    for (std::size_t i = 0; i < blocks_->size(); ++i) {
      x = accelerate::maybe_activation_checkpoint(blocks_->ptr<GptBlockImpl>(i), x);
    }
    x = ln_(x);
    return config_.tied ? torch::linear(x, tokens_->weight) : head_(x);
  }

 private:
  /// As GPT-2: small weights, smaller still where a part adds to the residual stream.
  void initialize() {
    torch::NoGradGuard no_grad;
    const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(config_.layers));
    for (auto& parameter : named_parameters()) {
      const auto& name = parameter.key();
      if (name.ends_with("bias")) {
        parameter.value().zero_();
      } else if (parameter->dim() == 2) {
        parameter.value().normal_(0, name.ends_with("_out.weight") ? residual : 0.02);
      }
    }
  }

  GptConfig config_;
  torch::nn::Embedding tokens_ = nullptr, positions_ = nullptr;
  torch::nn::ModuleList blocks_ = nullptr;
  torch::nn::LayerNorm ln_ = nullptr;
  accelerate::nn::Linear head_ = nullptr;
};
TORCH_MODULE(Gpt);

}  // namespace examples
