// src/training/scheduler_core.h - what the copies of a prepared scheduler share.
#pragma once

#include <memory>
#include <vector>

#include "accelerate/accelerated_scheduler.h"
#include "accelerate/gradient_state.h"
#include "training/optimizer_core.h"

namespace accelerate::detail {

struct SchedulerCore {
  SchedulerParts parts;
  /// Those whose steps it follows.
  std::vector<std::shared_ptr<OptimizerCore>> optimizers = {};
  bool step_with_optimizer = true;
  /// How many steps one call stands for.
  int steps_per_call = 1;
  /// Whether a schedule of fixed length is left alone once it is over, or runs into its error.
  bool ends_quietly = true;
  GradientState gradient_state = {};
};

}  // namespace accelerate::detail
