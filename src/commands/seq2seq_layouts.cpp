#include "commands/layout_builder.h"

namespace accelerate::detail::commands {
namespace {

struct T5Sizes {
  std::int64_t model = 0;
  std::int64_t inner = 0;
  std::int64_t feed_forward = 0;
  std::int64_t heads = 0;
  std::int64_t buckets = 0;
  bool gated = false;
};

void t5_attention(Builder& b, const T5Sizes& z, const std::string& layer, const std::string& name,
                  bool biased) {
  const std::string attention = str(layer, ".", name);
  for (const auto* part : {"q", "k", "v"})
    b.linear(str(attention, ".", part), z.model, z.inner, false);
  b.linear(attention + ".o", z.inner, z.model, false);
  if (biased) b.embedding(attention + ".relative_attention_bias", z.buckets, z.heads);
  b.norm(layer + ".layer_norm", z.model, false);
}

void t5_stack(Builder& b, const T5Sizes& z, const std::string& stack, std::int64_t blocks) {
  const bool decoder = stack == "decoder";
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::string block = str(stack, ".block.", i, ".layer.");
    t5_attention(b, z, block + "0", "SelfAttention", i == 0);
    if (decoder) t5_attention(b, z, block + "1", "EncDecAttention", false);
    const std::string last = block + (decoder ? "2" : "1");
    const std::string dense = last + ".DenseReluDense";
    if (z.gated) {
      b.linear(dense + ".wi_0", z.model, z.feed_forward, false);
      b.linear(dense + ".wi_1", z.model, z.feed_forward, false);
    } else {
      b.linear(dense + ".wi", z.model, z.feed_forward, false);
    }
    b.linear(dense + ".wo", z.feed_forward, z.model, false);
    b.norm(last + ".layer_norm", z.model, false);
  }
  b.norm(stack + ".final_layer_norm", z.model, false);
}

}  // namespace

void layout_t5(Builder& b, const Settings& c) {
  const auto heads = c.size("num_heads", 8);
  const T5Sizes z{.model = c.size("d_model", 512),
                  .inner = c.size("d_kv", 64) * heads,
                  .feed_forward = c.size("d_ff", 2048),
                  .heads = heads,
                  .buckets = c.size("relative_attention_num_buckets", 32),
                  .gated = c.text("feed_forward_proj", "relu").starts_with("gated-")};
  const auto encoder = c.count("num_layers", 6);
  const auto decoder = c.count("num_decoder_layers", encoder);
  b.embedding("shared", c.size("vocab_size", 32128), z.model);
  t5_stack(b, z, "encoder", encoder);
  t5_stack(b, z, "decoder", decoder);
  b.no_split("block.*");
  b.shape({.layers = encoder + decoder,
           .hidden = z.model,
           .heads = heads,
           .intermediate = z.feed_forward,
           .gated = z.gated,
           .positions = c.size("n_positions", 512)});
}

namespace {

void bart_stack(Builder& b, const std::string& stack, const TransformerShape& s) {
  b.embedding(stack + ".embed_positions", s.positions + 2, s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str(stack, ".layers.", i);
    const auto attention = [&](const std::string& name) {
      for (const auto* part : {"k_proj", "v_proj", "q_proj", "out_proj"}) {
        b.linear(str(layer, ".", name, ".", part), s.hidden, s.hidden);
      }
      b.norm(str(layer, ".", name, "_layer_norm"), s.hidden);
    };
    attention("self_attn");
    if (stack == "decoder") attention("encoder_attn");
    b.linear(layer + ".fc1", s.hidden, s.intermediate);
    b.linear(layer + ".fc2", s.intermediate, s.hidden);
    b.norm(layer + ".final_layer_norm", s.hidden);
  }
  b.norm(stack + ".layernorm_embedding", s.hidden);
}

}  // namespace

void layout_bart(Builder& b, const Settings& c) {
  TransformerShape encoder{.layers = c.count("encoder_layers", 12),
                           .hidden = c.size("d_model", 1024),
                           .heads = c.size("encoder_attention_heads", 16),
                           .intermediate = c.size("encoder_ffn_dim", 4096),
                           .positions = c.size("max_position_embeddings", 1024)};
  auto decoder = encoder;
  decoder.layers = c.count("decoder_layers", 12);
  decoder.intermediate = c.size("decoder_ffn_dim", 4096);
  b.embedding("shared", c.size("vocab_size", 50265), encoder.hidden);
  bart_stack(b, "encoder", encoder);
  bart_stack(b, "decoder", decoder);
  b.no_split("encoder.layers.*");
  b.no_split("decoder.layers.*");
  encoder.layers += decoder.layers;
  b.shape(encoder);
}

}  // namespace accelerate::detail::commands
