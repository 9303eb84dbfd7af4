// src/accelerator/registry.h - what an accelerator has prepared, and what was registered with it.
#pragma once

#include <memory>
#include <vector>

#include "accelerate/detail/accelerator/model_core.h"
#include "accelerate/detail/data/loader_core.h"
#include "accelerate/state/stateful.h"
#include "optim/optimizer_core.h"
#include "optim/scheduler_core.h"

namespace accelerate::detail::checkpoint {
class ShardedState;
}  // namespace accelerate::detail::checkpoint

namespace accelerate::detail::accelerator {

/// The state of a model whose engine shards it, or of an optimizer of one; null for others.
[[nodiscard]] std::shared_ptr<checkpoint::ShardedState> sharded_state_of(const ModelCore& model);
[[nodiscard]] std::shared_ptr<checkpoint::ShardedState> sharded_state_of(
    const std::shared_ptr<optim::OptimizerCore>& optimizer);

/// How the states of objects are loaded.
struct EntryOptions {
  /// Models must find all of their tensors, and no others.
  bool strict = true;
  /// Loaders go on where they were. Else only the order of their samples is restored, for programs
  /// that call `skip_first_batches`.
  bool positions = true;
  /// Loaders have a file for each process beside the common one: what their workers draw, and data
  /// of their own. Off if it was saved by another number of processes.
  bool loaders_per_process = false;
};

/// Each list is in the order of preparation, which numbers the files of a checkpoint.
struct ObjectRegistry {
  std::vector<std::shared_ptr<ModelCore>> models = {};
  std::vector<std::shared_ptr<optim::OptimizerCore>> optimizers = {};
  std::vector<std::shared_ptr<optim::SchedulerCore>> schedulers = {};
  std::vector<std::shared_ptr<data::LoaderCore>> loaders = {};
  /// With float16 on an accelerator.
  std::shared_ptr<optim::LossScaling> scaling = nullptr;
  /// What is saved of it; null for its GradScaler.
  std::shared_ptr<Stateful> scaling_state = nullptr;
  std::shared_ptr<Stateful> random_states = nullptr;
  /// Objects of the program.
  std::vector<std::shared_ptr<Stateful>> custom = {};

  /// Forgets what was prepared. Objects of the program stay, as in Python.
  void forget_prepared();

  /// All of them, in the order in which Python saves them: models, optimizers, schedulers, loaders,
  /// scaler, random states, objects of the program. What saves or inspects a run goes through this.
  [[nodiscard]] std::vector<StateEntry> entries(const EntryOptions& options = {}) const;
};

}  // namespace accelerate::detail::accelerator
