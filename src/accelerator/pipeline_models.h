// src/accelerator/pipeline_models.h - what `prepare` makes of a `Pipeline`.
#pragma once

#include "accelerator/accelerator_core.h"
#include "optim/scheduler_core.h"

namespace accelerate::detail::accelerator {

[[nodiscard]] bool is_pipeline(const torch::nn::Module& module);

// With MegatronLMPlugin, `model(x, y)` does everything: the program's `backward`, `step` and
// `zero_grad` do nothing.
[[nodiscard]] bool steps_by_megatron(const AcceleratorCore& core);
/// Throws `UnsupportedError` for a model that is no pipeline, if Megatron-LM is to train it.
void refuse_without_pipeline(const AcceleratorCore& core);
/// Throws `ArgumentError` for an optimizer or a scheduler that Megatron-LM does not take.
void follow_megatron(const AcceleratorCore& core, optim::OptimizerCore& optimizer);
void follow_megatron(const AcceleratorCore& core, optim::SchedulerCore& scheduler);

/// Collective. Gives the pipeline its stages on this process and, in a run of several processes,
/// the engine that trains it. Throws `UnsupportedError` for what does not go with a pipeline.
void prepare_pipeline(AcceleratorCore& core, ModelCore& model);

}  // namespace accelerate::detail::accelerator
