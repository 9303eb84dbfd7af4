// tests/checkpoint/offloaded.h - the tensors of tests/reference/offload.
#pragma once

#include <torch/torch.h>

#include <string>

#include "accelerate/state_dict.h"

namespace accelerate::test {

inline StateDict offloaded_tensors() {
  const auto numbers = torch::arange(6);
  StateDict state("Tensor");
  state.insert("linear.weight", numbers.reshape({2, 3}).to(torch::kFloat) / 4);
  state.insert("linear.bias", numbers.to(torch::kBFloat16) / 3);
  state.insert("turned", numbers.reshape({2, 3}).t().to(torch::kDouble));
  state.insert("half", numbers.to(torch::kHalf) - 2);
  state.insert("flags", numbers % 2 == 0);
  state.insert("step", torch::tensor(19));
  state.insert("scale", torch::tensor(1.5, torch::kBFloat16));
  state.insert("phase", torch::complex(numbers.to(torch::kFloat), -numbers.to(torch::kFloat)));
  state.insert("small", (numbers - 3).to(torch::kChar));
  state.insert("byte", numbers.to(torch::kByte));
  return state;
}

}  // namespace accelerate::test
