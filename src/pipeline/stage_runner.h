// src/pipeline/stage_runner.h - computes the stages of this process, in the order of a schedule.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/fwd.h"
#include "accelerate/parallel/pipeline.h"
#include "parallel/engine.h"
#include "pipeline/stage_messages.h"
#include "pipeline/stage_plan.h"

namespace accelerate::detail::pipeline {

/// Where a runner stands.
struct RunnerPlace {
  /// The processes with the other stages, by rank of the pipeline; null for a pipeline of one
  /// process.
  StageMessages::GroupHandle pipeline = nullptr;
  /// The processes with the same stages; null if there are no others.
  StageMessages::GroupHandle data = nullptr;
  /// The processes with which each layer is shared; null if layers are not cut.
  StageMessages::GroupHandle tensor = nullptr;
  c10::Device device = c10::Device(c10::kCPU);
  /// Steps from one comparison of tied weights to the next; 0 is never.
  std::int64_t drift_check = 0;
};

class StageRunner {
 public:
  StageRunner(const PipelineImpl& pipeline, const RunnerPlace& place);

  [[nodiscard]] const StagePlan& plan() const { return plan_; }
  [[nodiscard]] const RunnerPlace& place() const { return place_; }
  /// By chunk: what averages its gradients over data parallel copies. None if there are no copies.
  void set_engines(std::vector<std::shared_ptr<parallel::Engine>> engines) {
    engines_ = std::move(engines);
  }

  /// Collective. Gradients of the mean loss over the batch, averaged over data parallel copies;
  /// they are added to those that are there. Returns that loss.
  at::Tensor train(const PipelineTensors& inputs, const PipelineTensors& targets);
  /// Collective. The loss, without gradients.
  at::Tensor evaluate(const PipelineTensors& inputs, const PipelineTensors& targets);
  /// Collective. The outputs of `micro_batches` parts of a batch, one after the other, on the last
  /// stage, or everywhere. Processes without the first stage may give no inputs.
  PipelineTensors infer(const PipelineTensors& inputs, std::int64_t micro_batches, bool everywhere);

  /// Bytes of activations, gradients and their shapes that this process has sent.
  [[nodiscard]] std::int64_t bytes_sent() const { return messages_.bytes_sent(); }

 private:
  /// The parts of a batch.
  struct Batch {
    std::vector<PipelineTensors> inputs = {};
    std::vector<PipelineTensors> targets = {};
    /// The share of each part in the loss.
    std::vector<double> weights = {};
    /// For the shapes of messages; nullopt: they are said each time.
    std::vector<std::optional<std::uint64_t>> keys = {};
    bool wants_loss = true;
  };
  /// What a forward leaves for its backward.
  struct Saved {
    PipelineTensors inputs = {};
    PipelineTensors outputs = {};
    MessageFacts facts = {};
  };
  /// A parameter of this process that other ranks hold too.
  struct Tied {
    std::string name;
    at::Tensor parameter;
    std::vector<std::int64_t> holders;
    int tag = 0;
  };

  [[nodiscard]] Batch cut(const PipelineTensors& inputs, const PipelineTensors& targets,
                          std::int64_t parts) const;
  /// Names stage and micro-batch in what `f` throws.
  template <class F>
  void named(const PipelineAction& action, F&& f);
  /// Forgets a step that an error has ended.
  void drop_step() noexcept;
  /// Throws `StateError` if an error has ended a step in its middle.
  void check_whole() const;
  void forward(const PipelineAction& action, const Batch& batch, bool trains);
  [[nodiscard]] PipelineTensors run_layers(const LayerRange& layers, PipelineTensors tensors) const;
  void keep(const PipelineAction& action, PipelineTensors inputs, PipelineTensors outputs);
  void backward(const PipelineAction& action);
  void run_autograd(std::int64_t chunk, const PipelineTensors& roots,
                    const PipelineTensors& gradients);
  void forward_only(const Batch& batch);
  [[nodiscard]] MessageAddress forward_message(std::int64_t from_stage, bool is_sender) const;
  [[nodiscard]] MessageAddress backward_message(std::int64_t from_stage, bool is_sender) const;
  void find_tied(const PipelineImpl& pipeline);
  /// `before` are their gradients from before the step.
  void add_up_tied(const std::vector<at::Tensor>& before);
  /// The sum of a part of a tied weight, which all its holders must have alike; undefined if
  /// weights are not compared in this step.
  [[nodiscard]] at::Tensor check_sum(const at::Tensor& parameter) const;
  void check_alike(const Tied& one, std::int64_t other, const PipelineTensors& own,
                   const PipelineTensors& others);
  /// Collective. The mean loss over the micro-batches and data parallel copies.
  [[nodiscard]] at::Tensor mean_loss();

  std::vector<PipelineLayer> layers_;
  PipelineLoss loss_;
  PipelineOptions options_;
  RunnerPlace place_;
  StagePlan plan_;
  std::vector<PipelineAction> actions_;
  StageMessages messages_;
  std::vector<std::shared_ptr<parallel::Engine>> engines_ = {};
  std::vector<Tied> tied_ = {};
  std::int64_t steps_ = 0;  // of training
  /// A step has begun, and has not come to its end.
  bool broken_ = false;

  // Of the step that runs.
  std::map<std::pair<std::int64_t, std::int64_t>, Saved> saved_ = {};  // by chunk and micro-batch
  std::vector<std::int64_t> backwards_left_ = {};                      // by chunk
  at::Tensor loss_sum_ = {};
  std::vector<PipelineTensors> outputs_ = {};  // of the last stage, if there is no loss
};

}  // namespace accelerate::detail::pipeline
