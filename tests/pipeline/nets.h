// tests/pipeline/nets.h - small models in layers, and what one process makes of them.
#pragma once

#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::test {

/// Seven layers in float64, four of them with weights.
inline torch::nn::Sequential layers() {
  torch::manual_seed(11);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8),
                            torch::nn::Tanh(), torch::nn::Linear(8, 8), torch::nn::Tanh(),
                            torch::nn::Linear(8, 3));
  net->to(torch::kDouble);
  return net;
}

/// An embedding whose weights are the head's too.
struct TiedNetImpl : torch::nn::Module, StageList {
  TiedNetImpl() {
    register_module("tokens", tokens);
    register_module("first", first);
    register_module("second", second);
    to(torch::kDouble);
  }
  torch::Tensor embed(const torch::Tensor& ids) { return tokens(ids); }
  torch::Tensor head(const torch::Tensor& x) { return torch::linear(x, tokens->weight); }
  torch::Tensor forward(const torch::Tensor& ids) {
    return head(torch::tanh(second(torch::tanh(first(embed(ids))))));
  }
  std::vector<PipelineLayer> pipeline_layers() override {
    return {
        pipeline_layer("embed", {tokens.ptr()},
                       [this](const torch::Tensor& ids) { return embed(ids); }),
        pipeline_layer("first", {first.ptr()},
                       [this](const torch::Tensor& x) { return torch::tanh(first(x)); }),
        pipeline_layer("second", {second.ptr()},
                       [this](const torch::Tensor& x) { return torch::tanh(second(x)); }),
        pipeline_layer("head", {tokens.ptr()}, [this](const torch::Tensor& x) { return head(x); })};
  }
  bool seeded = (torch::manual_seed(12), true);  // before the layers draw their weights
  torch::nn::Embedding tokens{16, 8};
  torch::nn::Linear first{8, 8}, second{8, 8};
};
TORCH_MODULE(TiedNet);

inline torch::Tensor mean_squares(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::mse_loss(output, target);
}
inline torch::Tensor entropy(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::cross_entropy_loss(output, target);
}

struct Batch {
  torch::Tensor x, y;
};
/// The same on all processes.
inline Batch numbers(int step, std::int64_t rows = 8) {
  torch::manual_seed(100 + step);
  return {torch::randn({rows, 6}, torch::kDouble), torch::randn({rows, 3}, torch::kDouble)};
}
inline Batch tokens(int step, std::int64_t rows = 8) {
  torch::manual_seed(200 + step);
  return {torch::randint(0, 16, {rows}, torch::kLong), torch::randint(0, 16, {rows}, torch::kLong)};
}

struct Trained {
  std::vector<double> losses;
  std::vector<double> norms;
  StateDict weights{"Tensor"};
};

/// Plain training by one process.
template <class Net, class Loss, class Batches>
Trained plain_training(Net net, Loss loss_of, const Batches& batches, int steps,
                       double max_norm = 1.0) {
  AdamW optimizer(net->parameters(), {.lr = 1e-2});
  Trained result;
  for (int step = 0; step < steps; ++step) {
    const auto [x, y] = batches(step);
    const auto loss = loss_of(net->forward(x), y);
    loss.backward();
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm));
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(loss.template item<double>());
  }
  result.weights = state_dict(*net);
  return result;
}

/// Training by a pipeline with the whole state on the first process.
template <class Net, class Loss, class Batches>
Trained pipeline_training(Accelerator& accelerator, Net net, Loss loss_of, PipelineOptions options,
                          const Batches& batches, int steps) {
  if (!options.max_grad_norm) options.max_grad_norm = 1.0;
  auto adamw = AdamW(net->parameters(), {.lr = 1e-2});
  auto [model, optimizer] = accelerator.prepare(Pipeline(net, loss_of, options), std::move(adamw));
  Trained result;
  for (int step = 0; step < steps; ++step) {
    const auto [x, y] = batches(step);
    result.losses.push_back(model(x, y).template item<double>());
    result.norms.push_back(model->grad_norm().template item<double>());
  }
  result.weights = accelerator.get_state_dict(model);
  return result;
}

inline void expect_equal(const Trained& one, const Trained& other, double tolerance = 1e-12) {
  ASSERT_EQ(one.losses.size(), other.losses.size());
  for (std::size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(one.losses[i], other.losses[i], tolerance) << "step " << i;
    EXPECT_NEAR(one.norms[i], other.norms[i], tolerance) << "step " << i;
  }
  if (one.weights.is_empty() || other.weights.is_empty()) return;  // not the first process
  ASSERT_EQ(one.weights.keys(), other.weights.keys());
  for (const auto& entry : one.weights) {
    EXPECT_TRUE(torch::allclose(entry.value(), other.weights[entry.key()], 0, tolerance))
        << entry.key();
  }
}

}  // namespace accelerate::test
