// tests/checkpoint/models.h - the models of tests/reference/models/write_reference.py.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/state_dict.h"

namespace accelerate::test {

/// The files of a folder with their bytes.
inline std::map<std::string, std::string> files_in(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    files[entry.path().filename()] = {std::istreambuf_iterator<char>(in), {}};
  }
  return files;
}
/// The names of files and folders in it.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

struct Small : torch::nn::Module {
  torch::nn::Linear linear1 = register_module("linear1", torch::nn::Linear(3, 4));
  torch::nn::BatchNorm1d batchnorm = register_module("batchnorm", torch::nn::BatchNorm1d(4));
  torch::nn::Linear linear2 = register_module("linear2", torch::nn::Linear(4, 5));
};

struct Leaf : torch::nn::Module {
  explicit Leaf(const std::vector<std::pair<std::string, torch::Tensor>>& tensors) {
    for (const auto& [name, tensor] : tensors) {
      if (tensor.is_floating_point()) {
        register_parameter(name, tensor);
      } else {
        register_buffer(name, tensor);
      }
    }
  }
};

struct Tied : torch::nn::Module {
  Tied() {
    const auto weight = torch::zeros({6, 4});
    register_module("embed", std::make_shared<Leaf>(Pairs{{"weight", weight}}));
    register_module("block", std::make_shared<Leaf>(Pairs{{"weight", torch::zeros({4, 4})},
                                                          {"bias", torch::zeros({4})}}));
    register_module("head", std::make_shared<Leaf>(Pairs{{"weight", weight}}));
  }
  using Pairs = std::vector<std::pair<std::string, torch::Tensor>>;
};

struct Mixed : torch::nn::Module {
  Mixed() {
    using Pairs = Tied::Pairs;
    register_module(
        "first", std::make_shared<Leaf>(Pairs{{"low", torch::zeros({3}, torch::kHalf)},
                                              {"brain", torch::zeros({2, 3}, torch::kBFloat16)}}));
    register_module("second",
                    std::make_shared<Leaf>(Pairs{{"big", torch::zeros({5, 4})},
                                                 {"step", torch::zeros({}, torch::kLong)},
                                                 {"flags", torch::zeros({5}, torch::kBool)}}));
    register_module("third",
                    std::make_shared<Leaf>(Pairs{{"none", torch::zeros({0, 3})},
                                                 {"last", torch::zeros({7}, torch::kDouble)}}));
  }
};

template <class Net>
std::shared_ptr<Net> filled() {
  const torch::NoGradGuard no_grad;
  auto net = std::make_shared<Net>();
  std::int64_t number = 0;
  for (const auto& entry : state_dict(*net)) {
    entry.value().copy_(
        (torch::arange(entry.value().numel()) + number++).reshape(entry.value().sizes()));
  }
  return net;
}

inline void expect_equal(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto theirs = state_dict(expected);
  for (const auto& entry : state_dict(actual)) {
    EXPECT_TRUE(torch::equal(entry.value(), theirs[entry.key()])) << entry.key();
  }
}

}  // namespace accelerate::test
