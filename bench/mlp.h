// bench/mlp.h - the net of the benchmarks on the CPU.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bench {

inline torch::nn::Sequential make_mlp(const std::vector<std::int64_t>& widths) {
  torch::nn::Sequential net;
  for (std::size_t i = 1; i < widths.size(); ++i) {
    if (i > 1) net->push_back(torch::nn::ReLU());
    net->push_back(torch::nn::Linear(widths[i - 1], widths[i]));
  }
  return net;
}

}  // namespace bench
