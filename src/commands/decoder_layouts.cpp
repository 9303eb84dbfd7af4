#include "commands/layout_builder.h"

namespace accelerate::detail::commands {
namespace {

// How much of a head is rotated.
std::int64_t rotated(std::int64_t head, double factor) {
  return static_cast<std::int64_t>(static_cast<double>(head) * factor);
}

TransformerShape gpt_shape(const Settings& c, const TransformerShape& presets) {
  const auto hidden = c.size("n_embd", presets.hidden);
  return {.layers = c.count("n_layer", presets.layers),
          .hidden = hidden,
          .heads = c.size("n_head", presets.heads),
          .intermediate = c.size("n_inner", 4 * hidden),
          .positions = c.size("n_positions", presets.positions)};
}

}  // namespace

void layout_gpt2(Builder& b, const Settings& c) {
  const auto s = gpt_shape(c, {.layers = 12, .hidden = 768, .heads = 12, .positions = 1024});
  b.embedding("wte", c.size("vocab_size", 50257), s.hidden);
  b.embedding("wpe", s.positions, s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("h.", i);
    b.norm(layer + ".ln_1", s.hidden);
    b.linear(layer + ".attn.c_attn", s.hidden, 3 * s.hidden);
    b.linear(layer + ".attn.c_proj", s.hidden, s.hidden);
    b.norm(layer + ".ln_2", s.hidden);
    b.linear(layer + ".mlp.c_fc", s.hidden, s.intermediate);
    b.linear(layer + ".mlp.c_proj", s.intermediate, s.hidden);
  }
  b.norm("ln_f", s.hidden);
  b.no_split("h.*");
  b.shape(s);
}

void layout_gptj(Builder& b, const Settings& c) {
  const auto s = gpt_shape(c, {.layers = 28, .hidden = 4096, .heads = 16, .positions = 2048});
  b.embedding("wte", c.size("vocab_size", 50400), s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("h.", i);
    b.norm(layer + ".ln_1", s.hidden);
    for (const auto* part : {"k_proj", "v_proj", "q_proj", "out_proj"}) {
      b.linear(str(layer, ".attn.", part), s.hidden, s.hidden, false);
    }
    b.buffer(layer + ".attn.embed_positions", {s.positions, c.size("rotary_dim", 64)});
    b.linear(layer + ".mlp.fc_in", s.hidden, s.intermediate);
    b.linear(layer + ".mlp.fc_out", s.intermediate, s.hidden);
  }
  b.norm("ln_f", s.hidden);
  b.no_split("h.*");
  b.shape(s);
}

void layout_gpt_neox(Builder& b, const Settings& c) {
  const TransformerShape s{.layers = c.count("num_hidden_layers", 44),
                           .hidden = c.size("hidden_size", 6144),
                           .heads = c.size("num_attention_heads", 64),
                           .intermediate = c.size("intermediate_size", 24576),
                           .positions = c.size("max_position_embeddings", 2048)};
  const bool bias = c.truth("attention_bias", true);
  b.embedding("embed_in", c.size("vocab_size", 50432), s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("layers.", i);
    b.norm(layer + ".input_layernorm", s.hidden);
    b.norm(layer + ".post_attention_layernorm", s.hidden);
    b.linear(layer + ".attention.query_key_value", s.hidden, 3 * s.hidden, bias);
    b.linear(layer + ".attention.dense", s.hidden, s.hidden, bias);
    b.linear(layer + ".mlp.dense_h_to_4h", s.hidden, s.intermediate);
    b.linear(layer + ".mlp.dense_4h_to_h", s.intermediate, s.hidden);
  }
  b.norm("final_layer_norm", s.hidden);
  b.rotary(rotated(s.hidden / s.heads, c.rotary_factor("rotary_pct", 0.25)));
  b.no_split("layers.*");
  b.shape(s);
}

void layout_bloom(Builder& b, const Settings& c) {
  const auto hidden = c.size("hidden_size", c.size("n_embed", 64));
  const TransformerShape s{.layers = c.count("n_layer", c.count("num_hidden_layers", 2)),
                           .hidden = hidden,
                           .heads = c.size("n_head", c.size("num_attention_heads", 8)),
                           .intermediate = 4 * hidden,
                           .positions = 2048};
  b.embedding("word_embeddings", c.size("vocab_size", 250880), s.hidden);
  b.norm("word_embeddings_layernorm", s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("h.", i);
    b.norm(layer + ".input_layernorm", s.hidden);
    b.linear(layer + ".self_attention.query_key_value", s.hidden, 3 * s.hidden);
    b.linear(layer + ".self_attention.dense", s.hidden, s.hidden);
    b.norm(layer + ".post_attention_layernorm", s.hidden);
    b.linear(layer + ".mlp.dense_h_to_4h", s.hidden, s.intermediate);
    b.linear(layer + ".mlp.dense_4h_to_h", s.intermediate, s.hidden);
  }
  b.norm("ln_f", s.hidden);
  b.no_split("h.*");
  b.shape(s);
}

void layout_opt(Builder& b, const Settings& c) {
  const TransformerShape s{.layers = c.count("num_hidden_layers", 12),
                           .hidden = c.size("hidden_size", 768),
                           .heads = c.size("num_attention_heads", 12),
                           .intermediate = c.size("ffn_dim", 3072),
                           .positions = c.size("max_position_embeddings", 2048)};
  const bool bias = c.truth("enable_bias", true);
  const bool affine = c.truth("layer_norm_elementwise_affine", true);
  const auto size = c.size("word_embed_proj_dim", s.hidden);
  const auto norm = [&](const std::string& path) {
    if (affine) b.norm(path, s.hidden);
  };
  b.embedding("decoder.embed_tokens", c.size("vocab_size", 50272), size);
  b.embedding("decoder.embed_positions", s.positions + 2, s.hidden);
  if (size != s.hidden) {
    b.linear("decoder.project_out", s.hidden, size, false);
    b.linear("decoder.project_in", size, s.hidden, false);
  }
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("decoder.layers.", i);
    for (const auto* part : {"k_proj", "v_proj", "q_proj", "out_proj"}) {
      b.linear(str(layer, ".self_attn.", part), s.hidden, s.hidden, bias);
    }
    norm(layer + ".self_attn_layer_norm");
    b.linear(layer + ".fc1", s.hidden, s.intermediate, bias);
    b.linear(layer + ".fc2", s.intermediate, s.hidden, bias);
    norm(layer + ".final_layer_norm");
  }
  if (c.truth("do_layer_norm_before", true) && !c.truth("_remove_final_layer_norm", false)) {
    norm("decoder.final_layer_norm");
  }
  b.no_split("decoder.layers.*");
  b.shape(s);
}

namespace {

// What tells the models of the Llama family apart.
struct LlamaKind {
  std::int64_t vocabulary = 32000;
  std::int64_t hidden = 4096;
  std::int64_t intermediate = 11008;
  std::int64_t layers = 32;
  std::int64_t heads = 32;
  std::int64_t key_value_heads = 0;  // 0: as many as heads
  std::int64_t positions = 2048;
  std::int64_t head = 0;  // 0: hidden / heads
  bool query_bias = false;
  bool head_norms = false;
  bool fused = false;
  bool embed_scale = false;
  std::int64_t experts = 0;
};

struct LlamaSizes {
  TransformerShape s;
  std::int64_t query = 0;
  std::int64_t key_value = 0;
  std::int64_t head = 0;
  std::int64_t experts = 0;
};

LlamaSizes llama_sizes(const Settings& c, const LlamaKind& kind) {
  LlamaSizes sizes;
  sizes.s = {.layers = c.count("num_hidden_layers", kind.layers),
             .hidden = c.size("hidden_size", kind.hidden),
             .heads = c.size("num_attention_heads", kind.heads),
             .intermediate = c.size("intermediate_size", kind.intermediate),
             .gated = true,
             .positions = c.size("max_position_embeddings", kind.positions)};
  const auto usual_head = std::max<std::int64_t>(1, sizes.s.hidden / sizes.s.heads);
  sizes.head = c.size("head_dim", kind.head > 0 ? kind.head : usual_head);
  const auto key_value_heads = c.size(
      "num_key_value_heads", kind.key_value_heads > 0 ? kind.key_value_heads : sizes.s.heads);
  sizes.query = sizes.s.heads * sizes.head;
  sizes.key_value = key_value_heads * sizes.head;
  if (kind.experts > 0) sizes.experts = c.size("num_local_experts", kind.experts);
  return sizes;
}

void llama_attention(Builder& b, const Settings& c, const LlamaKind& kind, const LlamaSizes& z,
                     const std::string& attention) {
  const bool bias = c.truth("attention_bias", false);
  const auto hidden = z.s.hidden;
  if (kind.fused) {
    b.linear(attention + ".qkv_proj", hidden, z.query + 2 * z.key_value, false);
  } else {
    b.linear(attention + ".q_proj", hidden, z.query, bias || kind.query_bias);
    b.linear(attention + ".k_proj", hidden, z.key_value, bias || kind.query_bias);
    b.linear(attention + ".v_proj", hidden, z.key_value, bias || kind.query_bias);
  }
  b.linear(attention + ".o_proj", z.query, hidden, bias);
  if (!kind.head_norms) return;
  b.norm(attention + ".q_norm", z.head, false);
  b.norm(attention + ".k_norm", z.head, false);
}

void llama_mlp(Builder& b, const Settings& c, const LlamaKind& kind, const LlamaSizes& z,
               const std::string& mlp) {
  const bool bias = c.truth("mlp_bias", false);
  if (z.experts > 0) {
    b.linear(mlp + ".gate", z.s.hidden, z.experts, false);
    b.tensor(mlp + ".experts.gate_up_proj", {z.experts, 2, z.s.intermediate, z.s.hidden});
    b.tensor(mlp + ".experts.down_proj", {z.experts, z.s.intermediate, z.s.hidden});
    return;
  }
  if (kind.fused) {
    b.linear(mlp + ".gate_up_proj", z.s.hidden, 2 * z.s.intermediate, false);
  } else {
    b.linear(mlp + ".gate_proj", z.s.hidden, z.s.intermediate, bias);
    b.linear(mlp + ".up_proj", z.s.hidden, z.s.intermediate, bias);
  }
  b.linear(mlp + ".down_proj", z.s.intermediate, z.s.hidden, bias);
}

void llama_like(Builder& b, const Settings& c, const LlamaKind& kind) {
  const LlamaSizes z = llama_sizes(c, kind);
  b.embedding("embed_tokens", c.size("vocab_size", kind.vocabulary), z.s.hidden);
  if (kind.embed_scale) b.buffer("embed_tokens.embed_scale", {1});
  for (std::int64_t i = 0; i < z.s.layers; ++i) {
    const std::string layer = str("layers.", i);
    llama_attention(b, c, kind, z, layer + ".self_attn");
    llama_mlp(b, c, kind, z, layer + ".mlp");
    b.norm(layer + ".input_layernorm", z.s.hidden, false);
    b.norm(layer + ".post_attention_layernorm", z.s.hidden, false);
  }
  b.norm("norm", z.s.hidden, false);
  const double factor = c.rotary_factor("partial_rotary_factor", 1.0);
  b.rotary(rotated(z.head, factor));
  b.no_split("layers.*");
  auto shape = z.s;
  if (z.experts > 0) shape.intermediate *= c.size("num_experts_per_tok", 2);
  b.shape(shape);
}

}  // namespace

void layout_llama(Builder& b, const Settings& c) { llama_like(b, c, {}); }
void layout_mistral(Builder& b, const Settings& c) {
  llama_like(b, c, {.intermediate = 14336, .key_value_heads = 8, .positions = 131072});
}
void layout_mixtral(Builder& b, const Settings& c) {
  llama_like(b, c,
             {.intermediate = 14336, .key_value_heads = 8, .positions = 131072, .experts = 8});
}
void layout_qwen2(Builder& b, const Settings& c) {
  llama_like(b, c,
             {.vocabulary = 151936,
              .intermediate = 22016,
              .key_value_heads = 32,
              .positions = 32768,
              .query_bias = true});
}
void layout_qwen3(Builder& b, const Settings& c) {
  llama_like(b, c,
             {.vocabulary = 151936,
              .intermediate = 22016,
              .key_value_heads = 32,
              .positions = 32768,
              .head = 128,
              .head_norms = true});
}
void layout_gemma(Builder& b, const Settings& c) {
  llama_like(b, c,
             {.vocabulary = 256000,
              .hidden = 3072,
              .intermediate = 24576,
              .layers = 28,
              .heads = 16,
              .key_value_heads = 16,
              .positions = 8192,
              .head = 256,
              .embed_scale = true});
}
void layout_phi3(Builder& b, const Settings& c) {
  llama_like(b, c,
             {.vocabulary = 32064,
              .hidden = 3072,
              .intermediate = 8192,
              .positions = 4096,
              .fused = true});
}

void layout_phi(Builder& b, const Settings& c) {
  const TransformerShape s{.layers = c.count("num_hidden_layers", 24),
                           .hidden = c.size("hidden_size", 2048),
                           .heads = c.size("num_attention_heads", 32),
                           .intermediate = c.size("intermediate_size", 8192),
                           .positions = c.size("max_position_embeddings", 2048)};
  const auto head = s.hidden / s.heads;
  const auto key_value = c.size("num_key_value_heads", s.heads) * head;
  b.embedding("embed_tokens", c.size("vocab_size", 51200), s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("layers.", i);
    b.linear(layer + ".self_attn.q_proj", s.hidden, s.heads * head);
    b.linear(layer + ".self_attn.k_proj", s.hidden, key_value);
    b.linear(layer + ".self_attn.v_proj", s.hidden, key_value);
    b.linear(layer + ".self_attn.dense", s.heads * head, s.hidden);
    if (c.truth("qk_layernorm", false)) {
      b.norm(layer + ".self_attn.q_layernorm", head);
      b.norm(layer + ".self_attn.k_layernorm", head);
    }
    b.linear(layer + ".mlp.fc1", s.hidden, s.intermediate);
    b.linear(layer + ".mlp.fc2", s.intermediate, s.hidden);
    b.norm(layer + ".input_layernorm", s.hidden);
  }
  b.norm("final_layernorm", s.hidden);
  const double factor = c.rotary_factor("partial_rotary_factor", 0.5);
  b.rotary(rotated(head, factor));
  b.no_split("layers.*");
  b.shape(s);
}

}  // namespace accelerate::detail::commands
