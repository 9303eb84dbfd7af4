// Layouts of models from their config.json. Names, sizes and defaults are those of the classes of
// Transformers.
#include "commands/model_layout.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

/// A config.json. Keys that it leaves out have the default of the model's class in Transformers.
class Settings {
 public:
  Settings(const Value::Dict& config, const std::string& source)
      : config_(config), source_(source) {}

  /// A width, or the size of a vocabulary.
  [[nodiscard]] std::int64_t size(const std::string& key, std::int64_t preset) const {
    return number(key, preset, 1, std::int64_t{1} << 24);
  }
  /// How many layers, or groups of them, there are; each becomes entries of the layout.
  [[nodiscard]] std::int64_t count(const std::string& key, std::int64_t preset) const {
    return number(key, preset, 0, 4096);
  }
  [[nodiscard]] bool truth(const std::string& key, bool preset) const {
    const Value* value = config_.get(key);
    return value != nullptr && value->is_bool() ? value->as_bool() : preset;
  }
  [[nodiscard]] std::string text(const std::string& key, const std::string& preset = "") const {
    const Value* value = config_.get(key);
    return value != nullptr && value->is_string() ? value->as_string() : preset;
  }
  /// The part of a head that is rotated: in `rope_parameters`, or under the name that older files
  /// have.
  [[nodiscard]] double rotary_factor(const std::string& old_key, double preset) const {
    const Value* value = config_.get(old_key);
    if (const Value* rope = config_.get("rope_parameters"); rope != nullptr && rope->is_dict()) {
      if (const Value* inner = rope->as_dict().get("partial_rotary_factor")) value = inner;
    }
    const bool number = value != nullptr && (value->is_double() || value->is_int());
    return number ? std::clamp(value->as_double(), 0.0, 1.0) : preset;
  }

 private:
  [[nodiscard]] std::int64_t number(const std::string& key, std::int64_t preset, std::int64_t min,
                                    std::int64_t max) const {
    const Value* value = config_.get(key);
    if (value == nullptr || value->is_none()) return preset;
    if (value->is_int() && value->as_int() >= min && value->as_int() <= max) return value->as_int();
    throw ConfigError(str(source_, ": '", key, "' is ", value->repr(), ", expected a number from ",
                          min, " to ", max, "."));
  }

  const Value::Dict& config_;
  const std::string& source_;
};

/// Collects the tensors of a model. Paths may end in a list of modules of one size, as a shell has
/// them: "attn.{q_proj,k_proj}".
class Builder {
 public:
  using Sizes = std::initializer_list<std::int64_t>;

  void tensor(const std::string& name, Sizes sizes) { add(name, sizes, 4); }
  void linear(const std::string& paths, std::int64_t in, std::int64_t out, bool bias = true) {
    for (const auto& path : expanded(paths)) {
      tensor(path + ".weight", {in, out});
      if (bias) tensor(path + ".bias", {out});
    }
  }
  void norm(const std::string& paths, std::int64_t size, bool bias = true) {
    for (const auto& path : expanded(paths)) {
      tensor(path + ".weight", {size});
      if (bias) tensor(path + ".bias", {size});
    }
  }
  void embedding(const std::string& path, std::int64_t count, std::int64_t size) {
    tensor(path + ".weight", {count, size});
  }
  void buffer(const std::string& name, Sizes sizes, std::int64_t element_bytes = 4) {
    add(name, sizes, element_bytes);
    layout_.tensors.back().trainable = false;
  }
  /// Those of a rotary embedding that turns a part of each head.
  void rotary(std::int64_t head, double factor) {
    const auto rotated = static_cast<std::int64_t>(static_cast<double>(head) * factor);
    buffer("rotary_emb.inv_freq", {rotated / 2});
    buffer("rotary_emb.original_inv_freq", {rotated / 2});
  }
  /// Calls `add_layer` with the path of each layer: "h.0." to "h.11.".
  template <class AddLayer>
  void layers(const std::string& path, std::int64_t count, const AddLayer& add_layer) {
    for (std::int64_t i = 0; i < count; ++i) add_layer(str(path, ".", i, "."));
  }

  ModelLayout take(const TransformerShape& shape, std::vector<std::string> no_split) {
    layout_.shape = shape;
    layout_.no_split = std::move(no_split);
    return std::move(layout_);
  }

 private:
  static std::vector<std::string> expanded(const std::string& paths) {
    const auto brace = paths.find('{');
    if (brace == paths.npos) return {paths};
    auto names = split(paths.substr(brace + 1, paths.size() - brace - 2), ',');
    for (auto& name : names) name.insert(0, paths, 0, brace);
    return names;
  }

  void add(const std::string& name, Sizes sizes, std::int64_t element_bytes) {
    std::int64_t elements = 1;
    bool fits = true;
    for (const auto size : sizes) fits &= !__builtin_mul_overflow(elements, size, &elements);
    std::int64_t bytes = 0;
    fits &= !__builtin_mul_overflow(elements, element_bytes, &bytes);
    if (!fits) throw ConfigError(str("The size of '", name, "' does not fit into 64 bits."));
    layout_.tensors.push_back({name, elements, bytes});
  }

  ModelLayout layout_;
};

// Where a config.json has the shape.
struct ShapeKeys {
  const char* layers = "num_hidden_layers";
  const char* hidden = "hidden_size";
  const char* heads = "num_attention_heads";
  const char* intermediate = "intermediate_size";
  const char* positions = "max_position_embeddings";
};

// An intermediate size without preset is four times the hidden one.
TransformerShape shape_of(const Settings& c, const TransformerShape& presets,
                          const ShapeKeys& keys = {}) {
  const auto hidden = c.size(keys.hidden, presets.hidden);
  const auto inner = presets.intermediate > 0 ? presets.intermediate : 4 * hidden;
  return {.layers = c.count(keys.layers, presets.layers),
          .hidden = hidden,
          .heads = c.size(keys.heads, presets.heads),
          .intermediate = c.size(keys.intermediate, inner),
          .gated = presets.gated,
          .positions = c.size(keys.positions, presets.positions)};
}

// ---- decoders -----------------------------------------------------------------------------------

constexpr ShapeKeys kGptKeys{.layers = "n_layer",
                             .hidden = "n_embd",
                             .heads = "n_head",
                             .intermediate = "n_inner",
                             .positions = "n_positions"};

ModelLayout gpt2(Builder& b, const Settings& c) {
  const auto s =
      shape_of(c, {.layers = 12, .hidden = 768, .heads = 12, .positions = 1024}, kGptKeys);
  b.embedding("wte", c.size("vocab_size", 50257), s.hidden);
  b.embedding("wpe", s.positions, s.hidden);
  b.layers("h", s.layers, [&](const std::string& layer) {
    b.norm(layer + "ln_1", s.hidden);
    b.linear(layer + "attn.c_attn", s.hidden, 3 * s.hidden);
    b.linear(layer + "attn.c_proj", s.hidden, s.hidden);
    b.norm(layer + "ln_2", s.hidden);
    b.linear(layer + "mlp.c_fc", s.hidden, s.intermediate);
    b.linear(layer + "mlp.c_proj", s.intermediate, s.hidden);
  });
  b.norm("ln_f", s.hidden);
  return b.take(s, {"h.*"});
}

ModelLayout gptj(Builder& b, const Settings& c) {
  const auto s =
      shape_of(c, {.layers = 28, .hidden = 4096, .heads = 16, .positions = 2048}, kGptKeys);
  b.embedding("wte", c.size("vocab_size", 50400), s.hidden);
  b.layers("h", s.layers, [&](const std::string& layer) {
    b.norm(layer + "ln_1", s.hidden);
    b.linear(layer + "attn.{k_proj,v_proj,q_proj,out_proj}", s.hidden, s.hidden, false);
    b.buffer(layer + "attn.embed_positions", {s.positions, c.size("rotary_dim", 64)});
    b.linear(layer + "mlp.fc_in", s.hidden, s.intermediate);
    b.linear(layer + "mlp.fc_out", s.intermediate, s.hidden);
  });
  b.norm("ln_f", s.hidden);
  return b.take(s, {"h.*"});
}

ModelLayout gpt_neox(Builder& b, const Settings& c) {
  const auto s = shape_of(
      c, {.layers = 44, .hidden = 6144, .heads = 64, .intermediate = 24576, .positions = 2048});
  const bool bias = c.truth("attention_bias", true);
  b.embedding("embed_in", c.size("vocab_size", 50432), s.hidden);
  b.layers("layers", s.layers, [&](const std::string& layer) {
    b.norm(layer + "{input_layernorm,post_attention_layernorm}", s.hidden);
    b.linear(layer + "attention.query_key_value", s.hidden, 3 * s.hidden, bias);
    b.linear(layer + "attention.dense", s.hidden, s.hidden, bias);
    b.linear(layer + "mlp.dense_h_to_4h", s.hidden, s.intermediate);
    b.linear(layer + "mlp.dense_4h_to_h", s.intermediate, s.hidden);
  });
  b.norm("final_layer_norm", s.hidden);
  b.rotary(s.hidden / s.heads, c.rotary_factor("rotary_pct", 0.25));
  return b.take(s, {"layers.*"});
}

ModelLayout bloom(Builder& b, const Settings& c) {
  const auto hidden = c.size("hidden_size", c.size("n_embed", 64));
  const TransformerShape s{.layers = c.count("n_layer", c.count("num_hidden_layers", 2)),
                           .hidden = hidden,
                           .heads = c.size("n_head", c.size("num_attention_heads", 8)),
                           .intermediate = 4 * hidden,
                           .positions = 2048};
  b.embedding("word_embeddings", c.size("vocab_size", 250880), hidden);
  b.norm("word_embeddings_layernorm", hidden);
  b.layers("h", s.layers, [&](const std::string& layer) {
    b.norm(layer + "input_layernorm", hidden);
    b.linear(layer + "self_attention.query_key_value", hidden, 3 * hidden);
    b.linear(layer + "self_attention.dense", hidden, hidden);
    b.norm(layer + "post_attention_layernorm", hidden);
    b.linear(layer + "mlp.dense_h_to_4h", hidden, s.intermediate);
    b.linear(layer + "mlp.dense_4h_to_h", s.intermediate, hidden);
  });
  b.norm("ln_f", hidden);
  return b.take(s, {"h.*"});
}

ModelLayout opt(Builder& b, const Settings& c) {
  const auto s = shape_of(
      c, {.layers = 12, .hidden = 768, .heads = 12, .intermediate = 3072, .positions = 2048},
      {.intermediate = "ffn_dim"});
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
  b.layers("decoder.layers", s.layers, [&](const std::string& layer) {
    b.linear(layer + "self_attn.{k_proj,v_proj,q_proj,out_proj}", s.hidden, s.hidden, bias);
    norm(layer + "self_attn_layer_norm");
    b.linear(layer + "fc1", s.hidden, s.intermediate, bias);
    b.linear(layer + "fc2", s.intermediate, s.hidden, bias);
    norm(layer + "final_layer_norm");
  });
  if (c.truth("do_layer_norm_before", true) && !c.truth("_remove_final_layer_norm", false)) {
    norm("decoder.final_layer_norm");
  }
  return b.take(s, {"decoder.layers.*"});
}

ModelLayout phi(Builder& b, const Settings& c) {
  const auto s = shape_of(
      c, {.layers = 24, .hidden = 2048, .heads = 32, .intermediate = 8192, .positions = 2048});
  const auto head = s.hidden / s.heads;
  const auto key_value = c.size("num_key_value_heads", s.heads) * head;
  b.embedding("embed_tokens", c.size("vocab_size", 51200), s.hidden);
  b.layers("layers", s.layers, [&](const std::string& layer) {
    b.linear(layer + "self_attn.q_proj", s.hidden, s.heads * head);
    b.linear(layer + "self_attn.{k_proj,v_proj}", s.hidden, key_value);
    b.linear(layer + "self_attn.dense", s.heads * head, s.hidden);
    if (c.truth("qk_layernorm", false)) b.norm(layer + "self_attn.{q_layernorm,k_layernorm}", head);
    b.linear(layer + "mlp.fc1", s.hidden, s.intermediate);
    b.linear(layer + "mlp.fc2", s.intermediate, s.hidden);
    b.norm(layer + "input_layernorm", s.hidden);
  });
  b.norm("final_layernorm", s.hidden);
  b.rotary(head, c.rotary_factor("partial_rotary_factor", 0.5));
  return b.take(s, {"layers.*"});
}

// What tells the models of the Llama family apart.
struct LlamaKind {
  std::int64_t vocabulary;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t key_value_heads;  // 0: as many as heads
  std::int64_t head;             // its size; 0: hidden / heads
  std::int64_t positions;
  struct Parts {
    bool query_bias = false;
    bool head_norms = false;
    bool fused = false;
    bool embed_scale = false;
    std::int64_t experts = 0;
  } has = {};
};
// clang-format off
//                         vocabulary hidden intermediate layers heads key_value_heads head positions
constexpr LlamaKind kLlama  {   32000,  4096,       11008,    32,   32,              0,   0,     2048};
constexpr LlamaKind kMistral{   32000,  4096,       14336,    32,   32,              8,   0,   131072};
constexpr LlamaKind kMixtral{   32000,  4096,       14336,    32,   32,              8,   0,   131072, {.experts = 8}};
constexpr LlamaKind kQwen2  {  151936,  4096,       22016,    32,   32,             32,   0,    32768, {.query_bias = true}};
constexpr LlamaKind kQwen3  {  151936,  4096,       22016,    32,   32,             32, 128,    32768, {.head_norms = true}};
constexpr LlamaKind kGemma  {  256000,  3072,       24576,    28,   16,             16, 256,     8192, {.embed_scale = true}};
constexpr LlamaKind kPhi3   {   32064,  3072,        8192,    32,   32,              0,   0,     4096, {.fused = true}};
// clang-format on

void llama_mlp(Builder& b, const Settings& c, const LlamaKind& kind, const TransformerShape& s,
               const std::string& mlp) {
  const bool bias = c.truth("mlp_bias", false);
  if (kind.has.experts > 0) {
    const auto experts = c.size("num_local_experts", kind.has.experts);
    b.linear(mlp + "gate", s.hidden, experts, false);
    b.tensor(mlp + "experts.gate_up_proj", {experts, 2, s.intermediate, s.hidden});
    b.tensor(mlp + "experts.down_proj", {experts, s.intermediate, s.hidden});
    return;
  }
  if (kind.has.fused) {
    b.linear(mlp + "gate_up_proj", s.hidden, 2 * s.intermediate, false);
  } else {
    b.linear(mlp + "{gate_proj,up_proj}", s.hidden, s.intermediate, bias);
  }
  b.linear(mlp + "down_proj", s.intermediate, s.hidden, bias);
}

template <const LlamaKind& kind>
ModelLayout llama(Builder& b, const Settings& c) {
  auto s = shape_of(c, {.layers = kind.layers,
                        .hidden = kind.hidden,
                        .heads = kind.heads,
                        .intermediate = kind.intermediate,
                        .gated = true,
                        .positions = kind.positions});
  const auto usual_head = std::max<std::int64_t>(1, s.hidden / s.heads);
  const auto head = c.size("head_dim", kind.head > 0 ? kind.head : usual_head);
  const auto usual_heads = kind.key_value_heads > 0 ? kind.key_value_heads : s.heads;
  const auto key_value = c.size("num_key_value_heads", usual_heads) * head;
  const auto query = s.heads * head;
  const bool bias = c.truth("attention_bias", false);
  const bool query_bias = bias || kind.has.query_bias;
  b.embedding("embed_tokens", c.size("vocab_size", kind.vocabulary), s.hidden);
  if (kind.has.embed_scale) b.buffer("embed_tokens.embed_scale", {1});
  b.layers("layers", s.layers, [&](const std::string& layer) {
    const auto attention = layer + "self_attn.";
    if (kind.has.fused) {
      b.linear(attention + "qkv_proj", s.hidden, query + 2 * key_value, false);
    } else {
      b.linear(attention + "q_proj", s.hidden, query, query_bias);
      b.linear(attention + "{k_proj,v_proj}", s.hidden, key_value, query_bias);
    }
    b.linear(attention + "o_proj", query, s.hidden, bias);
    if (kind.has.head_norms) b.norm(attention + "{q_norm,k_norm}", head, false);
    llama_mlp(b, c, kind, s, layer + "mlp.");
    b.norm(layer + "{input_layernorm,post_attention_layernorm}", s.hidden, false);
  });
  b.norm("norm", s.hidden, false);
  b.rotary(head, c.rotary_factor("partial_rotary_factor", 1.0));
  if (kind.has.experts > 0) s.intermediate *= c.size("num_experts_per_tok", 2);
  return b.take(s, {"layers.*"});
}

// ---- encoders -----------------------------------------------------------------------------------

// BERT and those that share its parts.
constexpr TransformerShape kBertBase{
    .layers = 12, .hidden = 768, .heads = 12, .intermediate = 3072, .positions = 512};

void bert_embeddings(Builder& b, const Settings& c, std::int64_t vocabulary, std::int64_t size) {
  const auto positions = c.size("max_position_embeddings", 512);
  b.embedding("embeddings.word_embeddings", c.size("vocab_size", vocabulary), size);
  b.embedding("embeddings.position_embeddings", positions, size);
  b.embedding("embeddings.token_type_embeddings", c.size("type_vocab_size", 2), size);
  b.norm("embeddings.LayerNorm", size);
  b.buffer("embeddings.position_ids", {positions}, 8);
  b.buffer("embeddings.token_type_ids", {positions}, 8);
}

void bert_encoder(Builder& b, const TransformerShape& s) {
  b.layers("encoder.layer", s.layers, [&](const std::string& layer) {
    b.linear(layer + "attention.self.{query,key,value}", s.hidden, s.hidden);
    b.linear(layer + "attention.output.dense", s.hidden, s.hidden);
    b.norm(layer + "attention.output.LayerNorm", s.hidden);
    b.linear(layer + "intermediate.dense", s.hidden, s.intermediate);
    b.linear(layer + "output.dense", s.intermediate, s.hidden);
    b.norm(layer + "output.LayerNorm", s.hidden);
  });
}

template <std::int64_t kVocabulary>
ModelLayout bert(Builder& b, const Settings& c) {
  const auto s = shape_of(c, kBertBase);
  bert_embeddings(b, c, kVocabulary, s.hidden);
  bert_encoder(b, s);
  b.linear("pooler.dense", s.hidden, s.hidden);
  return b.take(s, {"embeddings", "encoder.layer.*"});
}

ModelLayout electra(Builder& b, const Settings& c) {
  const auto s = shape_of(
      c, {.layers = 12, .hidden = 256, .heads = 4, .intermediate = 1024, .positions = 512});
  const auto size = c.size("embedding_size", 128);
  bert_embeddings(b, c, 30522, size);
  if (size != s.hidden) b.linear("embeddings_project", size, s.hidden);
  bert_encoder(b, s);
  return b.take(s, {});
}

ModelLayout albert(Builder& b, const Settings& c) {
  const auto s = shape_of(
      c, {.layers = 12, .hidden = 4096, .heads = 64, .intermediate = 16384, .positions = 512});
  const auto size = c.size("embedding_size", 128);
  bert_embeddings(b, c, 30000, size);
  b.linear("encoder.embedding_hidden_mapping_in", size, s.hidden);
  // Layers share the weights of their group.
  b.layers("encoder.albert_layer_groups", c.count("num_hidden_groups", 1), [&](const auto& group) {
    b.layers(group + "albert_layers", c.count("inner_group_num", 1), [&](const auto& layer) {
      b.norm(layer + "full_layer_layer_norm", s.hidden);
      b.linear(layer + "attention.{query,key,value,dense}", s.hidden, s.hidden);
      b.norm(layer + "attention.LayerNorm", s.hidden);
      b.linear(layer + "ffn", s.hidden, s.intermediate);
      b.linear(layer + "ffn_output", s.intermediate, s.hidden);
    });
  });
  b.linear("pooler", s.hidden, s.hidden);
  return b.take(s, {});
}

ModelLayout distilbert(Builder& b, const Settings& c) {
  const auto s = shape_of(
      c, {.layers = 6, .hidden = 768, .heads = 12, .intermediate = 3072, .positions = 512},
      {.layers = "n_layers", .hidden = "dim", .heads = "n_heads", .intermediate = "hidden_dim"});
  b.embedding("embeddings.word_embeddings", c.size("vocab_size", 30522), s.hidden);
  b.embedding("embeddings.position_embeddings", s.positions, s.hidden);
  b.norm("embeddings.LayerNorm", s.hidden);
  b.buffer("embeddings.position_ids", {s.positions}, 8);
  b.layers("transformer.layer", s.layers, [&](const std::string& layer) {
    b.linear(layer + "attention.{q_lin,k_lin,v_lin,out_lin}", s.hidden, s.hidden);
    b.norm(layer + "sa_layer_norm", s.hidden);
    b.linear(layer + "ffn.lin1", s.hidden, s.intermediate);
    b.linear(layer + "ffn.lin2", s.intermediate, s.hidden);
    b.norm(layer + "output_layer_norm", s.hidden);
  });
  return b.take(s, {});
}

ModelLayout vit(Builder& b, const Settings& c) {
  const auto image = c.size("image_size", 224);
  const auto patch = c.size("patch_size", 16);
  auto s = shape_of(c, kBertBase, {.positions = ""});
  s.positions = (image / patch) * (image / patch) + 1;
  const auto channels = c.size("num_channels", 3);
  const bool bias = c.truth("qkv_bias", true);
  b.tensor("embeddings.cls_token", {s.hidden});
  b.tensor("embeddings.position_embeddings", {s.positions, s.hidden});
  b.linear("embeddings.patch_embeddings.projection", channels * patch * patch, s.hidden);
  b.layers("layers", s.layers, [&](const std::string& layer) {
    b.linear(layer + "attention.{q_proj,k_proj,v_proj}", s.hidden, s.hidden, bias);
    b.linear(layer + "attention.o_proj", s.hidden, s.hidden);
    b.norm(layer + "{layernorm_before,layernorm_after}", s.hidden);
    b.linear(layer + "mlp.fc1", s.hidden, s.intermediate);
    b.linear(layer + "mlp.fc2", s.intermediate, s.hidden);
  });
  b.norm("layernorm", s.hidden);
  b.linear("pooler.dense", s.hidden, c.size("pooler_output_size", s.hidden));
  // The last one: the names of older files.
  return b.take(s, {"embeddings", "layers.*", "encoder.layer.*"});
}

// ---- encoder and decoder ------------------------------------------------------------------------

ModelLayout t5(Builder& b, const Settings& c) {
  const auto heads = c.size("num_heads", 8);
  const auto model = c.size("d_model", 512);
  const auto inner = c.size("d_kv", 64) * heads;
  const auto feed_forward = c.size("d_ff", 2048);
  const auto buckets = c.size("relative_attention_num_buckets", 32);
  const bool gated = c.text("feed_forward_proj", "relu").starts_with("gated-");
  const auto attention = [&](const std::string& layer, const std::string& name) {
    b.linear(str(layer, name, ".{q,k,v}"), model, inner, false);
    b.linear(str(layer, name, ".o"), inner, model, false);
    // The first layer of a stack has the bias of all.
    if (layer.ends_with(".block.0.layer.0.")) {
      b.embedding(str(layer, name, ".relative_attention_bias"), buckets, heads);
    }
    b.norm(layer + "layer_norm", model, false);
  };
  const auto stack = [&](const std::string& name, std::int64_t blocks) {
    const bool decoder = name == "decoder";
    b.layers(name + ".block", blocks, [&](const std::string& block) {
      attention(block + "layer.0.", "SelfAttention");
      if (decoder) attention(block + "layer.1.", "EncDecAttention");
      const auto last = block + (decoder ? "layer.2." : "layer.1.");
      b.linear(last + (gated ? "DenseReluDense.{wi_0,wi_1}" : "DenseReluDense.wi"), model,
               feed_forward, false);
      b.linear(last + "DenseReluDense.wo", feed_forward, model, false);
      b.norm(last + "layer_norm", model, false);
    });
    b.norm(name + ".final_layer_norm", model, false);
  };
  const auto encoder = c.count("num_layers", 6);
  const auto decoder = c.count("num_decoder_layers", encoder);
  b.embedding("shared", c.size("vocab_size", 32128), model);
  stack("encoder", encoder);
  stack("decoder", decoder);
  return b.take({.layers = encoder + decoder,
                 .hidden = model,
                 .heads = heads,
                 .intermediate = feed_forward,
                 .gated = gated,
                 .positions = c.size("n_positions", 512)},
                {"block.*"});
}

ModelLayout bart(Builder& b, const Settings& c) {
  auto s = shape_of(
      c, {.layers = 12, .hidden = 1024, .heads = 16, .intermediate = 4096, .positions = 1024},
      {.layers = "encoder_layers",
       .hidden = "d_model",
       .heads = "encoder_attention_heads",
       .intermediate = "encoder_ffn_dim"});
  const auto stack = [&](const std::string& name, std::int64_t layers, std::int64_t intermediate) {
    b.embedding(name + ".embed_positions", s.positions + 2, s.hidden);
    b.layers(name + ".layers", layers, [&](const std::string& layer) {
      for (const std::string attention : {"self_attn", "encoder_attn"}) {
        if (attention == "encoder_attn" && name == "encoder") continue;
        b.linear(layer + attention + ".{k_proj,v_proj,q_proj,out_proj}", s.hidden, s.hidden);
        b.norm(layer + attention + "_layer_norm", s.hidden);
      }
      b.linear(layer + "fc1", s.hidden, intermediate);
      b.linear(layer + "fc2", intermediate, s.hidden);
      b.norm(layer + "final_layer_norm", s.hidden);
    });
    b.norm(name + ".layernorm_embedding", s.hidden);
  };
  const auto decoder_layers = c.count("decoder_layers", 12);
  const auto decoder_intermediate = c.size("decoder_ffn_dim", 4096);
  b.embedding("shared", c.size("vocab_size", 50265), s.hidden);
  stack("encoder", s.layers, s.intermediate);
  stack("decoder", decoder_layers, decoder_intermediate);
  s.layers += decoder_layers;
  return b.take(s, {"encoder.layers.*", "decoder.layers.*"});
}

struct Architecture {
  std::string_view model_type;
  ModelLayout (*build)(Builder&, const Settings&);
};
constexpr auto kArchitectures = std::to_array<Architecture>({
    {"albert", albert},
    {"bart", bart},
    {"bert", bert<30522>},
    {"bloom", bloom},
    {"camembert", bert<30522>},
    {"distilbert", distilbert},
    {"electra", electra},
    {"gemma", llama<kGemma>},
    {"gpt2", gpt2},
    {"gpt_neox", gpt_neox},
    {"gptj", gptj},
    {"llama", llama<kLlama>},
    {"mistral", llama<kMistral>},
    {"mixtral", llama<kMixtral>},
    {"opt", opt},
    {"phi", phi},
    {"phi3", llama<kPhi3>},
    {"qwen2", llama<kQwen2>},
    {"qwen3", llama<kQwen3>},
    {"roberta", bert<50265>},
    {"t5", t5},
    {"vit", vit},
    {"xlm-roberta", bert<30522>},
});

}  // namespace

ModelLayout layout_of_config(const Value::Dict& config, const std::string& source) {
  const Settings settings(config, source);
  const auto type = settings.text("model_type");
  const auto* const found = std::ranges::find(kArchitectures, type, &Architecture::model_type);
  if (found == kArchitectures.end()) {
    std::vector<std::string_view> known;
    for (const auto& architecture : kArchitectures) known.push_back(architecture.model_type);
    throw ConfigError(str(
        source,
        type.empty() ? " has no 'model_type'" : str(": the model type '", type, "' is not known"),
        ". Pass the .safetensors file of the model, whose header tells the same; of config.json, "
        "these types are known: ",
        join(known), "."));
  }
  Builder builder;
  return found->build(builder, settings);
}

}  // namespace accelerate::detail::commands
