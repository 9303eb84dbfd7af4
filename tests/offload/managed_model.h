// tests/offload/managed_model.h - models whose weights come and go, on the CPU.
#pragma once

#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "offload/lazy_params.h"
#include "offload/store.h"

namespace accelerate::test {

namespace offload = detail::offload;

/// Three layers with activations between them.
struct ThreeLayersImpl : torch::nn::Module {
  ThreeLayersImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    third = register_module("third", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return third->forward(torch::tanh(second->forward(torch::relu(first->forward(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(ThreeLayers);

/// The same five rows each time.
inline torch::Tensor input() {
  torch::manual_seed(3);
  return torch::randn({5, 6});
}

/// Takes the direct tensors of each module over as a group.
inline void manage_by_module(offload::LazyParams& engine, torch::nn::Module& root,
                             const offload::MakeStore& make_store) {
  const auto take = [&](const std::string& name, torch::nn::Module& module) {
    std::vector<offload::NamedTensor> tensors;
    const auto prefix = name.empty() ? name : name + ".";
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      tensors.push_back({prefix + item.key(), item.value()});
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      tensors.push_back({prefix + item.key(), item.value()});
    }
    engine.manage(name, tensors, torch::kCPU, make_store);
  };
  take("", root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    take(item.key(), *item.value());
  }
}

/// In host memory, with values as they are now.
inline offload::MakeStore in_host_memory(torch::nn::Module& root) {
  return [&root](const offload::GroupPlan& plan) {
    const auto parameters = root.named_parameters();
    const auto buffers = root.named_buffers();
    static offload::PinnedBudget budget{std::numeric_limits<std::int64_t>::max()};
    return offload::make_host_store(
        plan,
        [&](const std::string& name) {
          const auto* parameter = parameters.find(name);
          return parameter != nullptr ? *parameter : buffers[name];
        },
        budget);
  };
}

template <class Model, class... Args>
Model seeded(Args... arguments) {
  torch::manual_seed(7);
  return Model(arguments...);
}

}  // namespace accelerate::test
