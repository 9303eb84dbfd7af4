// src/state/random_states.h - the random states of a process as one object with a state.
#pragma once

#include <cstdint>

#include "accelerate/state/stateful.h"

namespace accelerate::detail::state {

/// The entries of Python's random_states_{rank}.pkl: `step`, `random_state` (of `host_rng`),
/// `numpy_random_seed` (of `numpy_rng`), `torch_manual_seed`, and with a GPU
/// `torch_cuda_manual_seed`, one per device.
class RandomStates final : public Stateful {
 public:
  /// `step` counts the batches of gradient accumulation, and must outlive this.
  explicit RandomStates(std::int64_t& step) : step_(step) {}

  [[nodiscard]] Value state_dict() override;
  /// Entries that are missing, or of devices that are not here, are left out. Throws
  /// `ArgumentError` for an entry of another form.
  void load_state_dict(const Value& state) override;

 private:
  std::int64_t& step_;
  // Numbers that Python's generators have drawn ahead; they come in pairs.
  Value host_gauss_ = nullptr;
  Value numpy_has_gauss_ = 0;
  Value numpy_gauss_ = 0.0;
};

}  // namespace accelerate::detail::state
