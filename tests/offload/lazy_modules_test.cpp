// Weights that come and go under every kind of module: the bits are those of the resident model.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "offload/managed_model.h"

namespace accelerate {
namespace {

namespace nn = torch::nn;

struct Case {
  std::string name;
  std::function<std::pair<std::shared_ptr<nn::Module>, std::function<torch::Tensor()>>()> make;
};

torch::Tensor images() {
  torch::manual_seed(5);
  return torch::randn({2, 8, 9, 9});
}
torch::Tensor sequence() {
  torch::manual_seed(5);
  return torch::randn({7, 3, 16});
}

template <class Make, class Run>
Case kind(std::string name, Make make, Run run) {
  return {std::move(name), [=] {
            torch::manual_seed(3);
            auto module = make();
            return std::make_pair(std::static_pointer_cast<nn::Module>(module.ptr()),
                                  std::function<torch::Tensor()>([=] { return run(module); }));
          }};
}

std::vector<Case> all_kinds() {
  const auto on_images = [](auto module) { return module->forward(images()); };
  const auto on_sequence = [](auto module) { return module->forward(sequence()); };
  const auto first_of = [](auto module) { return std::get<0>(module->forward(sequence())); };
  return {
      kind(
          "Linear", [] { return nn::Linear(16, 4); }, on_sequence),
      kind(
          "Bilinear", [] { return nn::Bilinear(16, 16, 4); },
          [](auto module) { return module->forward(sequence(), sequence()); }),
      kind(
          "Conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(8, 4, 3)); }, on_images),
      kind(
          "ConvTranspose2d",
          [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 4, 3)); }, on_images),
      kind(
          "BatchNorm2d", [] { return nn::BatchNorm2d(8); }, on_images),
      kind(
          "GroupNorm", [] { return nn::GroupNorm(nn::GroupNormOptions(4, 8)); }, on_images),
      kind(
          "InstanceNorm2d",
          [] { return nn::InstanceNorm2d(nn::InstanceNorm2dOptions(8).affine(true)); }, on_images),
      kind(
          "LayerNorm", [] { return nn::LayerNorm(nn::LayerNormOptions({16})); }, on_sequence),
      kind(
          "PReLU", [] { return nn::PReLU(nn::PReLUOptions().num_parameters(8)); }, on_images),
      kind(
          "Embedding", [] { return nn::Embedding(30, 16); },
          [](auto module) { return module->forward(torch::arange(20)); }),
      kind(
          "EmbeddingBag", [] { return nn::EmbeddingBag(30, 16); },
          [](auto module) { return module->forward(torch::arange(20).view({4, 5})); }),
      kind(
          "LSTM", [] { return nn::LSTM(nn::LSTMOptions(16, 12).num_layers(2)); }, first_of),
      kind(
          "GRU", [] { return nn::GRU(nn::GRUOptions(16, 12).bidirectional(true)); }, first_of),
      kind(
          "RNN", [] { return nn::RNN(nn::RNNOptions(16, 12)); }, first_of),
      kind(
          "LSTMCell", [] { return nn::LSTMCell(16, 12); },
          [](auto module) { return std::get<0>(module->forward(sequence()[0])); }),
      kind(
          "MultiheadAttention",
          [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(16, 4)); },
          [](auto module) {
            return std::get<0>(module->forward(sequence(), sequence(), sequence()));
          }),
      kind(
          "TransformerEncoder",
          [] {
            return nn::TransformerEncoder(nn::TransformerEncoderOptions(
                nn::TransformerEncoderLayerOptions(16, 4).dropout(0.0), 2));
          },
          on_sequence),
  };
}

TEST(LazyModules, HaveTheBitsOfTheResidentModule) {
  for (const auto& [name, make] : all_kinds()) {
    SCOPED_TRACE(name);
    const auto [resident, expected] = make();
    const auto [managed, result] = make();
    test::offload::LazyParams engine{LazyOptions{}};
    test::manage_by_module(engine, *managed, test::in_host_memory(*managed));
    for (int pass = 0; pass < 2; ++pass) {
      const auto ours = result();
      const auto theirs = expected();
      EXPECT_TRUE(ours.equal(theirs));
      engine.offload_now();
      ours.pow(2).sum().backward();
      theirs.pow(2).sum().backward();
    }
    const auto parameters = resident->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(managed->parameters()[i].grad().equal(parameters[i].grad())) << i;
    }
    EXPECT_GT(engine.stats().fills, 0);
  }
}

}  // namespace
}  // namespace accelerate
