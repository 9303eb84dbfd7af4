// tests/training/optimizer_tensors.h - the tensors of
// tests/reference/optimizers/write_optimizers.py.
#pragma once

#include <torch/torch.h>

#include <array>
#include <vector>

namespace accelerate::test {

using Tensors = std::vector<torch::Tensor>;

inline const std::array<std::vector<std::int64_t>, 4> kShapes{{{3, 4}, {5}, {2, 3, 2}, {}}};

inline torch::Tensor indices(const std::vector<std::int64_t>& shape) {
  std::int64_t size = 1;
  for (const auto n : shape) size *= n;
  return torch::arange(size, torch::kDouble).reshape(shape);
}

/// How the memory of parameters lies: `kGaps` is what fused kernels do not take.
enum class Layout { kDense, kGaps };

inline torch::Tensor laid_out(const torch::Tensor& values, Layout layout) {
  if (layout == Layout::kDense) return values;
  auto shape = values.sizes().vec();
  shape.push_back(2);
  const auto with_gaps = torch::zeros(shape, values.options()).select(-1, 0);
  with_gaps.copy_(values);
  return with_gaps.detach();
}

inline torch::Tensor parameter(int p, const torch::TensorOptions& options, Layout layout) {
  const auto values = torch::cos(0.7 * indices(kShapes[p]) + p) * (1 + p);
  return laid_out(values.to(options), layout).requires_grad_();
}

inline Tensors parameters(const torch::TensorOptions& options = torch::kDouble,
                          Layout layout = Layout::kDense) {
  Tensors result;
  for (int p = 0; p < 4; ++p) result.push_back(parameter(p, options, layout));
  return result;
}

inline void set_gradients(const Tensors& params, int step, double scale = 1) {
  for (int p = 0; p < 4; ++p) {
    if ((p == 1 && step % 3 == 0) || (p == 3 && step < 4)) {
      params[p].mutable_grad() = torch::Tensor();
      continue;
    }
    const auto values = torch::sin(0.3 * indices(kShapes[p]) + step + 2 * p) * (0.5 + 0.1 * p);
    params[p].mutable_grad() = values.to(params[p].options().requires_grad(false)) * scale;
  }
}

}  // namespace accelerate::test
