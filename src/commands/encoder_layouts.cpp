#include "commands/layout_builder.h"

namespace accelerate::detail::commands {
namespace {

// BERT and those that share its encoder.
void bert_encoder(Builder& b, const TransformerShape& s) {
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("encoder.layer.", i);
    for (const auto* part : {"query", "key", "value"}) {
      b.linear(str(layer, ".attention.self.", part), s.hidden, s.hidden);
    }
    b.linear(layer + ".attention.output.dense", s.hidden, s.hidden);
    b.norm(layer + ".attention.output.LayerNorm", s.hidden);
    b.linear(layer + ".intermediate.dense", s.hidden, s.intermediate);
    b.linear(layer + ".output.dense", s.intermediate, s.hidden);
    b.norm(layer + ".output.LayerNorm", s.hidden);
  }
  b.shape(s);
}

void bert_embeddings(Builder& b, const Settings& c, std::int64_t vocabulary, std::int64_t size) {
  const auto positions = c.size("max_position_embeddings", 512);
  b.embedding("embeddings.word_embeddings", c.size("vocab_size", vocabulary), size);
  b.embedding("embeddings.position_embeddings", positions, size);
  b.embedding("embeddings.token_type_embeddings", c.size("type_vocab_size", 2), size);
  b.norm("embeddings.LayerNorm", size);
  b.position_ids(positions);
  b.token_type_ids(positions);
}

TransformerShape bert_shape(const Settings& c, const TransformerShape& presets) {
  return {.layers = c.count("num_hidden_layers", presets.layers),
          .hidden = c.size("hidden_size", presets.hidden),
          .heads = c.size("num_attention_heads", presets.heads),
          .intermediate = c.size("intermediate_size", presets.intermediate),
          .positions = c.size("max_position_embeddings", 512)};
}
constexpr TransformerShape kBertBase{
    .layers = 12, .hidden = 768, .heads = 12, .intermediate = 3072};

void bert_with_vocabulary(Builder& b, const Settings& c, std::int64_t vocabulary) {
  const auto shape = bert_shape(c, kBertBase);
  bert_embeddings(b, c, vocabulary, shape.hidden);
  bert_encoder(b, shape);
  b.linear("pooler.dense", shape.hidden, shape.hidden);
  b.no_split("embeddings");
  b.no_split("encoder.layer.*");
}

}  // namespace

void layout_bert(Builder& b, const Settings& c) { bert_with_vocabulary(b, c, 30522); }
void layout_roberta(Builder& b, const Settings& c) { bert_with_vocabulary(b, c, 50265); }

void layout_electra(Builder& b, const Settings& c) {
  const auto shape = bert_shape(c, {.layers = 12, .hidden = 256, .heads = 4, .intermediate = 1024});
  const auto size = c.size("embedding_size", 128);
  bert_embeddings(b, c, 30522, size);
  if (size != shape.hidden) b.linear("embeddings_project", size, shape.hidden);
  bert_encoder(b, shape);
}

void layout_albert(Builder& b, const Settings& c) {
  const auto shape =
      bert_shape(c, {.layers = 12, .hidden = 4096, .heads = 64, .intermediate = 16384});
  const auto size = c.size("embedding_size", 128);
  bert_embeddings(b, c, 30000, size);
  b.linear("encoder.embedding_hidden_mapping_in", size, shape.hidden);
  // Layers share the weights of their group.
  for (std::int64_t group = 0; group < c.count("num_hidden_groups", 1); ++group) {
    for (std::int64_t i = 0; i < c.count("inner_group_num", 1); ++i) {
      const std::string layer = str("encoder.albert_layer_groups.", group, ".albert_layers.", i);
      b.norm(layer + ".full_layer_layer_norm", shape.hidden);
      for (const auto* part : {"query", "key", "value", "dense"}) {
        b.linear(str(layer, ".attention.", part), shape.hidden, shape.hidden);
      }
      b.norm(layer + ".attention.LayerNorm", shape.hidden);
      b.linear(layer + ".ffn", shape.hidden, shape.intermediate);
      b.linear(layer + ".ffn_output", shape.intermediate, shape.hidden);
    }
  }
  b.linear("pooler", shape.hidden, shape.hidden);
  b.shape(shape);
}

void layout_distilbert(Builder& b, const Settings& c) {
  const TransformerShape s{.layers = c.count("n_layers", 6),
                           .hidden = c.size("dim", 768),
                           .heads = c.size("n_heads", 12),
                           .intermediate = c.size("hidden_dim", 3072),
                           .positions = c.size("max_position_embeddings", 512)};
  b.embedding("embeddings.word_embeddings", c.size("vocab_size", 30522), s.hidden);
  b.embedding("embeddings.position_embeddings", s.positions, s.hidden);
  b.norm("embeddings.LayerNorm", s.hidden);
  b.position_ids(s.positions);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("transformer.layer.", i);
    for (const auto* part : {"q_lin", "k_lin", "v_lin", "out_lin"}) {
      b.linear(str(layer, ".attention.", part), s.hidden, s.hidden);
    }
    b.norm(layer + ".sa_layer_norm", s.hidden);
    b.linear(layer + ".ffn.lin1", s.hidden, s.intermediate);
    b.linear(layer + ".ffn.lin2", s.intermediate, s.hidden);
    b.norm(layer + ".output_layer_norm", s.hidden);
  }
  b.shape(s);
}

void layout_vit(Builder& b, const Settings& c) {
  const auto image = c.size("image_size", 224);
  const auto patch = c.size("patch_size", 16);
  const auto patches = (image / patch) * (image / patch);
  const TransformerShape s{.layers = c.count("num_hidden_layers", 12),
                           .hidden = c.size("hidden_size", 768),
                           .heads = c.size("num_attention_heads", 12),
                           .intermediate = c.size("intermediate_size", 3072),
                           .positions = patches + 1};
  const bool bias = c.truth("qkv_bias", true);
  b.tensor("embeddings.cls_token", {s.hidden});
  b.tensor("embeddings.position_embeddings", {s.positions, s.hidden});
  b.linear("embeddings.patch_embeddings.projection", c.size("num_channels", 3) * patch * patch,
           s.hidden);
  for (std::int64_t i = 0; i < s.layers; ++i) {
    const std::string layer = str("layers.", i);
    for (const auto* part : {"q_proj", "k_proj", "v_proj"}) {
      b.linear(str(layer, ".attention.", part), s.hidden, s.hidden, bias);
    }
    b.linear(layer + ".attention.o_proj", s.hidden, s.hidden);
    b.norm(layer + ".layernorm_before", s.hidden);
    b.norm(layer + ".layernorm_after", s.hidden);
    b.linear(layer + ".mlp.fc1", s.hidden, s.intermediate);
    b.linear(layer + ".mlp.fc2", s.intermediate, s.hidden);
  }
  b.norm("layernorm", s.hidden);
  b.linear("pooler.dense", s.hidden, c.size("pooler_output_size", s.hidden));
  b.no_split("embeddings");
  b.no_split("layers.*");
  b.no_split("encoder.layer.*");  // the names of older files
  b.shape(s);
}

}  // namespace accelerate::detail::commands
