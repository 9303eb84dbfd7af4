// src/sharding/sharded_engine.h - a module of which each process keeps a part: ZeRO 1, 2 and 3.
//
// Level 1 shards the state of optimizers, level 2 gradients too, level 3 also parameters: whole
// parameters come unit by unit when an operator uses one, and go. The numbers are those of data
// parallelism. docs/sharding.md describes it; sharded_state.h is its inside.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "checkpoint/sharded_files.h"
#include "parallel/engine.h"
#include "sharding/shard_collectives.h"
#include "sharding/spec.h"

namespace accelerate::detail::sharding {

struct ShardedState;

class ACCELERATE_API ShardedEngine final : public parallel::Engine,
                                           public checkpoint::ShardedModel {
 public:
  /// Collective. Takes the module over, with the values of the first process: its parameters may be
  /// on any device, on other processes also on the meta device. Throws `CommError` that names the
  /// first parameter which another process does not have in the same way, `UnsupportedError` for
  /// sparse gradients and `ArgumentError` for names in `spec` that the module does not have.
  ShardedEngine(torch::nn::Module& module, const ShardSpec& spec, const ShardProcesses& groups,
                c10::Device device, std::int64_t drift_check = 0);
  ~ShardedEngine() override;
  ShardedEngine(const ShardedEngine&) = delete;
  ShardedEngine& operator=(const ShardedEngine&) = delete;

  [[nodiscard]] std::shared_ptr<void> enter_forward() override;
  void after_forward() override;

  [[nodiscard]] bool reached_by(const parallel::ReachedLeaves& leaves) const override;
  /// Parameters that a loss does not reach count as zeros.
  [[nodiscard]] bool is_static() const override { return true; }
  [[nodiscard]] bool wants_local_backward() const override { return true; }
  /// Throws `StateError` if parameters were moved or replaced since `prepare`.
  void before_backward(const parallel::BackwardPass& pass) override;
  void after_backward() override;

  /// Throws `UnsupportedError` for an optimizer that needs whole matrices.
  void attach(torch::optim::Optimizer& optimizer) override;
  [[nodiscard]] bool holds(const at::Tensor& parameter) const override;
  void after_zero_grad(const torch::optim::Optimizer& optimizer) override;
  void before_step() override;
  void after_step(torch::optim::Optimizer& optimizer) override;
  [[nodiscard]] bool divides_states() const override { return true; }
  /// Keeps what was gathered on the first process of each host, unless `keep_states` was called.
  void gather_states(std::span<parallel::ParameterState> states) override;
  /// Whether this process keeps gathered states. For an engine around this one, which puts parts of
  /// several models together.
  void keep_states(bool keeps) { keeps_states_ = keeps; }
  void cut_state(parallel::ParameterState& state) override;
  [[nodiscard]] at::Tensor found_inf_over_processes(const at::Tensor& found_inf) override;

  [[nodiscard]] std::optional<parallel::GradientShards> shards_of(
      std::span<const at::Tensor> parameters) override;
  [[nodiscard]] at::Tensor norm_over_processes(const parallel::GradientShards& shards,
                                               double norm_type) override;

  [[nodiscard]] at::Tensor accumulated_gradient(const at::Tensor& parameter) override;
  void set_accumulated_gradient(const at::Tensor& parameter, const at::Tensor& gradient) override;
  [[nodiscard]] bool is_sharded() const override;
  /// The masters, unit by unit, in host memory on the first process of each host; nothing on the
  /// others. Own tensors on all processes where they hold the masters of all. Throws `ConfigError`
  /// if the spec refuses it.
  [[nodiscard]] StateDict state_dict(const torch::nn::Module& module) override;
  /// All processes must have `state`.
  void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) override;

  // For files.
  [[nodiscard]] std::vector<checkpoint::LocalShard> local_shards() override;
  [[nodiscard]] StateDict whole_tensors() override;
  /// The next forward sends masters that were loaded.
  void loaded() override;
  [[nodiscard]] std::vector<std::string> names_in(
      const torch::optim::Optimizer& optimizer) override;
  [[nodiscard]] StateDictType state_dict_type() const override;
  [[nodiscard]] bool has_deepspeed_names() const override;

  [[nodiscard]] const ShardStats& stats() const;
  [[nodiscard]] ShardedState& state() { return *state_; }

 private:
  std::unique_ptr<ShardedState> state_;
  std::optional<bool> keeps_states_ = std::nullopt;
};

}  // namespace accelerate::detail::sharding
