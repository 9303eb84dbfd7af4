// src/model_parallel/tensor_parallel_engine.h - trains a model whose layers are cut over processes.
//
// Operators do the communication of forward and backward by themselves (layer_rules.h), so that the
// engine within trains the parts as if they were a model. What is added here: norms and states of
// whole parameters, rules that are set again when a module was moved, and the comparison of what
// all processes must have alike.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "checkpoint/sharded_files.h"
#include "model_parallel/parameter_part.h"
#include "parallel/drift_watch.h"
#include "parallel/wrapped_engine.h"

namespace accelerate::detail::model_parallel {

/// Throws the `ArgumentError` of a model without cut layers.
[[noreturn]] void refuse_uncut(int processes);

class ACCELERATE_API TensorParallelEngine final : public parallel::WrappedEngine,
                                                  public checkpoint::ShardedModel {
 public:
  /// Collective. `inner` trains the part of a process, together with the processes of `data`, which
  /// have the same part; null if there are none. Throws `ArgumentError` if no layer of the module
  /// is cut over `group`, `CommError` if the processes have different models.
  TensorParallelEngine(std::shared_ptr<parallel::Engine> inner, const torch::nn::Module& module,
                       ProcessGroupPtr group, ProcessGroupPtr data, std::int64_t drift_check);

  [[nodiscard]] std::shared_ptr<void> enter_forward() override;
  void before_backward(const parallel::BackwardPass& pass) override;
  void after_backward() override;

  /// Throws `UnsupportedError` for an optimizer that needs whole matrices.
  void attach(torch::optim::Optimizer& optimizer) override;
  void before_step() override;
  /// Parts that are sharded beside are collected first: `ShardedEngine::keep_states` must be the
  /// same for all processes of the group.
  void gather_states(std::span<parallel::ParameterState> states) override;
  void cut_state(parallel::ParameterState& state) override;
  [[nodiscard]] at::Tensor found_inf_over_processes(const at::Tensor& found_inf) override;

  [[nodiscard]] std::optional<parallel::GradientShards> shards_of(
      std::span<const at::Tensor> parameters) override;
  [[nodiscard]] at::Tensor norm_over_processes(const parallel::GradientShards& shards,
                                               double norm_type) override;

  [[nodiscard]] at::Tensor accumulated_gradient(const at::Tensor& parameter) override;
  void set_accumulated_gradient(const at::Tensor& parameter, const at::Tensor& gradient) override;
  [[nodiscard]] std::int64_t parts_of(const at::Tensor& parameter) const override;

  [[nodiscard]] bool is_sharded() const override { return true; }
  /// On all processes, in host memory.
  [[nodiscard]] StateDict state_dict(const torch::nn::Module& module) override;
  void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) override;

  // For files.
  [[nodiscard]] std::vector<checkpoint::LocalShard> local_shards() override;
  [[nodiscard]] StateDict whole_tensors() override;
  void loaded() override;
  [[nodiscard]] std::vector<std::string> names_in(
      const torch::optim::Optimizer& optimizer) override;
  [[nodiscard]] StateDictType state_dict_type() const override;
  [[nodiscard]] bool has_deepspeed_names() const override;

 private:
  struct Named {
    std::string name;
    at::Tensor tensor;
    /// Null for a parameter that the plan does not name.
    std::shared_ptr<const ParameterPart> part;
    [[nodiscard]] bool is_cut() const { return part && part->dim; }
  };
  [[nodiscard]] const Named* find(const std::string& name) const;
  [[nodiscard]] const Named* find(const at::Tensor& parameter) const;
  [[nodiscard]] const ParameterPart* cut_of(const at::Tensor& parameter) const;
  [[nodiscard]] at::Tensor norm_of_cut(std::span<const at::Tensor> gradients,
                                       double norm_type) const;
  void renew_rules() const;
  void watch_drift(std::int64_t drift_check);

  ProcessGroupPtr group_;
  ProcessGroupPtr data_;
  /// The inner engine, if it shards.
  checkpoint::ShardedModel* sharded_;
  /// In the order of the module, each name of a tied one.
  std::vector<Named> parameters_;
  StateDict buffers_{"Tensor"};
  /// What the inner engine put into optimizers in place of cut parameters.
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<const ParameterPart>> stand_ins_;
  std::unique_ptr<parallel::DriftWatch> drift_;
  bool synchronizes_ = true;  // this backward
};

}  // namespace accelerate::detail::model_parallel
