// src/accelerator/accelerator_core.h - what an accelerator knows and has prepared.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/accelerator_options.h"
#include "accelerate/loader_core.h"
#include "accelerate/prepared_model.h"
#include "accelerate/state.h"
#include "training/optimizer_core.h"
#include "training/scheduler_core.h"

namespace accelerate::detail {

class JoinScope;

/// Which tensor the gradient of a parameter is, and its version.
using GradientMark = std::pair<const void*, std::uint32_t>;

struct AcceleratorCore : std::enable_shared_from_this<AcceleratorCore> {
  AcceleratorCore(const AcceleratorOptions& given, AcceleratorState made)
      : options(given), state(std::move(made)) {}

  AcceleratorOptions options;
  AcceleratorState state;
  GradientState gradient_state = {};
  ProjectConfiguration project = {};
  DistributedDataParallelKwargs ddp = {};
  /// Nothing where all is computed in full precision.
  std::optional<CastSettings> cast = std::nullopt;
  /// With float16 on an accelerator.
  std::shared_ptr<LossScaling> scaling = nullptr;

  // In the order of preparation, which numbers the files of a checkpoint.
  std::vector<std::shared_ptr<ModelCore>> models = {};
  std::vector<std::shared_ptr<OptimizerCore>> optimizers = {};
  std::vector<std::shared_ptr<SchedulerCore>> schedulers = {};
  std::vector<std::shared_ptr<AnyPreparedLoader>> loaders = {};

  /// Batches that `accumulate` has counted.
  std::int64_t step = 0;
  /// While uneven inputs are joined.
  JoinScope* join = nullptr;
  // Of a backward, kept for their memory.
  std::vector<std::shared_ptr<ModelCore>> living = {};
  std::vector<ModelCore*> candidates = {};
  std::vector<ModelCore*> reached = {};
  std::vector<DataParallel*> averaged = {};
  ReachedLeaves leaves = {};
  /// Parameters of models that a loss is not seen to reach, and their gradients before it.
  std::vector<std::pair<at::Tensor, GradientMark>> unseen = {};
};

/// Collective. Makes the state of the run, or attaches to it.
[[nodiscard]] std::shared_ptr<AcceleratorCore> make_accelerator_core(
    const AcceleratorOptions& options);

}  // namespace accelerate::detail
