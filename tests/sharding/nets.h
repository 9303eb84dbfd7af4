// Models with classes, widths and shared parts for the tests of plans.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace accelerate::testing {

/// A module with one parameter of `size` elements, or none.
inline std::shared_ptr<torch::nn::Module> sized(std::int64_t size) {
  auto module = std::make_shared<torch::nn::Module>("Sized");
  if (size > 0) module->register_parameter("weight", torch::zeros({size}));
  return module;
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("q_proj", torch::nn::Linear(4, 4));
    register_module("mlp", torch::nn::Linear(4, 8));
  }
};

/// embed (40), layers.0 and layers.1 (60 each), head (4).
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("embed", sized(40));
    auto layers = std::make_shared<torch::nn::Module>("Layers");
    for (int i = 0; i < 2; ++i) {
      layers->register_module(std::to_string(i), std::make_shared<BlockImpl>());
    }
    register_module("layers", layers);
    register_module("head", sized(4));
  }
};

}  // namespace accelerate::testing
