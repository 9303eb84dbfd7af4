#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "accelerate/nn.h"
#include "accelerate/precision/autocast.h"

namespace accelerate {
namespace {

using nn::Activation;
using torch::Tensor;

const std::vector<Activation> kActivations = {Activation::kNone, Activation::kRelu,
                                              Activation::kGelu, Activation::kGeluTanh,
                                              Activation::kSilu};

Tensor plain(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return torch::relu(x);
    case Activation::kGelu:
      return torch::gelu(x);
    case Activation::kGeluTanh:
      return torch::gelu(x, "tanh");
    case Activation::kSilu:
      return torch::silu(x);
    default:
      return x;
  }
}

TEST(LinearActivation, HasTheBitsOfTheOperatorsOneByOne) {
  torch::manual_seed(1);
  for (const auto activation : kActivations) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      nn::Linear layer(6, 4, activation);
      layer->to(dtype);
      for (const auto& shape :
           std::vector<std::vector<std::int64_t>>{{6}, {5, 6}, {0, 6}, {2, 3, 6}}) {
        const auto x = torch::randn(shape, dtype).requires_grad_();
        const auto out = layer(x);
        const auto expected = plain(torch::linear(x, layer->weight, layer->bias), activation);
        EXPECT_TRUE(torch::equal(out, expected));
        const std::vector<Tensor> inputs = {x, layer->weight, layer->bias};
        const auto found = torch::autograd::grad({out.sin().sum()}, inputs);
        const auto wanted = torch::autograd::grad({expected.sin().sum()}, inputs);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          EXPECT_TRUE(torch::equal(found[i], wanted[i])) << i;
        }
      }
    }
  }
}

TEST(LinearActivation, IsPartOfClonesAndOfThePrintedText) {
  nn::Linear layer(torch::nn::LinearOptions(6, 4).bias(false), Activation::kGeluTanh);
  const auto clone = std::dynamic_pointer_cast<nn::LinearImpl>(layer->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_EQ(clone->activation(), Activation::kGeluTanh);
  const auto x = torch::randn({2, 6});
  EXPECT_TRUE(torch::equal(clone->forward(x), layer(x)));
  std::ostringstream text;
  text << layer;
  EXPECT_EQ(text.str(),
            "accelerate::nn::Linear(in_features=6, out_features=4, bias=false, "
            "activation=gelu_tanh)");
  EXPECT_EQ(nn::Linear(6, 4)->activation(), Activation::kNone);
}

TEST(LinearActivation, IsPartOfAContainer) {
  torch::nn::Sequential net(nn::Linear(6, 5, Activation::kSilu), nn::Linear(5, 2));
  const auto x = torch::randn({3, 6});
  const auto first = net->ptr<nn::LinearImpl>(0), second = net->ptr<nn::LinearImpl>(1);
  EXPECT_TRUE(torch::equal(
      net->forward(x), second->forward(torch::silu(torch::linear(x, first->weight, first->bias)))));
}

TEST(LinearActivation, StaysInTheSmallerTypeUnderAutocast) {
  nn::Linear layer(6, 4, Activation::kGelu);
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  const auto out = layer(torch::randn({2, 6}));
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  out.sum().backward();
  EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(layer->bias.grad().scalar_type(), at::kFloat);
}

TEST(SwiGLU, HasTheNamesOfLlamaAndTheBitsOfItsOperators) {
  torch::manual_seed(2);
  nn::SwiGLU mlp(6, 10);
  EXPECT_EQ(mlp->named_parameters().keys(),
            (std::vector<std::string>{"gate_proj.weight", "up_proj.weight", "down_proj.weight"}));
  const auto x = torch::randn({2, 3, 6}).requires_grad_();
  const auto product = torch::silu(torch::linear(x, mlp->gate_proj->weight)) *
                       torch::linear(x, mlp->up_proj->weight);
  const auto expected = torch::linear(product, mlp->down_proj->weight);
  const auto out = mlp(x);
  EXPECT_TRUE(torch::equal(out, expected));
  const auto inputs = mlp->parameters();
  const auto found = torch::autograd::grad({out.sin().sum()}, inputs);
  const auto wanted = torch::autograd::grad({expected.sin().sum()}, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(torch::equal(found[i], wanted[i]));
  EXPECT_EQ(nn::SwiGLU(6, 10, nn::SwiGLUOptions{.bias = true})->parameters().size(), 6U);
  const auto clone = std::dynamic_pointer_cast<nn::SwiGLUImpl>(mlp->clone());
  EXPECT_TRUE(torch::equal(clone->forward(x), out));
}

}  // namespace
}  // namespace accelerate
