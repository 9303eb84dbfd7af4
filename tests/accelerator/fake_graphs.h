// tests/accelerator/fake_graphs.h - captured steps without a GPU: graphs that run the step again.
#pragma once

#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "state/step_graph.h"
#include "support/fake_gpu.h"

namespace accelerate::test {

using Tensors = std::vector<torch::Tensor>;

/// Records steps of the CPU. As with a GPU a recording changes nothing, and a replay does what the
/// device would do.
class FakeGraphs : public FakeGpu, public detail::state::StepGraphMaker {
 public:
  explicit FakeGraphs(std::function<Tensors()> memory = [] { return Tensors(); })
      : FakeGpu({.major = 9, .minor = 0}), memory_(std::move(memory)) {}

  std::unique_ptr<detail::state::StepGraphs> make_step_graphs(c10::Device) override {
    return std::make_unique<Graphs>(*this);
  }

  int warm_ups = 0;
  int records = 0;
  int replays = 0;

 private:
  struct Graph : detail::state::StepGraph {
    Graph(FakeGraphs& owner, std::function<void()> body) : owner(owner), body(std::move(body)) {}
    void replay() override {
      ++owner.replays;
      body();
    }
    FakeGraphs& owner;
    std::function<void()> body;
  };
  struct Graphs : detail::state::StepGraphs {
    explicit Graphs(FakeGraphs& owner) : owner(owner) {}
    void warm_up(const std::function<void()>& body) override {
      ++owner.warm_ups;
      body();
    }
    std::unique_ptr<detail::state::StepGraph> record(const std::function<void()>& body) override {
      ++owner.records;
      const auto tensors = owner.memory_();
      Tensors before;
      for (const auto& tensor : tensors) before.push_back(tensor.detach().clone());
      const auto random = torch::globalContext().defaultGenerator(torch::kCPU).get_state();
      const auto restore = [&] {
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(before[i]);
        auto generator = torch::globalContext().defaultGenerator(torch::kCPU);
        generator.set_state(random);
      };
      try {
        body();
      } catch (...) {
        restore();
        throw;
      }
      restore();
      return std::make_unique<Graph>(owner, body);
    }
    FakeGraphs& owner;
  };

  std::function<Tensors()> memory_;
};

/// Parameters, their gradients, and what the optimizer keeps for them.
inline Tensors memory_of(const std::vector<torch::Tensor>& parameters,
                         AcceleratedOptimizer& optimizer) {
  Tensors result;
  for (const auto& parameter : parameters) {
    result.push_back(parameter);
    if (parameter.grad().defined()) result.push_back(parameter.grad());
    const auto& own = dynamic_cast<FusedOptimizer&>(optimizer.optimizer());
    for (const auto& [name, tensor] : own.state_of(parameter)) result.push_back(tensor);
  }
  return result;
}

/// One parameter, w, and a loss of w * x.
struct Small {
  explicit Small(AcceleratorOptions options = {}) : accelerator(anew(std::move(options))) {
    w = torch::ones({1}).requires_grad_();
    auto sgd = SGD(std::vector<torch::Tensor>{w}, {.lr = 0.5});
    optimizer = accelerator.prepare(std::move(sgd));
  }
  torch::Tensor train(const torch::Tensor& x) {
    const auto loss = (w * x).sum();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  }
  Tensors memory() { return memory_of({w}, optimizer); }

  Accelerator accelerator;
  torch::Tensor w;
  AcceleratedOptimizer optimizer;
};

}  // namespace accelerate::test
