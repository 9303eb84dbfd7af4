// tests/accelerator/nets.h - accelerators one after another, small nets, and how they are compared.
#pragma once

#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::test {

/// For an accelerator of its own settings, though the process had another one before.
inline AcceleratorOptions anew(AcceleratorOptions options = {}) {
  AcceleratorState::_reset_state();
  GradientState::_reset_state();
  options.cpu = true;
  return options;
}

inline AcceleratorOptions averaging(const DistributedDataParallelKwargs& ddp) {
  return anew(AcceleratorOptions{.kwargs_handlers = {ddp}});
}

/// Two layers.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t in = 3, std::int64_t out = 2) : first(in, 4), second(4, out) {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Mlp);

/// Two heads on one body, with a loss each.
struct ForkImpl : torch::nn::Module {
  ForkImpl() {
    register_module("body", body);
    register_module("left", left);
    register_module("right", right);
  }
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    const auto hidden = torch::tanh(body(x));
    return {left(hidden).pow(2).mean(), right(hidden).pow(2).mean()};
  }
  torch::nn::Linear body{3, 4}, left{4, 2}, right{4, 2};
};
TORCH_MODULE(Fork);

/// A net of the same values, for the one process that computes what all should come to.
template <class Holder>
void copy_parameters(Holder& to, const Holder& from) {
  const torch::NoGradGuard no_grad;
  auto targets = to->parameters();
  const auto sources = from->parameters();
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i]);
}

inline double distance(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max().template item<double>();
}

/// The largest difference of two nets; a NaN counts as a difference.
template <class Holder>
double distance(const Holder& a, const Holder& b) {
  const auto left = a->parameters();
  const auto right = b->parameters();
  double largest = left.size() == right.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    const double one = distance(left[i].detach(), right[i].detach());
    if (!(one <= largest)) largest = one;
  }
  return largest;
}

inline std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> result;
  for (const auto& parameter : parameters) {
    result.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  }
  return result;
}

inline void forget_gradients(const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) parameter.mutable_grad() = torch::Tensor();
}

/// The gradients of a loss that one process computes from the data of all.
template <class Loss>
std::vector<torch::Tensor> means_of(const std::vector<torch::Tensor>& parameters, int ranks,
                                    const Loss& loss_of) {
  const auto before = gradients_of(parameters);
  forget_gradients(parameters);
  for (int rank = 0; rank < ranks; ++rank) (loss_of(rank) / ranks).backward();
  auto result = gradients_of(parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = before[i];
  return result;
}

inline void expect_gradients(const std::vector<torch::Tensor>& parameters,
                             const std::vector<torch::Tensor>& wanted, const std::string& what = "",
                             double tolerance = 1e-5) {
  ASSERT_EQ(parameters.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    ASSERT_EQ(gradient.defined(), wanted[i].defined()) << what << ", parameter " << i;
    if (!gradient.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient, wanted[i], tolerance, tolerance))
        << what << ", parameter " << i << ": " << gradient << "\n"
        << wanted[i];
  }
}

/// Collective. Whether all processes hold the same values.
inline bool same_everywhere(const torch::Tensor& tensor) {
  const auto all = gather(tensor.detach().clone().unsqueeze(0));
  return all.eq(all[0]).all().item<bool>();
}

inline bool same_everywhere(const std::vector<torch::Tensor>& tensors) {
  bool same = true;
  for (const auto& tensor : tensors) same &= same_everywhere(tensor);
  return same;
}

inline bool gradients_same_everywhere(const std::vector<torch::Tensor>& parameters) {
  return same_everywhere(gradients_of(parameters));
}

/// What a rank feeds its net with.
inline torch::Tensor input_of(int rank, int step = 0) {
  return torch::arange(15, torch::kFloat).view({5, 3}) / 7 + rank - 0.3 * step;
}

/// Each test begins without a state.
class Stateless : public testing::Test {
 protected:
  void SetUp() override { forget(); }
  void TearDown() override { forget(); }
  static void forget() {
    AcceleratorState::_reset_state(/*reset_partial_state=*/true);
    GradientState::_reset_state();
  }
};

struct LineImpl : torch::nn::Module {
  LineImpl() { weight = register_parameter("weight", torch::zeros({1})); }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
  torch::Tensor weight;
};
TORCH_MODULE(Line);

}  // namespace accelerate::test
