// src/optim/scheduler_core.h - the shared part of all handles to a prepared scheduler.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "accelerate/scheduler/accelerated_scheduler.h"
#include "accelerate/state/gradient_state.h"
#include "optim/optimizer_core.h"

namespace accelerate::detail::optim {

struct SchedulerCore {
  SchedulerParts parts;
  /// The optimizers whose steps it follows.
  std::vector<std::shared_ptr<OptimizerCore>> optimizers = {};
  bool step_with_optimizer = true;
  /// `backward` steps it, with DeepSpeed: the program's calls do nothing.
  bool stepped_in_backward = false;
  /// The number of steps that one call makes.
  int steps_per_call = 1;
  /// Whether calls after the end of a schedule of fixed length are ignored instead of an error.
  bool ends_quietly = true;
  GradientState gradient_state = {};
  /// Called before the first step; empty for nothing.
  std::function<void()> before_first_step = {};
};

/// While it lives the steps of schedulers in this thread are those of a prepared one.
class PreparedStep {
 public:
  PreparedStep() noexcept;
  ~PreparedStep();
  PreparedStep(const PreparedStep&) = delete;
  PreparedStep& operator=(const PreparedStep&) = delete;

  [[nodiscard]] static bool runs() noexcept;
};

}  // namespace accelerate::detail::optim
