// src/pipeline/own_stages.h - pipelines of which each process has built its own stage only.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>

#include "accelerate/parallel/pipeline.h"
#include "pipeline/stage_messages.h"

namespace accelerate::detail::pipeline {

/// Registers a tensor under a dotted name, with modules in between that hold nothing else.
void put(torch::nn::Module& root, const std::string& name, const at::Tensor& tensor,
         bool is_parameter);

/// Collective. Tells the processes of a pipeline of the parameters and buffers of each other's
/// stages: those of other stages are registered without memory, so that the pipeline has the names
/// of the whole model. Each stage becomes one layer. Throws `ArgumentError` on all processes if
/// stages are missing or come twice, and for a name that two stages have.
void join_stages(PipelineImpl& pipeline, const StageMessages::GroupHandle& group);

/// Collective. Adds the parameters of other stages to the groups of an optimizer, in the order of
/// the stages, so that its state has the numbers of the whole model. Throws `ArgumentError` on all
/// processes if they have different numbers of groups.
void join_groups(torch::optim::Optimizer& optimizer, const PipelineImpl& pipeline,
                 const StageMessages::GroupHandle& group);

}  // namespace accelerate::detail::pipeline
