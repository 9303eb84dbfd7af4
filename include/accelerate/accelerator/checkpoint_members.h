// accelerate/accelerator/checkpoint_members.h - the members of `Accelerator` that save and load.
//
// Part of accelerate/accelerator.h; docs/checkpointing.md says what is in a folder, and what holds
// when something goes wrong.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <source_location>
#include <span>
#include <utility>
#include <vector>

#include "accelerate/accelerator/base.h"
#include "accelerate/api.h"
#include "accelerate/checkpoint.h"
#include "accelerate/detail/accelerator/prepare.h"

namespace accelerate {

/// Called by `save_state` on all processes before files are written, with the prepared models,
/// their weights, and the folder in which a hook may write files of its own. Weights that a hook
/// removes are not written; the others are numbered from 0.
using SaveStateHook =
    std::function<void(std::span<const std::shared_ptr<torch::nn::Module>> models,
                       std::vector<StateDict>& weights, const std::filesystem::path& output_dir)>;
/// Called by `load_state` likewise. Models that a hook removes are not loaded.
using LoadStateHook = std::function<void(std::vector<std::shared_ptr<torch::nn::Module>>& models,
                                         const std::filesystem::path& input_dir)>;

/// What registering a hook returns; it may be destroyed.
class RemovableHandle {
 public:
  explicit RemovableHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  /// Takes the hook back; a second call has no effect.
  void remove() {
    if (const auto call = std::exchange(remove_, nullptr)) call();
  }

 private:
  std::function<void()> remove_;
};

class ACCELERATE_API CheckpointMembers : public AcceleratorBase {
 public:
  /// Collective. Saves all that was prepared or registered, the random states, and the position in
  /// the data, and returns the folder. With `automatic_checkpoint_naming` that is the next one of
  /// the project, whatever `output_dir` is. Python loads it.
  ///
  /// With an automatic name either the whole checkpoint is there afterwards, or it throws on all
  /// processes and the ones before are as they were; in a folder that you name `load_state` detects
  /// a mixture. Throws `CheckpointError` where a file cannot be written, `CommError` on the other
  /// processes, `ArgumentError` if there is no folder, or the automatic one exists.
  std::filesystem::path save_state(const std::filesystem::path& output_dir = {},
                                   const SaveStateOptions& options = {},
                                   std::source_location where = std::source_location::current());
  /// Collective. Loads what `save_state` or Python saved, from a folder or, with
  /// `automatic_checkpoint_naming` and no folder, from the newest checkpoint that is complete. To
  /// be called after `prepare`, for the same objects in the same order; the number of processes may
  /// be another one. Returns the folder.
  ///
  /// Throws `ArgumentError` if there is no checkpoint, `CheckpointError` if it is damaged, and what
  /// the objects throw to which their state does not fit; on the other processes `CommError`.
  std::filesystem::path load_state(const std::filesystem::path& input_dir = {},
                                   const LoadStateOptions& options = {},
                                   std::source_location where = std::source_location::current());
  /// Returns when the last asynchronous `save_state` is published, and throws if it failed.
  void wait_for_save_state();
  /// Ours. Collective where it saves. With `save_on_preemption`: if SIGTERM or SIGUSR1 has come to
  /// any process, saves the state of all at the same step and ends the program with exit code 75.
  /// Loops over prepared loaders call this after each batch; a program with data of its own calls
  /// it at the end of a step.
  void check_preemption(std::source_location where = std::source_location::current());
  /// The number of the next automatic name.
  void set_save_iteration(std::int64_t iteration);

  RemovableHandle register_save_state_pre_hook(SaveStateHook hook);
  RemovableHandle register_load_state_pre_hook(LoadStateHook hook);

  /// Registers objects with `state_dict()` and `load_state_dict(state)`
  /// (accelerate/state/stateful.h), and modules, to be saved with the state of the run. They must
  /// outlive the accelerator; one that is given by `std::shared_ptr` is shared. Objects count from
  /// 0 in the order of registration. Throws `ArgumentError` for an empty pointer, and then
  /// registers none of them.
  template <class... Ts>
  void register_for_checkpointing(Ts&&... objects) {
    register_objects({detail::accelerator::stateful_of(std::forward<Ts>(objects))...});
  }

  /// For this library: all that was prepared or registered, in the order in which Python saves it.
  /// Valid as long as the accelerator exists and forgets nothing.
  [[nodiscard]] std::vector<StateEntry> _state_entries() const;

 protected:
  explicit CheckpointMembers(std::shared_ptr<detail::accelerator::AcceleratorCore> core);
  /// Waits for an asynchronous save; what it throws is a warning.
  ~CheckpointMembers();

 private:
  void register_objects(std::vector<std::shared_ptr<Stateful>> objects);
};

}  // namespace accelerate
