// What the programs in this folder learn, the same as in ../basic.cpp: which arm of a spiral is a
// point on?
#pragma once

#include <accelerate/accelerate.h>

#include <cmath>
#include <cstdint>
#include <utility>

namespace task {

/// Points on three spiral arms, [count, 2], and the arm of each.
inline std::pair<torch::Tensor, torch::Tensor> spirals(std::int64_t count) {
  const auto arms = torch::randint(3, {count});
  const auto radius = torch::rand({count}).sqrt();
  const auto angle = 5 * radius + 2 * M_PI / 3 * arms + 0.2 * torch::randn({count});
  return {torch::stack({radius * angle.cos(), radius * angle.sin()}, 1), arms};
}

inline torch::nn::Sequential make_classifier() {
  using namespace torch::nn;
  return Sequential(Linear(2, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 3));
}

/// How many percent of the points of all processes, each counted once, are put on their arm.
double accuracy(accelerate::Accelerator& accelerator, auto& model, auto& loader) {
  const torch::NoGradGuard no_grad;
  model.eval();
  std::int64_t right = 0, seen = 0;
  for (auto& [x, y] : loader) {
    const torch::Tensor hits = accelerator.gather_for_metrics(model(x).argmax(1) == y);
    right += hits.sum().item<std::int64_t>();
    seen += hits.numel();
  }
  model.train();
  return std::round(1000.0 * right / seen) / 10;
}

}  // namespace task
