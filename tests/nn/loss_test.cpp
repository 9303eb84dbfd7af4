#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <vector>

#include "accelerate/nn.h"
#include "accelerate/precision/autocast.h"

namespace accelerate {
namespace {

namespace F = torch::nn::functional;
using Options = nn::CrossEntropyOptions;

std::vector<Options> all_options() {
  std::vector<Options> all;
  for (const double smoothing : {0.0, 0.1}) {
    all.push_back(Options().label_smoothing(smoothing));
    all.push_back(Options().label_smoothing(smoothing).reduction(torch::kSum).ignore_index(2));
    all.push_back(Options().label_smoothing(smoothing).reduction(torch::kNone));
    all.push_back(
        Options().label_smoothing(smoothing).weight(torch::tensor({1.0, 2.0, 0.5, 1.0, 1.0})));
  }
  return all;
}

TEST(CrossEntropy, HasTheBitsOfTheFunctionalForm) {
  torch::manual_seed(1);
  const auto target = torch::tensor({0, 4, -100, 2, 1, 2});
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    for (auto options : all_options()) {
      if (options.weight().defined()) options.weight(options.weight().to(dtype));
      const auto logits = torch::randn({6, 5}, dtype).requires_grad_();
      const auto legal = options.ignore_index() == 2 ? target.abs().remainder(5) : target;
      const auto loss = nn::cross_entropy(logits, legal, options);
      const auto expected = F::cross_entropy(logits, legal, options);
      EXPECT_TRUE(torch::equal(loss, expected));
      const auto found = torch::autograd::grad({loss.sum()}, {logits});
      const auto wanted = torch::autograd::grad({expected.sum()}, {logits});
      EXPECT_TRUE(torch::equal(found[0], wanted[0]));
    }
  }
}

TEST(CrossEntropy, TakesProbabilitiesAndMoreDimensions) {
  const auto logits = torch::randn({2, 5, 3});
  const auto target = torch::randint(5, {2, 3});
  EXPECT_TRUE(torch::equal(nn::cross_entropy(logits, target), F::cross_entropy(logits, target)));
  const auto probabilities = torch::softmax(torch::randn({2, 5, 3}), 1);
  EXPECT_TRUE(torch::equal(nn::cross_entropy(logits, probabilities),
                           F::cross_entropy(logits, probabilities)));
  EXPECT_TRUE(nn::cross_entropy(torch::randn({0, 5}), torch::empty({0}, torch::kLong))
                  .isnan()
                  .item<bool>());
}

TEST(CrossEntropy, IsFloat32UnderAutocast) {
  const auto logits = torch::randn({6, 5}).to(torch::kBFloat16).requires_grad_();
  const auto target = torch::randint(5, {6});
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  const auto loss = nn::cross_entropy(logits, target);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  loss.backward();
  EXPECT_EQ(logits.grad().scalar_type(), torch::kBFloat16);
}

TEST(CrossEntropy, IsAModuleWithTheFieldsOfTorchs) {
  const auto weight = torch::rand({5});
  const auto options = Options().weight(weight).label_smoothing(0.2);
  nn::CrossEntropyLoss ours(options);
  torch::nn::CrossEntropyLoss theirs(options);
  EXPECT_EQ(ours->named_buffers().keys(), theirs->named_buffers().keys());
  std::ostringstream our_text, their_text;
  our_text << ours;
  their_text << theirs;
  EXPECT_EQ(our_text.str(), their_text.str());
  const auto logits = torch::randn({4, 5});
  const auto target = torch::randint(5, {4});
  EXPECT_TRUE(torch::equal(ours(logits, target), theirs(logits, target)));
  const auto clone = std::dynamic_pointer_cast<nn::CrossEntropyLossImpl>(ours->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_TRUE(torch::equal(clone->forward(logits, target), theirs(logits, target)));
}

}  // namespace
}  // namespace accelerate
