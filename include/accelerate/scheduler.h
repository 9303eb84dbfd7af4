// accelerate/scheduler.h - learning-rate schedulers with PyTorch's names and numbers.
//
//     auto schedule = CosineAnnealingLR(optimizer, {.t_max = 100});
//     for (...) {
//       ...
//       optimizer.step();
//       schedule.step();
//     }
#pragma once

#include <cstdint>

#include "accelerate/api.h"
#include "accelerate/scheduler/accelerated_scheduler.h"
#include "accelerate/scheduler/cycle_schedulers.h"
#include "accelerate/scheduler/deepspeed_schedulers.h"
#include "accelerate/scheduler/lambda_schedulers.h"
#include "accelerate/scheduler/lr_scheduler.h"
#include "accelerate/scheduler/lr_schedulers.h"
#include "accelerate/scheduler/reduce_lr_on_plateau.h"
#include "accelerate/scheduler/scheduler_chains.h"

namespace accelerate {

// The schedules of the transformers library that programs of Accelerate use most.

/// The constant initial learning rate.
[[nodiscard]] ACCELERATE_API LambdaLR get_constant_schedule(torch::optim::Optimizer& optimizer,
                                                            std::int64_t last_epoch = -1);

/// Rises linearly from 0 to the initial learning rate and keeps it.
[[nodiscard]] ACCELERATE_API LambdaLR
get_constant_schedule_with_warmup(torch::optim::Optimizer& optimizer, std::int64_t num_warmup_steps,
                                  std::int64_t last_epoch = -1);

/// Rises linearly from 0 to the initial learning rate and falls linearly to 0 at
/// `num_training_steps`.
[[nodiscard]] ACCELERATE_API LambdaLR
get_linear_schedule_with_warmup(torch::optim::Optimizer& optimizer, std::int64_t num_warmup_steps,
                                std::int64_t num_training_steps, std::int64_t last_epoch = -1);

/// Rises linearly from 0 to the initial learning rate and falls as a cosine to 0 at
/// `num_training_steps`; `num_cycles` is the number of cosine periods, 0.5 being one fall.
[[nodiscard]] ACCELERATE_API LambdaLR get_cosine_schedule_with_warmup(
    torch::optim::Optimizer& optimizer, std::int64_t num_warmup_steps,
    std::int64_t num_training_steps, double num_cycles = 0.5, std::int64_t last_epoch = -1);

}  // namespace accelerate
