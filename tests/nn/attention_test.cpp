#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/accelerate.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
using torch::Tensor;

/// transformers/models/llama/modeling_llama.py: rotate_half, apply_rotary_pos_emb.
Tensor llama_rotated(const Tensor& x, const Tensor& positions, double base) {
  const auto dim = x.size(-1);
  const auto frequencies =
      1.0 / torch::pow(base, torch::arange(0, dim, 2, torch::kFloat) / static_cast<double>(dim));
  const auto angles = positions.to(torch::kFloat).unsqueeze(-1) * frequencies;
  const auto all = torch::cat({angles, angles}, -1).unsqueeze(1);
  const auto half = torch::cat({-x.slice(-1, dim / 2), x.slice(-1, 0, dim / 2)}, -1);
  return x * all.cos() + half * all.sin();
}

TEST(RotaryEmbedding, RotatesAsLlama) {
  torch::manual_seed(1);
  nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.dim = 8, .max_positions = 32});
  const auto q = torch::randn({2, 4, 5, 8}), k = torch::randn({2, 2, 5, 8});
  const auto in_order = torch::arange(5).unsqueeze(0);
  const auto [a, b] = rotary(q, k);
  EXPECT_TRUE(torch::allclose(a, llama_rotated(q, in_order, 10000)));
  EXPECT_TRUE(torch::allclose(b, llama_rotated(k, in_order, 10000)));
  const auto positions = torch::tensor({{7, 8, 9, 10, 31}, {0, 1, 2, 0, 1}});
  const auto [c, d] = rotary(q, k, positions);
  EXPECT_TRUE(torch::allclose(c, llama_rotated(q, positions, 10000), 1e-5, 1e-6));
  const auto [e, f] = rotary(q, k, positions[0]);
  EXPECT_TRUE(torch::equal(e[0], c[0]));
}

TEST(RotaryEmbedding, KeepsDtypesAndHasNoState) {
  nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.dim = 8});
  EXPECT_TRUE(rotary->parameters().empty());
  EXPECT_TRUE(rotary->buffers().empty());
  const auto q = torch::randn({1, 2, 3, 8});
  const auto rounded = q.to(torch::kBFloat16);
  const auto expected = rotary(rounded.to(torch::kFloat), q).first.to(torch::kBFloat16);
  EXPECT_TRUE(torch::equal(rotary(rounded, rounded).first, expected)) << "rounded once";
  const auto back = q.clone().requires_grad_();
  const auto [a, b] = rotary(back, back);
  a.square().sum().backward();
  EXPECT_TRUE(torch::allclose(back.grad(), 2 * q, 1e-4, 1e-6)) << "a rotation keeps lengths";
}

TEST(RotaryEmbedding, RefusesOtherShapes) {
  nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.dim = 8, .max_positions = 4});
  const auto fits = torch::randn({1, 2, 3, 8});
  const auto call = [&](const Tensor& q, const Tensor& positions = {}) {
    return message_of<ArgumentError>([&] { std::ignore = rotary(q, q, positions); });
  };
  EXPECT_NE(call(torch::randn({1, 2, 3, 6})).find("Give [batch, heads, length, 8]"),
            std::string::npos);
  EXPECT_NE(call(torch::randn({1, 2, 5, 8})).find("max_positions is 4"), std::string::npos);
  EXPECT_NE(call(fits, torch::arange(2)).find("shape [3] or [1, 3]"), std::string::npos);
  EXPECT_THROW(nn::RotaryEmbedding(nn::RotaryEmbeddingOptions{.dim = 7}), ArgumentError);
}

TEST(CausalSelfAttention, BeginsAsPyTorchsMultiheadAttention) {
  torch::manual_seed(2);
  nn::CausalSelfAttention ours(nn::CausalSelfAttentionOptions{.embed_dim = 8, .num_heads = 2});
  torch::manual_seed(2);
  torch::nn::MultiheadAttention theirs(8, 2);
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
  for (const auto& parameter : theirs->named_parameters()) {
    EXPECT_TRUE(torch::equal(ours->named_parameters()[parameter.key()], parameter.value()))
        << parameter.key();
  }
}

TEST(CausalSelfAttention, ComputesWhatMultiheadAttentionDoesUnderACausalMask) {
  torch::manual_seed(3);
  nn::CausalSelfAttention ours(nn::CausalSelfAttentionOptions{.embed_dim = 8, .num_heads = 2});
  torch::nn::MultiheadAttention theirs(8, 2);
  ours->to(torch::kDouble);
  theirs->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : theirs->named_parameters()) {
      parameter.value().normal_();
      ours->named_parameters()[parameter.key()].copy_(parameter.value());
    }
  }
  const auto x = torch::randn({3, 5, 8}, torch::kDouble);
  // LibTorch adds a mask, also one of truth values.
  const auto mask = torch::full({5, 5}, -INFINITY, torch::kDouble).triu(1);
  const auto by_length = x.transpose(0, 1);
  const auto expected =
      std::get<0>(theirs(by_length, by_length, by_length, Tensor(), false, mask)).transpose(0, 1);
  EXPECT_TRUE(torch::allclose(ours(x), expected, 1e-9, 1e-9));
}

TEST(CausalSelfAttention, SharesKeysAndValuesAndRotates) {
  torch::manual_seed(4);
  nn::CausalSelfAttention attend(nn::CausalSelfAttentionOptions{
      .embed_dim = 16, .num_heads = 4, .num_kv_heads = 2, .bias = false, .rotary_base = 500.0});
  EXPECT_EQ(attend->in_proj_weight.sizes(), (std::vector<std::int64_t>{32, 16}));
  EXPECT_EQ(attend->named_parameters().keys(),
            (std::vector<std::string>{"in_proj_weight", "out_proj.weight"}));
  const auto x = torch::randn({2, 6, 16});
  const auto parts = torch::linear(x, attend->in_proj_weight).split({16, 8, 8}, -1);
  const auto by_head = [](const Tensor& part) {
    return part.unflatten(-1, {-1, 4}).transpose(1, 2);
  };
  const auto positions = torch::arange(6).unsqueeze(0);
  const auto q = llama_rotated(by_head(parts[0]), positions, 500);
  const auto k = llama_rotated(by_head(parts[1]), positions, 500).repeat_interleave(2, 1);
  const auto v = by_head(parts[2]).repeat_interleave(2, 1);
  const auto y = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
  const auto expected = torch::linear(y.transpose(1, 2).flatten(2), attend->out_proj->weight);
  EXPECT_TRUE(torch::allclose(attend(x), expected, 1e-4, 1e-6));
  EXPECT_TRUE(torch::allclose(attend(x, torch::arange(10, 16)), expected, 1e-3, 1e-4))
      << "only distances count";
  const auto clone = std::dynamic_pointer_cast<nn::CausalSelfAttentionImpl>(attend->clone());
  EXPECT_TRUE(torch::equal(clone->forward(x), attend(x)));
}

TEST(CausalSelfAttention, DropsWeightsInTrainingOnlyAndRefusesOddOptions) {
  nn::CausalSelfAttention attend(
      nn::CausalSelfAttentionOptions{.embed_dim = 8, .num_heads = 2, .dropout = 0.5});
  const auto x = torch::randn({1, 5, 8});
  EXPECT_FALSE(torch::equal(attend(x), attend(x)));
  attend->eval();
  EXPECT_TRUE(torch::equal(attend(x), attend(x)));
  EXPECT_THROW(
      nn::CausalSelfAttention(nn::CausalSelfAttentionOptions{.embed_dim = 8, .num_heads = 3}),
      ArgumentError);
}

struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(11, 8));
    norm1 = register_module("norm1", nn::RMSNorm(8, 1e-6));
    attend = register_module("attend", nn::CausalSelfAttention(nn::CausalSelfAttentionOptions{
                                           .embed_dim = 8, .num_heads = 2, .rotary_base = 10000}));
    norm2 = register_module("norm2", nn::RMSNorm(8, 1e-6));
    mlp = register_module("mlp", nn::SwiGLU(8, 16));
    head = register_module("head", nn::Linear(8, 11));
  }
  Tensor forward(const Tensor& ids) {
    const auto x = tokens(ids);
    const auto [y, sum] = norm2->forward_add(attend(norm1(x)), x);
    const auto logits = head(sum + mlp(y));
    return nn::cross_entropy(logits.slice(1, 0, -1).flatten(0, 1), ids.slice(1, 1).flatten());
  }
  torch::nn::Embedding tokens{nullptr};
  nn::RMSNorm norm1{nullptr}, norm2{nullptr};
  nn::CausalSelfAttention attend{nullptr};
  nn::SwiGLU mlp{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Decoder);

TEST(Modules, TrainInAPreparedModelUnderAutocast) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  Accelerator accelerator({.mixed_precision = PrecisionType::kBf16, .cpu = true});
  torch::manual_seed(5);
  Decoder decoder;
  torch::optim::AdamW adamw(decoder->parameters(), 1e-2);
  auto [model, optimizer] = accelerator.prepare(decoder, std::move(adamw));
  const auto ids = torch::arange(22).remainder(11).reshape({2, 11});
  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) {
    const auto loss = model(ids);
    losses.push_back(loss.template item<double>());
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_LT(losses.back(), 0.3 * losses.front());
  const auto state = accelerator.get_state_dict(model);
  EXPECT_TRUE(state.contains("attend.in_proj_weight"));
  EXPECT_TRUE(state.contains("mlp.gate_proj.weight"));
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
}

}  // namespace
}  // namespace accelerate
