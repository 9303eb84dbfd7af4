// src/accelerator/accelerator_core.h - what an accelerator knows and has prepared.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/accelerator/options.h"
#include "accelerate/detail/data/loader_core.h"
#include "accelerate/state.h"
#include "accelerate/state/device_mesh.h"
#include "accelerator/backward_plan.h"
#include "accelerator/preemption.h"
#include "accelerator/registry.h"
#include "accelerator/run_state.h"
#include "core/fp8_choice.h"
#include "tracking/recorder.h"

namespace accelerate::detail::accelerator {

struct DeepSpeedRun;

struct AcceleratorCore : std::enable_shared_from_this<AcceleratorCore> {
  AcceleratorCore(const AcceleratorOptions& given, AcceleratorState made)
      : options(given), state(std::move(made)) {}

  AcceleratorOptions options;
  AcceleratorState state;
  GradientState gradient_state = {};
  ProjectConfiguration project = {};
  DistributedDataParallelKwargs ddp = {};
  /// Where engines get their process groups from; null with one process. Without a
  /// parallelism_config all processes are in "dp_replicate".
  std::shared_ptr<DeviceMesh> mesh = nullptr;
  /// nullopt if all is computed in full precision.
  std::optional<CastSettings> cast = std::nullopt;
  /// How prepared models multiply in 8 bits; nullopt if they do not.
  std::optional<Fp8Recipe> fp8 = std::nullopt;

  ObjectRegistry registry = {};
  RunState run_state = {};
  /// With `save_on_preemption`, else null.
  std::unique_ptr<Preemption> preemption = nullptr;
  /// With `monitor`, else null.
  std::shared_ptr<tracking::Recorder> recorder = nullptr;
  /// In a run with DeepSpeed that has prepared a model, else null.
  std::shared_ptr<DeepSpeedRun> deepspeed = nullptr;
  /// What is to be done before a preempted program ends; must not throw.
  std::function<void()> before_exit = {};

  /// Batches that `accumulate` has counted.
  std::int64_t step = 0;
  /// With `deepspeed` how many of them a step takes by its configuration; the gradient state has
  /// the number of the accelerator that has prepared last.
  std::optional<std::int64_t> deepspeed_num_steps = std::nullopt;
  [[nodiscard]] std::int64_t num_steps() const {
    return deepspeed_num_steps.value_or(gradient_state.num_steps());
  }
  /// The scope of `join_uneven_inputs` while it runs, else null.
  parallel::JoinScope* join = nullptr;
  BackwardPlan backward = {};
};

/// Collective. Makes the state of the run, or attaches to it.
[[nodiscard]] std::shared_ptr<AcceleratorCore> make_accelerator_core(
    const AcceleratorOptions& options);

}  // namespace accelerate::detail::accelerator
