// tests/model_parallel/whole_attention.h - attention of one process over a whole sequence, to
// compare with.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace accelerate::test {

struct AttentionCase {
  bool causal = true;
  std::int64_t heads = 4;
  std::int64_t key_heads = 4;
  torch::Dtype dtype = torch::kDouble;
  std::int64_t value_width = 8;
  std::int64_t length = 32;
};

/// The same on all processes.
struct WholeAttention {
  explicit WholeAttention(const AttentionCase& one) : options(one) {
    torch::manual_seed(11);
    const auto made = [&](std::int64_t heads, std::int64_t width) {
      return torch::randn({2, heads, one.length, width}, torch::kDouble)
          .to(one.dtype)
          .requires_grad_();
    };
    inputs = {made(one.heads, 8), made(one.key_heads, 8), made(one.key_heads, one.value_width)};
    weights =
        torch::randn({2, one.heads, one.length, one.value_width}, torch::kDouble).to(one.dtype);
    // In float64: the reference of all types.
    std::vector<torch::Tensor> exact;
    for (const auto& input : inputs) {
      exact.push_back(input.detach().to(torch::kDouble).requires_grad_());
    }
    out = at::scaled_dot_product_attention(exact[0], exact[1], exact[2], {}, 0.0, one.causal, {},
                                           one.heads != one.key_heads);
    gradients = torch::autograd::grad({(out * weights).sum()}, exact);
  }

  AttentionCase options;
  std::vector<torch::Tensor> inputs;  // query, key, value
  torch::Tensor weights;              // of the results in the loss
  torch::Tensor out;
  std::vector<torch::Tensor> gradients;
};

using Cut = std::function<torch::Tensor(const torch::Tensor&)>;
using Attend =
    std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&, const torch::Tensor&)>;

inline double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a.detach().to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

/// The largest difference of results and gradients to those of the whole sequence.
inline double error_of(const WholeAttention& whole, const Cut& cut, const Attend& attend) {
  std::vector<torch::Tensor> parts;
  for (const auto& input : whole.inputs) {
    parts.push_back(cut(input.detach()).requires_grad_());
  }
  const auto out = attend(parts[0], parts[1], parts[2]);
  double error = largest_difference(out, cut(whole.out.detach()));
  const auto gradients = torch::autograd::grad({(out * cut(whole.weights)).sum()}, parts);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    error = std::max(error, largest_difference(gradients[i], cut(whole.gradients[i])));
  }
  return error;
}

inline std::string shown(const AttentionCase& one) {
  return std::string(one.causal ? "causal" : "all") + ", " + std::to_string(one.heads) + "/" +
         std::to_string(one.key_heads) + " heads, value width " + std::to_string(one.value_width) +
         ", " + std::string(c10::toString(one.dtype));
}

}  // namespace accelerate::test
