// GPT-2 and Llama as models that write one token after the other. Plain torch::nn: nothing here
// knows where the weights are.
#pragma once

#include <accelerate/accelerate.h>

#include <cstddef>
#include <cstdint>
#include <numbers>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// What all of these models have. The names are those of a Llama's config.json.
struct DecoderConfig {
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  double norm_eps = 0;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
};

/// Rotary frequencies that a model was stretched with, as Llama 3.1 was.
struct RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position_embeddings = 8192;
};

/// The keys and values of the tokens that a model has seen, one entry per layer.
class KvCache {
 public:
  /// Room for `capacity` tokens.
  KvCache(std::int64_t layers, std::int64_t capacity)
      : entries_(static_cast<std::size_t>(layers)), capacity_(capacity) {}

  /// Tokens that all layers have seen: the position of the next one.
  [[nodiscard]] std::int64_t length() const { return length_; }

  /// Appends keys and values [batch, heads, time, head_dim] of a layer, on their device; returns
  /// all of them so far.
  std::pair<torch::Tensor, torch::Tensor> append(std::size_t layer, const torch::Tensor& keys,
                                                 const torch::Tensor& values) {
    auto& [all_keys, all_values] = entries_.at(layer);
    const auto time = keys.size(2);
    if (!all_keys.defined()) {
      all_keys =
          torch::empty({keys.size(0), keys.size(1), capacity_, keys.size(3)}, keys.options());
      all_values = torch::empty_like(all_keys);
    }
    all_keys.narrow(2, length_, time).copy_(keys);
    all_values.narrow(2, length_, time).copy_(values);
    return {all_keys.narrow(2, 0, length_ + time), all_values.narrow(2, 0, length_ + time)};
  }
  /// All layers have appended this many tokens.
  void advance(std::int64_t tokens) { length_ += tokens; }

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> entries_;
  std::int64_t capacity_;
  std::int64_t length_ = 0;
};

/// The cosines and sines of rotary positions, [time, head_dim] each; the sines of the first half
/// are negative.
using Rotation = std::pair<torch::Tensor, torch::Tensor>;

/// Turns the two halves of each head against each other.
inline torch::Tensor rotate(const torch::Tensor& x, const Rotation& rotation) {
  return torch::addcmul(x * rotation.first, x.roll(x.size(-1) / 2, -1), rotation.second);
}

/// Causal attention; several query heads may share a head of keys and values.
class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const DecoderConfig& config, std::size_t layer)
      : head_dim_(config.head_dim), layer_(layer) {
    const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
      return register_module(
          name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(config.attention_bias)));
    };
    const auto width = config.num_attention_heads * head_dim_;
    const auto shared_width = config.num_key_value_heads * head_dim_;
    query_ = linear("query", config.hidden_size, width);
    key_ = linear("key", config.hidden_size, shared_width);
    value_ = linear("value", config.hidden_size, shared_width);
    out_ = linear("out", width, config.hidden_size);
  }

  /// `x` is [batch, time, hidden]. `rotation`: unset for models with learned positions.
  torch::Tensor forward(const torch::Tensor& x, KvCache& cache,
                        const std::optional<Rotation>& rotation = std::nullopt) {
    const auto by_head = [&](torch::nn::Linear& part) {  // [batch, heads, time, head_dim]
      return part(x).unflatten(-1, {-1, head_dim_}).transpose(1, 2);
    };
    auto queries = by_head(query_);
    auto keys = by_head(key_);
    if (rotation) {
      queries = rotate(queries, *rotation);
      keys = rotate(keys, *rotation);
    }
    const auto [all_keys, all_values] = cache.append(layer_, keys, by_head(value_));
    // A token sees itself and those before it. One token alone sees all, and kernels know a square.
    const auto time = x.size(1);
    const bool is_square = time == all_keys.size(2);
    std::optional<torch::Tensor> mask;
    if (time > 1 && !is_square) {
      mask = torch::ones({time, all_keys.size(2)}, x.options().dtype(torch::kBool))
                 .tril(cache.length());
    }
    const auto y = at::scaled_dot_product_attention(
        queries, all_keys, all_values, mask, /*dropout_p=*/0.0, /*is_causal=*/is_square,
        /*scale=*/std::nullopt, /*enable_gqa=*/queries.size(1) != all_keys.size(1));
    return out_(y.transpose(1, 2).flatten(2));
  }

 private:
  std::int64_t head_dim_;
  std::size_t layer_;
  torch::nn::Linear query_ = nullptr, key_ = nullptr, value_ = nullptr, out_ = nullptr;
};
TORCH_MODULE(Attention);

/// A model that continues texts.
class Decoder : public torch::nn::Module {
 public:
  [[nodiscard]] const DecoderConfig& config() const { return config_; }

  /// The scores of the token that follows each of `ids`, [batch, time] to [batch, time, vocab]; of
  /// the last `logits_to_keep` alone if that is not 0. `ids` follow what is in the cache, and are
  /// in it afterwards.
  virtual torch::Tensor forward(const torch::Tensor& ids, KvCache* cache,
                                std::int64_t logits_to_keep) = 0;

 protected:
  explicit Decoder(const DecoderConfig& config) : config_(config) {
    tokens_ =
        register_module("tokens", torch::nn::Embedding(config.vocab_size, config.hidden_size));
  }
  /// After the other modules, so that planners meet it last.
  void add_head() {
    auto options = torch::nn::LinearOptions(config_.hidden_size, config_.vocab_size);
    head_ = register_module("head", torch::nn::Linear(options.bias(false)));
    if (config_.tie_word_embeddings) {
      accelerate::tie_parameters(*this, {"tokens.weight", "head.weight"});
    }
  }
  torch::Tensor scores(const torch::Tensor& x, std::int64_t logits_to_keep) {
    return head_(logits_to_keep == 0 ? x : x.slice(1, -logits_to_keep));
  }

  DecoderConfig config_;
  torch::nn::Embedding tokens_ = nullptr;
  torch::nn::Linear head_ = nullptr;
};

// ---- GPT-2 --------------------------------------------------------------------------------------

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  Gpt2BlockImpl(const DecoderConfig& config, std::size_t layer) {
    const auto norm = torch::nn::LayerNormOptions({config.hidden_size}).eps(config.norm_eps);
    norm1_ = register_module("norm1", torch::nn::LayerNorm(norm));
    attention_ = register_module("attention", Attention(config, layer));
    norm2_ = register_module("norm2", torch::nn::LayerNorm(norm));
    up_ = register_module("up", torch::nn::Linear(config.hidden_size, config.intermediate_size));
    down_ =
        register_module("down", torch::nn::Linear(config.intermediate_size, config.hidden_size));
  }

  torch::Tensor forward(torch::Tensor x, KvCache& cache) {
    x = x + attention_(norm1_(x), cache);
    return x + down_(torch::gelu(up_(norm2_(x)), "tanh"));
  }

 private:
  torch::nn::LayerNorm norm1_ = nullptr, norm2_ = nullptr;
  Attention attention_ = nullptr;
  torch::nn::Linear up_ = nullptr, down_ = nullptr;
};
TORCH_MODULE(Gpt2Block);

/// Learned positions, LayerNorm, biases everywhere.
class Gpt2 : public Decoder {
 public:
  explicit Gpt2(const DecoderConfig& config) : Decoder(config) {
    positions_ = register_module(
        "positions", torch::nn::Embedding(config.max_position_embeddings, config.hidden_size));
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
      blocks_->push_back(Gpt2Block(config, static_cast<std::size_t>(i)));
    }
    const auto norm = torch::nn::LayerNormOptions({config.hidden_size}).eps(config.norm_eps);
    norm_ = register_module("norm", torch::nn::LayerNorm(norm));
    add_head();
  }

  torch::Tensor forward(const torch::Tensor& ids, KvCache* cache,
                        std::int64_t logits_to_keep) override {
    const auto time = ids.size(1);
    auto x = tokens_(ids) +
             positions_(torch::arange(cache->length(), cache->length() + time, ids.options()));
    for (const auto& block : *blocks_) x = block->as<Gpt2Block>()->forward(x, *cache);
    cache->advance(time);
    return scores(norm_(x), logits_to_keep);
  }

 private:
  torch::nn::Embedding positions_ = nullptr;
  torch::nn::ModuleList blocks_ = nullptr;
  torch::nn::LayerNorm norm_ = nullptr;
};

// ---- Llama --------------------------------------------------------------------------------------

/// Divides by the root of the mean square, in float32.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(std::int64_t width, double eps) : eps_(eps) {
    weight_ = register_parameter("weight", torch::empty({width}));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return at::rms_norm(x, weight_.sizes(), weight_, eps_);
  }

 private:
  double eps_;
  torch::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

class LlamaBlockImpl : public torch::nn::Module {
 public:
  LlamaBlockImpl(const DecoderConfig& config, std::size_t layer) {
    const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
      return register_module(
          name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(config.mlp_bias)));
    };
    norm1_ = register_module("norm1", RmsNorm(config.hidden_size, config.norm_eps));
    attention_ = register_module("attention", Attention(config, layer));
    norm2_ = register_module("norm2", RmsNorm(config.hidden_size, config.norm_eps));
    gate_ = linear("gate", config.hidden_size, config.intermediate_size);
    up_ = linear("up", config.hidden_size, config.intermediate_size);
    down_ = linear("down", config.intermediate_size, config.hidden_size);
  }

  torch::Tensor forward(torch::Tensor x, KvCache& cache, const Rotation& rotation) {
    x = x + attention_(norm1_(x), cache, rotation);
    const auto y = norm2_(x);
    return x + down_(torch::silu(gate_(y)) * up_(y));  // SwiGLU
  }

 private:
  RmsNorm norm1_ = nullptr, norm2_ = nullptr;
  Attention attention_ = nullptr;
  torch::nn::Linear gate_ = nullptr, up_ = nullptr, down_ = nullptr;
};
TORCH_MODULE(LlamaBlock);

/// One frequency per pair of elements of a head, [head_dim / 2].
inline torch::Tensor rotary_frequencies(std::int64_t head_dim, double theta,
                                        const std::optional<RopeScaling>& scaling) {
  const auto exponents = torch::arange(0, head_dim, 2, torch::kFloat) / head_dim;
  const auto frequencies = 1.0 / torch::pow(theta, exponents);
  if (!scaling) return frequencies;
  // Long waves are stretched, short ones kept, and those between them mixed.
  const auto turns =
      scaling->original_max_position_embeddings * frequencies / (2 * std::numbers::pi);
  const auto kept =
      ((turns - scaling->low_freq_factor) / (scaling->high_freq_factor - scaling->low_freq_factor))
          .clamp(0, 1);
  return frequencies * (kept + (1 - kept) / scaling->factor);
}

/// Rotary positions, RMSNorm, grouped queries, SwiGLU.
class Llama : public Decoder {
 public:
  Llama(const DecoderConfig& config, double rope_theta,
        const std::optional<RopeScaling>& rope_scaling)
      : Decoder(config) {
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
      blocks_->push_back(LlamaBlock(config, static_cast<std::size_t>(i)));
    }
    norm_ = register_module("norm", RmsNorm(config.hidden_size, config.norm_eps));
    frequencies_ = register_buffer("frequencies",
                                   rotary_frequencies(config.head_dim, rope_theta, rope_scaling));
    accelerate::mark_non_persistent(*this, "frequencies");  // no file has it
    add_head();
  }

  torch::Tensor forward(const torch::Tensor& ids, KvCache* cache,
                        std::int64_t logits_to_keep) override {
    const auto time = ids.size(1);
    auto x = tokens_(ids);
    const auto turned = rotation(cache->length(), time, x.scalar_type());
    for (const auto& block : *blocks_) x = block->as<LlamaBlock>()->forward(x, *cache, turned);
    cache->advance(time);
    return scores(norm_(x), logits_to_keep);
  }

 private:
  Rotation rotation(std::int64_t first, std::int64_t time, torch::ScalarType dtype) {
    const auto positions =
        torch::arange(first, first + time, frequencies_.options().dtype(torch::kFloat));
    const auto angles = torch::outer(positions, frequencies_);
    const auto sines = angles.sin();
    return {angles.cos().repeat({1, 2}).to(dtype), torch::cat({-sines, sines}, -1).to(dtype)};
  }

  torch::nn::ModuleList blocks_ = nullptr;
  RmsNorm norm_ = nullptr;
  torch::Tensor frequencies_;
};

/// Each stays on one device, and comes and goes as a whole.
inline const std::vector<std::string> kDecoderBlocks{"Gpt2Block", "LlamaBlock"};

}  // namespace examples
