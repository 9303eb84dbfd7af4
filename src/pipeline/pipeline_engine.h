// src/pipeline/pipeline_engine.h - a model of which each process computes and trains some layers.
//
// Parameters of other processes stay in the module, with their shapes and without memory (on the
// meta device), so that names and groups of optimizers are those of the whole model. They get no
// gradients, so that optimizers pass over them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "accelerate/api.h"
#include "parallel/engine.h"
#include "pipeline/stage_runner.h"

namespace accelerate::detail::pipeline {

/// Makes the engine that averages the gradients of a part of the model over the processes of
/// `RunnerPlace::data`, and computes with those of `RunnerPlace::tensor`. Its module has the names
/// of the whole model.
using MakePartEngine = std::function<std::shared_ptr<parallel::Engine>(torch::nn::Module& part)>;

class ACCELERATE_API PipelineEngine final : public parallel::Engine {
 public:
  /// Collective. Takes the pipeline over, with the values of the first process: puts the layers of
  /// this process on its device and frees all others. An engine is made for each stage of the
  /// process if there are data parallel copies, or if layers are cut.
  ///
  /// Throws `ArgumentError` for parameters of no layer, and `CommError` if processes have different
  /// models.
  PipelineEngine(PipelineImpl& pipeline, const RunnerPlace& place,
                 const MakePartEngine& make_part_engine);
  ~PipelineEngine() override;
  PipelineEngine(const PipelineEngine&) = delete;
  PipelineEngine& operator=(const PipelineEngine&) = delete;

  [[nodiscard]] const std::shared_ptr<StageRunner>& runner() const { return runner_; }

  /// A loss of a pipeline has no graph: its backward was run already.
  [[nodiscard]] bool reached_by(const parallel::ReachedLeaves& leaves) const override;
  void before_backward(const parallel::BackwardPass& pass) override;
  void after_backward() override;

  void attach(torch::optim::Optimizer& optimizer) override;
  [[nodiscard]] bool holds(const at::Tensor& parameter) const override;
  void before_step() override;
  void after_step(torch::optim::Optimizer& optimizer) override;
  void gather_states(std::span<parallel::ParameterState> states) override;
  void cut_state(parallel::ParameterState& state) override;
  [[nodiscard]] at::Tensor found_inf_over_processes(const at::Tensor& found_inf) override;

  [[nodiscard]] std::optional<parallel::GradientShards> shards_of(
      std::span<const at::Tensor> parameters) override;
  [[nodiscard]] at::Tensor norm_over_processes(const parallel::GradientShards& shards,
                                               double norm_type) override;

  [[nodiscard]] bool is_sharded() const override;
  [[nodiscard]] StateDict state_dict(const torch::nn::Module& module) override;
  void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) override;

 private:
  /// The layers of one chunk.
  struct Part {
    std::shared_ptr<torch::nn::Module> module = nullptr;
    std::shared_ptr<parallel::Engine> engine = nullptr;
  };

  [[nodiscard]] const StagePlan& plan() const { return runner_->plan(); }
  /// Whether several processes have stages.
  [[nodiscard]] bool is_cut() const { return plan().shape.ranks > 1; }
  /// Whether the engine of a part knows all there is.
  [[nodiscard]] bool is_one_part() const { return !is_cut() && parts_.size() == 1; }
  void check_layers() const;
  void check_same() const;
  void place_tensors();
  void make_parts(const MakePartEngine& make_part_engine);
  void refuse_tied_shards(const Part& part) const;
  [[nodiscard]] bool counts(const at::Tensor& parameter) const;
  void broadcast(int root, std::span<at::Tensor> tensors) const;

  PipelineImpl& pipeline_;
  std::shared_ptr<StageRunner> runner_;
  std::vector<Part> parts_;
  /// The gradients that count in the norm, by part, as `shards_of` has found them last.
  std::vector<parallel::GradientShards> counted_;
};

}  // namespace accelerate::detail::pipeline
