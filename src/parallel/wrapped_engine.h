// src/parallel/wrapped_engine.h - an engine on top of another one, and the engine of one process.
//
// Data parallelism and sharding divide batches; what divides the model itself (tensors, stages,
// sequences) wraps the engine that does that for a part of the model, and overrides what it adds.
// If no data is divided, that is a `LocalEngine`.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "parallel/engine.h"

namespace accelerate::detail::parallel {

/// One process that trains by itself.
class ACCELERATE_API LocalEngine final : public Engine {
 public:
  explicit LocalEngine(const torch::nn::Module& module) : parameters_(module.parameters()) {}

  [[nodiscard]] bool reached_by(const ReachedLeaves& leaves) const override;
  [[nodiscard]] bool is_static() const override { return true; }
  void before_backward(const BackwardPass&) override {}
  void after_backward() override {}
  [[nodiscard]] bool holds(const at::Tensor& parameter) const override;

 private:
  std::vector<at::Tensor> parameters_;
};

/// Hands everything on to the engine within, but for `joinable`: who divides a model must say how a
/// process without data takes part.
class ACCELERATE_API WrappedEngine : public Engine {
 public:
  explicit WrappedEngine(std::shared_ptr<Engine> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] std::shared_ptr<void> enter_forward() override { return inner_->enter_forward(); }
  void after_forward() override { inner_->after_forward(); }

  [[nodiscard]] bool reached_by(const ReachedLeaves& leaves) const override {
    return inner_->reached_by(leaves);
  }
  [[nodiscard]] bool is_static() const override { return inner_->is_static(); }
  [[nodiscard]] bool wants_local_backward() const override {
    return inner_->wants_local_backward();
  }
  void before_backward(const BackwardPass& pass) override { inner_->before_backward(pass); }
  void after_backward() override { inner_->after_backward(); }

  void attach(torch::optim::Optimizer& optimizer) override { inner_->attach(optimizer); }
  [[nodiscard]] bool holds(const at::Tensor& parameter) const override {
    return inner_->holds(parameter);
  }
  [[nodiscard]] bool divides_states() const override { return inner_->divides_states(); }
  void gather_states(std::span<ParameterState> states) override { inner_->gather_states(states); }
  void cut_state(ParameterState& state) override { inner_->cut_state(state); }
  void before_step() override { inner_->before_step(); }
  void after_step(torch::optim::Optimizer& optimizer) override { inner_->after_step(optimizer); }
  void after_zero_grad(const torch::optim::Optimizer& optimizer) override {
    inner_->after_zero_grad(optimizer);
  }
  [[nodiscard]] at::Tensor found_inf_over_processes(const at::Tensor& found_inf) override {
    return inner_->found_inf_over_processes(found_inf);
  }

  [[nodiscard]] std::optional<GradientShards> shards_of(
      std::span<const at::Tensor> parameters) override {
    return inner_->shards_of(parameters);
  }
  [[nodiscard]] at::Tensor norm_over_processes(const GradientShards& shards,
                                               double norm_type) override {
    return inner_->norm_over_processes(shards, norm_type);
  }

  [[nodiscard]] at::Tensor accumulated_gradient(const at::Tensor& parameter) override {
    return inner_->accumulated_gradient(parameter);
  }
  void set_accumulated_gradient(const at::Tensor& parameter, const at::Tensor& gradient) override {
    inner_->set_accumulated_gradient(parameter, gradient);
  }
  [[nodiscard]] bool is_sharded() const override { return inner_->is_sharded(); }
  [[nodiscard]] StateDict state_dict(const torch::nn::Module& module) override {
    return inner_->state_dict(module);
  }
  [[nodiscard]] std::string_view wrapper_prefix() const override {
    return inner_->wrapper_prefix();
  }
  void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) override {
    inner_->load_state_dict(module, state, strict);
  }
  [[nodiscard]] bool can_rebuild() const override { return inner_->can_rebuild(); }
  void rebuild() override { inner_->rebuild(); }

 protected:
  [[nodiscard]] Engine& inner() const { return *inner_; }

 private:
  std::shared_ptr<Engine> inner_;
};

}  // namespace accelerate::detail::parallel
