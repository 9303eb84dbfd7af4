// accelerate/state/gradient_state.h - when gradients are synchronised, and where the data loader
// stands.
//
// Part of accelerate/state.h. `Accelerator` and the data loaders write it; optimizers, schedulers
// and your loop read it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

/// What a data loader tells the gradient state while it is iterated.
class ACCELERATE_API DataLoaderStateMixin {
 public:
  virtual ~DataLoaderStateMixin();

  /// Whether the batch handed out last is the final one.
  [[nodiscard]] virtual bool end_of_dataloader() const = 0;
  /// How many samples of the final batches of all processes are genuine; -1 if unknown. The others
  /// are repeats. As in Python 0 if all are genuine, but a dispatcher counts them then too.
  [[nodiscard]] virtual std::int64_t remainder() const = 0;
  /// How many samples the final batches of all processes hold, repeats included; -1 when not known.
  [[nodiscard]] virtual std::int64_t padded_size() const { return -1; }
};

/// The process-wide state of gradient accumulation. Copies are handles to the same state.
///
/// Every accessor throws `StateError` after `_reset_state()` until the next construction.
class ACCELERATE_API GradientState {
 public:
  /// Makes the state with one step, or attaches to it.
  GradientState();
  /// Makes it or attaches to it, and takes the plugin's values: also into a state that exists.
  explicit GradientState(const GradientAccumulationPlugin& plugin);

  [[nodiscard]] static bool initialized() noexcept;
  /// Forgets the state, for tests.
  static void _reset_state();

  /// Whether the running step ends in a synchronisation of gradients and an optimizer step.
  [[nodiscard]] bool sync_gradients() const;
  /// Batches per optimizer step.
  [[nodiscard]] std::int64_t num_steps() const;
  /// Throws `ArgumentError` for less than one.
  void set_num_steps(std::int64_t num_steps);
  /// Whether schedulers move on accumulation steps too. Off unless the plugin asked for it.
  [[nodiscard]] bool adjust_scheduler() const;
  /// Whether the end of a data loader ends the accumulation.
  [[nodiscard]] bool sync_with_dataloader() const;
  /// Whether every batch is synchronised, which saves memory and costs time.
  [[nodiscard]] bool sync_each_batch() const;

  /// False and -1 outside of a data loader.
  [[nodiscard]] bool end_of_dataloader() const;
  [[nodiscard]] std::int64_t remainder() const;
  [[nodiscard]] bool in_dataloader() const;
  /// The loader that is iterated innermost, or null.
  [[nodiscard]] std::shared_ptr<DataLoaderStateMixin> active_dataloader() const;
  /// The loaders being iterated, outermost first. Loaders that are gone are left out.
  [[nodiscard]] std::vector<std::shared_ptr<DataLoaderStateMixin>> dataloader_references() const;

  /// Kept for ported programs: set by hand, and true whenever ACCELERATE_USE_FSDP is on.
  [[nodiscard]] bool is_xla_gradients_synced() const;
  void set_is_xla_gradients_synced(bool synced);

  /// For `Accelerator` and the data loaders.
  void _set_sync_gradients(bool sync_gradients);
  void _add_dataloader(std::weak_ptr<DataLoaderStateMixin> loader);
  /// Nothing happens where the loader, or the state, is not there.
  void _remove_dataloader(const std::shared_ptr<DataLoaderStateMixin>& loader) noexcept;
  /// Removes a loader by its address, for a destructor: the last reference is gone by then.
  void _remove_dataloader(const DataLoaderStateMixin* loader) noexcept;
};

/// Four lines: the flags, the remainder, and the plugin values that are not the default.
ACCELERATE_API std::ostream& operator<<(std::ostream& out, const GradientState& state);

}  // namespace accelerate
