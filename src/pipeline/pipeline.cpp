#include "accelerate/parallel/pipeline.h"

#include <torch/nn/modules/container/sequential.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "core/text.h"
#include "pipeline/stage_runner.h"

namespace accelerate {

using detail::str;

StageList::~StageList() = default;

namespace detail::pipeline {

const at::Tensor& only_tensor(const PipelineTensors& tensors) {
  if (tensors.size() == 1) return tensors.front();
  throw ArgumentError(str("A layer or loss that takes one tensor was given ", tensors.size(),
                          ". Let it take PipelineTensors."));
}

std::vector<PipelineLayer> layers_of(const std::shared_ptr<torch::nn::Module>& model) {
  if (!model) {
    throw ArgumentError("The model of a pipeline is empty: its holder was made with nullptr.");
  }
  std::vector<PipelineLayer> layers;
  if (auto* const list = dynamic_cast<StageList*>(model.get())) {
    layers = list->pipeline_layers();
  } else if (auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(model.get())) {
    std::size_t number = 0;
    for (auto& module : *sequential) {
      layers.push_back(pipeline_layer(
          str(number++), {module.ptr()},
          [module](const at::Tensor& input) mutable { return module.forward<at::Tensor>(input); }));
    }
  } else {
    throw ArgumentError(
        "A pipeline needs to know how a forward falls into parts, which C++ cannot trace. Give a "
        "torch::nn::Sequential, or derive the model from accelerate::StageList.");
  }
  if (layers.empty()) throw ArgumentError("The model of a pipeline has no layers.");
  for (const auto& layer : layers) {
    if (layer.forward) continue;
    throw ArgumentError(str("The layer '", layer.name, "' of a pipeline has no forward."));
  }
  return layers;
}

}  // namespace detail::pipeline

using detail::pipeline::StageRunner;

PipelineImpl::PipelineImpl(std::shared_ptr<torch::nn::Module> model, PipelineLoss loss,
                           const PipelineOptions& options)
    : model_(std::move(model)),
      loss_(std::move(loss)),
      layers_(detail::pipeline::layers_of(model_)) {
  register_model();
  _set_options(options);
}

PipelineImpl::PipelineImpl(const PipelineStage& stage, PipelineLoss loss,
                           const PipelineOptions& options)
    : model_(stage.module),
      loss_(std::move(loss)),
      layers_(detail::pipeline::layers_of(model_)),
      own_stage_{stage.stage, stage.stages} {
  if (stage.stages < 1 || stage.stage < 0 || stage.stage >= stage.stages) {
    throw ArgumentError(str("A PipelineStage has the number ", stage.stage, " of ", stage.stages,
                            " stages. Numbers go from 0 to below `stages`."));
  }
  if (stage.stages > 1 && (options.chunks > 1 || !options.split_points.empty())) {
    throw ArgumentError(
        "A PipelineStage is one stage of its process: leave chunks and split_points of "
        "PipelineOptions out.");
  }
  // Else `prepare` registers all stages, in the same order on all processes.
  if (stage.stages == 1) register_model();
  _set_options(options);
}

void PipelineImpl::register_model() {
  // With the names of the model, so that checkpoints fit it.
  for (const auto& child : model_->named_children()) register_module(child.key(), child.value());
  for (const auto& entry : model_->named_parameters(/*recurse=*/false)) {
    register_parameter(entry.key(), entry.value(), entry.value().requires_grad());
  }
  for (const auto& entry : model_->named_buffers(/*recurse=*/false)) {
    register_buffer(entry.key(), entry.value());
  }
}

void PipelineImpl::_join(std::vector<PipelineLayer> layers) {
  layers_ = std::move(layers);
  options_.split_points.clear();
  for (std::size_t i = 1; i < layers_.size(); ++i) options_.split_points.push_back(layers_[i].name);
}

PipelineImpl::~PipelineImpl() = default;

void PipelineImpl::_set_options(const PipelineOptions& options) {
  if (options.recompute_layers < 1) {
    throw ArgumentError(str("recompute_layers of PipelineOptions is ", options.recompute_layers,
                            ", but a group has one layer at least."));
  }
  // Throws if the schedule does not fit the rest, as far as one process can tell.
  static_cast<void>(pipeline_actions(
      options.schedule,
      {.ranks = 1, .micro_batches = options.num_micro_batches, .chunks = options.chunks}, 0));
  options_ = options;
}

StageRunner& PipelineImpl::runner() {
  if (!runner_) {
    if (own_stage_.stages > 1) {
      throw StateError(str("This pipeline is stage ", own_stage_.stage, " of ", own_stage_.stages,
                           ": prepare it, so that the processes with the others take part."));
    }
    // One process: all layers are one stage, wherever the model is.
    detail::pipeline::RunnerPlace place;
    const auto all = parameters();
    if (!all.empty()) place.device = all.front().device();
    runner_ = std::make_shared<StageRunner>(*this, place);
  }
  return *runner_;
}

std::int64_t PipelineImpl::_bytes_sent() { return runner().bytes_sent(); }

void PipelineImpl::_prepare(std::shared_ptr<StageRunner> runner, Steps steps) {
  if (runner) runner_ = std::move(runner);
  steps_ = std::move(steps);
}

namespace {

void check_loss(const PipelineLoss& loss) {
  if (loss) return;
  throw StateError("This pipeline was made without a loss: it gives outputs only.");
}

}  // namespace

at::Tensor PipelineImpl::forward(const at::Tensor& input, const at::Tensor& target) {
  return forward(PipelineTensors{input}, PipelineTensors{target});
}

at::Tensor PipelineImpl::forward(const PipelineTensors& inputs, const PipelineTensors& targets) {
  if (is_training()) return train_step(inputs, targets);
  check_loss(loss_);
  return runner().evaluate(inputs, targets);
}

at::Tensor PipelineImpl::forward(const at::Tensor& input) {
  // The last batch of an evaluation may be small.
  const auto rows = input.dim() == 0 ? 1 : std::max<std::int64_t>(input.size(0), 1);
  const auto outputs =
      _infer({input}, std::min(options_.num_micro_batches, rows), /*everywhere=*/false);
  return outputs.empty() ? at::Tensor() : detail::pipeline::only_tensor(outputs);
}

PipelineTensors PipelineImpl::_infer(const PipelineTensors& inputs, std::int64_t parts,
                                     bool everywhere) {
  return runner().infer(inputs, parts, everywhere);
}

at::Tensor PipelineImpl::forward_backward(const PipelineTensors& inputs,
                                          const PipelineTensors& targets) {
  check_loss(loss_);
  auto loss = runner().train(inputs, targets);
  if (steps_.averaged) steps_.averaged();
  return loss;
}

at::Tensor PipelineImpl::train_step(const PipelineTensors& inputs, const PipelineTensors& targets) {
  if (!steps_.step) {
    throw StateError(
        "A training step of a pipeline steps the optimizers that were prepared with it. Prepare "
        "the pipeline, or call forward_backward and step yourself.");
  }
  steps_.zero_grad();
  auto loss = forward_backward(inputs, targets);
  if (options_.max_grad_norm) grad_norm_ = steps_.clip(*options_.max_grad_norm);
  steps_.step();
  steps_.zero_grad();
  return loss;
}

void PipelineImpl::train(bool on) {
  torch::nn::Module::train(on);
  model_->train(on);
}

std::vector<std::vector<std::string>> PipelineImpl::stages() const {
  std::vector<std::vector<std::string>> names;
  const auto layers = [&](detail::pipeline::LayerRange range) {
    auto& stage = names.emplace_back();
    for (auto i = range.begin; i < range.end; ++i) stage.push_back(layers_[i].name);
  };
  if (!runner_) {
    layers({0, layers_.size()});
  } else {
    for (const auto& range : runner_->plan().stages) layers(range);
  }
  return names;
}

bool PipelineImpl::is_first_stage() const { return !runner_ || runner_->plan().rank == 0; }

bool PipelineImpl::is_last_stage() const {
  return !runner_ || runner_->plan().rank == runner_->plan().shape.ranks - 1;
}

}  // namespace accelerate
