#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/nn.h"
#include "accelerate/precision/autocast.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
using torch::Tensor;

template <class A, class B>
void expect_same_text(const A& ours, const B& theirs) {
  std::ostringstream our_text, their_text;
  our_text << ours;
  their_text << theirs;
  EXPECT_EQ(our_text.str(), their_text.str());
}

void expect_same_gradients(const Tensor& found, const Tensor& expected,
                           const std::vector<Tensor>& inputs) {
  EXPECT_TRUE(torch::equal(found, expected));
  const auto ours = torch::autograd::grad({found.sin().sum()}, inputs);
  const auto theirs = torch::autograd::grad({expected.sin().sum()}, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(torch::equal(ours[i], theirs[i])) << "gradient " << i;
  }
}

TEST(LayerNorm, HasFieldsNamesFilesAndTextOfTorchs) {
  const auto options = torch::nn::LayerNormOptions({3, 4}).eps(1e-3);
  nn::LayerNorm ours(options);
  torch::nn::LayerNorm theirs(options);
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
  EXPECT_TRUE(torch::equal(ours->weight, theirs->weight));
  EXPECT_TRUE(torch::equal(ours->bias, theirs->bias));
  expect_same_text(ours, theirs);
  torch::nn::init::normal_(theirs->weight);
  std::stringstream file;
  torch::save(theirs, file);
  torch::load(ours, file);
  EXPECT_TRUE(torch::equal(ours->weight, theirs->weight));
  const auto clone = std::dynamic_pointer_cast<nn::LayerNormImpl>(ours->clone());
  ASSERT_NE(clone, nullptr);
  const auto x = torch::randn({2, 3, 4});
  EXPECT_TRUE(torch::equal(clone->forward(x), theirs(x)));
  EXPECT_FALSE(clone->weight.is_same(ours->weight));
}

TEST(LayerNorm, HasTheBitsOfTheOperators) {
  torch::manual_seed(1);
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    nn::LayerNorm norm(torch::nn::LayerNormOptions({5}));
    norm->to(dtype);
    for (const auto& x : {torch::randn({2, 3, 5}, dtype), torch::randn({0, 5}, dtype),
                          torch::randn({5, 4}, dtype).t()}) {
      const auto input = x.detach().requires_grad_();
      expect_same_gradients(norm(input),
                            torch::layer_norm(input, {5}, norm->weight, norm->bias, 1e-5),
                            {input, norm->weight, norm->bias});
    }
  }
}

TEST(LayerNorm, AddsAResidual) {
  torch::manual_seed(2);
  nn::LayerNorm norm(torch::nn::LayerNormOptions({5}));
  const auto x = torch::randn({2, 5}).requires_grad_();
  const auto residual = torch::randn({2, 5}).requires_grad_();
  const auto [y, sum] = norm->forward_add(x, residual);
  EXPECT_TRUE(torch::equal(sum, x + residual));
  const auto expected = torch::layer_norm(x + residual, {5}, norm->weight, norm->bias, 1e-5);
  expect_same_gradients(y * sum, expected * (x + residual),
                        {x, residual, norm->weight, norm->bias});
  const auto message =
      message_of<ArgumentError>([&] { std::ignore = norm->forward_add(x, torch::randn({1, 5})); });
  EXPECT_NE(message.find("x of shape [2, 5] and a residual of shape [1, 5]"), std::string::npos)
      << message;
}

TEST(LayerNorm, IsPartOfAContainerAlsoWithoutParameters) {
  const auto options = torch::nn::LayerNormOptions({6}).elementwise_affine(false);
  torch::nn::Sequential net(nn::Linear(6, 6), nn::LayerNorm(options), nn::RMSNorm(6, 1e-6));
  const auto x = torch::randn({3, 6});
  const auto layer = net->ptr<nn::LinearImpl>(0);
  EXPECT_TRUE(torch::allclose(
      net->forward(x),
      torch::rms_norm(torch::layer_norm(layer->forward(x), {6}), {6}, /*weight=*/{}, 1e-6)));
}

TEST(Norms, GiveTheSmallerTypeUnderAutocastRoundedOnce) {
  torch::manual_seed(3);
  nn::LayerNorm layer(torch::nn::LayerNormOptions({16}));
  nn::RMSNorm rms(16, 1e-6);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto x = torch::randn({4, 16}).to(dtype).requires_grad_();
    const auto expected = torch::layer_norm(x.to(at::kFloat), {16}, layer->weight, layer->bias);
    const auto expected_rms = torch::rms_norm(x.to(at::kFloat), {16}, rms->weight, 1e-6);
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    const auto [y, sum] = layer->forward_add(x, torch::zeros_like(x));
    EXPECT_EQ(sum.scalar_type(), dtype) << "the sum keeps its type";
    EXPECT_TRUE(torch::equal(y, expected.to(at::kBFloat16)));
    EXPECT_TRUE(torch::equal(layer(x), expected.to(at::kBFloat16)));
    EXPECT_TRUE(torch::equal(rms(x), expected_rms.to(at::kBFloat16)));
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), dtype);
    EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  }
  layer->to(at::kDouble);
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  EXPECT_EQ(layer(torch::randn({4, 16}, at::kDouble)).scalar_type(), at::kDouble);
}

TEST(RMSNorm, HasNamesAndTextAsPyTorchsAndTheBitsOfTheOperator) {
  torch::manual_seed(4);
  nn::RMSNorm norm(nn::RMSNormOptions{.normalized_shape = {5}});
  EXPECT_EQ(norm->named_parameters().keys(), std::vector<std::string>{"weight"});
  EXPECT_TRUE(torch::equal(norm->weight, torch::ones({5})));
  std::ostringstream text;
  text << norm;
  EXPECT_EQ(text.str(), "accelerate::nn::RMSNorm([5], eps=None, elementwise_affine=true)");
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    norm->to(dtype);
    const auto x = torch::randn({2, 3, 5}, dtype).requires_grad_();
    expect_same_gradients(norm(x), torch::rms_norm(x, {5}, norm->weight), {x, norm->weight});
    const auto [y, sum] = norm->forward_add(x, x);
    EXPECT_TRUE(torch::equal(y, torch::rms_norm(x + x, {5}, norm->weight)));
  }
  const auto clone = std::dynamic_pointer_cast<nn::RMSNormImpl>(norm->clone());
  EXPECT_FALSE(clone->weight.is_same(norm->weight));
  EXPECT_THROW(nn::RMSNorm(nn::RMSNormOptions{}), ArgumentError);
  EXPECT_TRUE(nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {5}, .elementwise_affine = false})
                  ->parameters()
                  .empty());
}

TEST(RMSNorm, HasTheEpsOfTheDtype) {
  nn::RMSNorm norm(nn::RMSNormOptions{.normalized_shape = {4}, .elementwise_affine = false});
  const auto x = torch::full({1, 4}, 1e-4F);
  const double eps = std::numeric_limits<float>::epsilon();
  EXPECT_NEAR(norm(x)[0][0].item<double>(), 1e-4 / std::sqrt(1e-8 + eps), 1e-6);
  EXPECT_TRUE(torch::equal(norm(x), torch::rms_norm(x, {4})));
}

}  // namespace
}  // namespace accelerate
