// src/optim/scheduler_core.h - the shared part of all handles to a prepared scheduler.
#pragma once

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
  /// The number of steps that one call makes.
  int steps_per_call = 1;
  /// Whether calls after the end of a schedule of fixed length are ignored instead of an error.
  bool ends_quietly = true;
  GradientState gradient_state = {};
};

}  // namespace accelerate::detail::optim
