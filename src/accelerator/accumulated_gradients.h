// src/accelerator/accumulated_gradients.h - what each process has for itself: gradients of batches
// that no step has applied yet, and buffers.
#pragma once

#include <filesystem>

#include "accelerate/state/stateful.h"
#include "accelerator/registry.h"

namespace accelerate::detail::accelerator {

/// The file of each process is accumulated_gradients_{rank}.bin. It exists only if the checkpoint
/// was taken between two batches of one step.
class AccumulatedGradients final : public Stateful {
 public:
  AccumulatedGradients(const ObjectRegistry& registry, bool accumulating)
      : registry_(registry), accumulating_(accumulating) {}

  /// Names of models and parameters, and their gradients; empty unless batches are accumulated.
  [[nodiscard]] Value state_dict() override;
  /// Sets the gradients of all parameters; those that `state` does not name get none.
  void load_state_dict(const Value& state) override;

 private:
  const ObjectRegistry& registry_;
  bool accumulating_;
};

/// The entry of this process in the state of a run.
[[nodiscard]] StateEntry gradients_entry(const ObjectRegistry& registry, bool accumulating);

/// What process `rank` of `num_processes` has to load from a checkpoint of `saved_by` processes:
/// its own file or, if there were more or fewer processes, or models were cut in another way, the
/// average of all files.
[[nodiscard]] Value gradients_in(const std::filesystem::path& folder,
                                 const ObjectRegistry& registry, int rank, int num_processes,
                                 std::int64_t saved_by);

/// The buffers of models that several processes train, in buffers_{rank}.bin. Those of process 0
/// are in the file of the model and replace the others before the next step, but until then a
/// process computes with its own (running means of batch norm).
class LocalBuffers final : public Stateful {
 public:
  LocalBuffers(const ObjectRegistry& registry, bool saves) : registry_(registry), saves_(saves) {}

  [[nodiscard]] Value state_dict() override;
  void load_state_dict(const Value& state) override;

 private:
  const ObjectRegistry& registry_;
  bool saves_;
};

/// The entry of a process: empty for process 0.
[[nodiscard]] StateEntry buffers_entry(const ObjectRegistry& registry, int rank);

}  // namespace accelerate::detail::accelerator
