// src/accelerator/batch_count.h - which batches of `accumulate` end a step.
#pragma once

#include "accelerator/accelerator_core.h"

namespace accelerate::detail::accelerator {

/// Where the count stands.
struct BatchCount {
  std::int64_t step = 0;
  bool sync_gradients = true;
};

[[nodiscard]] inline BatchCount current_count(const AcceleratorCore& core) {
  return {.step = core.step, .sync_gradients = core.gradient_state.sync_gradients()};
}
/// After one more batch.
[[nodiscard]] inline BatchCount next_count(const AcceleratorCore& core) {
  const auto& state = core.gradient_state;
  if (state.sync_with_dataloader() && state.end_of_dataloader()) {
    return {.step = 0, .sync_gradients = true};
  }
  const auto step = core.step + 1;
  return {.step = step, .sync_gradients = step % core.num_steps() == 0};
}
inline void set_count(AcceleratorCore& core, const BatchCount& count) {
  core.step = count.step;
  core.gradient_state._set_sync_gradients(count.sync_gradients);
}

}  // namespace accelerate::detail::accelerator
