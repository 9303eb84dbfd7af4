// accelerate/parallel/pipeline.h - one model, cut into stages that different processes compute.
//
//     Accelerator accelerator({.parallelism_config = ParallelismConfig{.pp_size = 2}});
//     auto adamw = AdamW(net->parameters(), {.lr = 1e-3});
//     Pipeline pipeline(net, cross_entropy, {.num_micro_batches = 8, .max_grad_norm = 1.0});
//     auto [model, optimizer, loader] = accelerator.prepare(pipeline, std::move(adamw), data);
//     for (auto& [x, y] : loader) {
//       auto loss = model(x, y);        // a whole training step: nothing else is to be called
//     }
//
// All processes run the same program and read the same batches, as many different ones as there are
// data parallel copies of the pipeline. Names of parameters, and so checkpoints, are those of the
// model, whatever the number of stages. Part of accelerate/parallel.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/parallel/pipeline_layers.h"
#include "accelerate/parallel/pipeline_schedule.h"

namespace accelerate {

namespace detail::pipeline {
class StageRunner;
}  // namespace detail::pipeline

/// The mean loss of a micro-batch.
using PipelineLoss =
    std::function<at::Tensor(const PipelineTensors& outputs, const PipelineTensors& targets)>;

/// Which layers are computed again in backward instead of keeping their activations. Megatron-LM's
/// recompute_method.
enum class PipelineRecompute : std::uint8_t {
  kNone,
  /// All layers, in groups of `recompute_layers`.
  kUniform,
  /// The first `recompute_layers` layers of each stage.
  kBlock
};

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  /// Into how many parts a batch is cut. These are the gradient accumulation of a pipeline: the
  /// gradients are those of the mean loss over the batch.
  std::int64_t num_micro_batches = 1;
  /// Stages per process, with `kInterleaved1F1B`.
  std::int64_t chunks = 1;
  /// The names of the layers that begin a stage, without the first. Empty: stages of about equal
  /// size in bytes.
  std::vector<std::string> split_points = {};
  /// What gradients are clipped to before the step: their norm over all stages.
  std::optional<double> max_grad_norm = std::nullopt;
  /// Give the loss to all processes. Otherwise the last stage has it, and others return 0.
  bool broadcast_loss = true;
  /// Say the shapes of activations with each message. Otherwise they are said once for each shape
  /// of inputs, which must determine them.
  bool variable_shapes = false;
  PipelineRecompute recompute = PipelineRecompute::kNone;
  std::int64_t recompute_layers = 1;
};

/// A model with its loss, as `Accelerator::prepare` takes it. Before it is prepared, and without
/// `pp_size`, one process computes all stages.
///
/// Functions marked "Collective" are called by all processes of a prepared pipeline. An error on
/// one stage is an error on all; it names the stage and the micro-batch.
class ACCELERATE_API PipelineImpl : public torch::nn::Module {
 public:
  /// See `Pipeline`.
  PipelineImpl(std::shared_ptr<torch::nn::Module> model, PipelineLoss loss,
               const PipelineOptions& options);
  PipelineImpl(const PipelineStage& stage, PipelineLoss loss, const PipelineOptions& options);
  ~PipelineImpl() override;

  /// Collective. With a model that is training: `train_step`. Otherwise the loss of the batch,
  /// without gradients.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target);
  at::Tensor forward(const PipelineTensors& inputs, const PipelineTensors& targets);
  /// Collective. The output for a batch, without gradients: on the last stage, undefined on others.
  at::Tensor forward(const at::Tensor& input);

  /// Collective. A whole step: forwards and backwards of all micro-batches, averages over data
  /// parallel copies, clipping, the step of the prepared optimizers of this model, and no gradients
  /// left. Returns the mean loss of the batch over micro-batches and data parallel copies.
  at::Tensor train_step(const PipelineTensors& inputs, const PipelineTensors& targets);
  /// Collective. As `train_step`, up to the gradients: clip and step are the program's.
  at::Tensor forward_backward(const PipelineTensors& inputs, const PipelineTensors& targets);

  /// Also of the model that the layers come from.
  void train(bool on = true) override;

  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& model() const { return model_; }
  [[nodiscard]] const PipelineOptions& options() const { return options_; }
  /// The names of the layers of each stage.
  [[nodiscard]] std::vector<std::vector<std::string>> stages() const;
  /// Whether this process computes the first, or the last, stage.
  [[nodiscard]] bool is_first_stage() const;
  [[nodiscard]] bool is_last_stage() const;
  /// The norm of the gradients before the last `train_step` clipped them; undefined before.
  [[nodiscard]] const at::Tensor& grad_norm() const { return grad_norm_; }

  // ---- for this library

  /// What a training step ends with.
  struct Steps {
    /// Gradients are averaged over all processes.
    std::function<void()> averaged;
    std::function<at::Tensor(double max_norm)> clip;
    std::function<void()> step;
    std::function<void()> zero_grad;
  };
  void _set_options(const PipelineOptions& options);
  void _set_loss(PipelineLoss loss) { loss_ = std::move(loss); }
  void _prepare(std::shared_ptr<detail::pipeline::StageRunner> runner, Steps steps);
  [[nodiscard]] const std::vector<PipelineLayer>& _layers() const { return layers_; }
  /// The part of the model that this process was given: `stage` of `stages`, 0 of 1 for all of it.
  struct OwnStage {
    std::int64_t stage;
    std::int64_t stages;
  };
  [[nodiscard]] OwnStage _own_stage() const { return own_stage_; }
  /// Takes the layers of all stages, one of each.
  void _join(std::vector<PipelineLayer> layers);
  [[nodiscard]] const PipelineLoss& _loss() const { return loss_; }
  /// What this process has sent to other stages.
  [[nodiscard]] std::int64_t _bytes_sent();
  /// Outputs of a batch that is cut into `parts`; processes without the first stage may give no
  /// inputs.
  [[nodiscard]] PipelineTensors _infer(const PipelineTensors& inputs, std::int64_t parts,
                                       bool everywhere);

 private:
  detail::pipeline::StageRunner& runner();
  void register_model();

  std::shared_ptr<torch::nn::Module> model_;
  PipelineLoss loss_;
  PipelineOptions options_;
  std::vector<PipelineLayer> layers_;
  OwnStage own_stage_{0, 1};
  std::shared_ptr<detail::pipeline::StageRunner> runner_;
  Steps steps_ = {};
  at::Tensor grad_norm_ = {};
};

/// The holder of a pipeline, as those of TORCH_MODULE.
class Pipeline : public torch::nn::ModuleHolder<PipelineImpl> {
 public:
  using Impl = PipelineImpl;

  /// Without a pipeline.
  Pipeline(std::nullptr_t) : ModuleHolder(nullptr) {}  // NOLINT(google-explicit-constructor)
  explicit Pipeline(std::shared_ptr<PipelineImpl> pipeline) : ModuleHolder(std::move(pipeline)) {}
  /// `model` is a holder of, or a pointer to, a `torch::nn::Sequential` or a `StageList`. `loss`
  /// takes the output and the target as two tensors, or as two `PipelineTensors`.
  ///
  /// Throws `ArgumentError` for a model without layers and for options that do not fit together.
  template <detail::modeling::ModelHolder Model, class Loss>
  Pipeline(const Model& model, Loss loss, const PipelineOptions& options = {})
      : ModuleHolder(std::make_shared<PipelineImpl>(
            detail::modeling::ModuleOf<Model>::pointer(model), loss_of(std::move(loss)), options)) {
  }

  /// Of one stage, which needs no other layers. Does not go with `chunks`, `split_points` and
  /// weights that stages share; `recompute` counts the stage as one layer.
  template <class Loss>
  Pipeline(const PipelineStage& stage, Loss loss, const PipelineOptions& options = {})
      : ModuleHolder(std::make_shared<PipelineImpl>(stage, loss_of(std::move(loss)), options)) {}

 private:
  template <class Loss>
  static PipelineLoss loss_of(Loss loss) {
    if constexpr (std::is_invocable_r_v<at::Tensor, Loss&, const at::Tensor&, const at::Tensor&>) {
      return [f = std::move(loss)](const PipelineTensors& outputs,
                                   const PipelineTensors& targets) mutable {
        return f(detail::pipeline::only_tensor(outputs), detail::pipeline::only_tensor(targets));
      };
    } else {
      return loss;
    }
  }
};

}  // namespace accelerate
