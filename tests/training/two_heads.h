// tests/training/two_heads.h - a small model, data by rank, and means computed by one process.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "parallel/data_parallel.h"

namespace accelerate::test {

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    register_module("body", body);
    register_module("left", left);
    register_module("right", right);
    register_buffer("count", count);
  }
  torch::Tensor forward(const torch::Tensor& x, bool both = true) {
    const auto hidden = torch::tanh(body(x));
    return both ? left(hidden) + right(hidden) : left(hidden);
  }
  torch::nn::Linear body{3, 4}, left{4, 2}, right{4, 2};
  torch::Tensor count = torch::zeros(1);
};
TORCH_MODULE(TwoHeads);

/// The data of a rank.
inline torch::Tensor input_of(int rank) {
  return torch::arange(15, torch::kFloat).view({5, 3}) / 7 + rank;
}

inline std::vector<torch::Tensor> gradients(const TwoHeads& net) {
  std::vector<torch::Tensor> result;
  for (const auto& parameter : net->parameters()) {
    result.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  }
  return result;
}

inline void forget_gradients(TwoHeads& net) {
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::Tensor();
}

/// The mean over `ranks` of what each would compute alone.
inline std::vector<torch::Tensor> expected(TwoHeads& net, int ranks, bool both = true) {
  forget_gradients(net);
  for (int rank = 0; rank < ranks; ++rank) {
    (net->forward(input_of(rank), both).pow(2).sum() / ranks).backward();
  }
  auto result = gradients(net);
  forget_gradients(net);
  return result;
}

inline void expect_close(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b,
                         double tolerance = 1e-5) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << "parameter " << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(a[i], b[i], tolerance, tolerance)) << "parameter " << i;
  }
}

inline void backward(detail::parallel::DataParallel& parallel, const torch::Tensor& loss) {
  const detail::parallel::ReachedLeaves leaves(loss);
  parallel.before_backward({loss, leaves});
  loss.backward();
  parallel.after_backward();
}

}  // namespace accelerate::test
