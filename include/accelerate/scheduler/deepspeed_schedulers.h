// accelerate/scheduler/deepspeed_schedulers.h - the schedulers that DeepSpeed configurations name.
//
//     WarmupDecayLR schedule(optimizer, {.total_num_steps = 1000, .warmup_num_steps = 100});
//
// Part of accelerate/scheduler.h. Options have DeepSpeed's names and defaults; `warmup_type` is
// "log" or "linear". Before the first step the learning rate is the lowest one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "accelerate/scheduler/lr_schedulers.h"
#include "accelerate/value/fields.h"

namespace accelerate {

#pragma GCC visibility push(default)

struct WarmupLROptions {
  double warmup_min_lr = 0.0;
  double warmup_max_lr = 0.001;
  std::int64_t warmup_num_steps = 1000;
  std::string warmup_type = "log";
  std::int64_t last_epoch = -1;
};

struct WarmupDecayLROptions {
  /// Must be set.
  std::int64_t total_num_steps = 0;
  double warmup_min_lr = 0.0;
  double warmup_max_lr = 0.001;
  std::int64_t warmup_num_steps = 1000;
  std::string warmup_type = "log";
  std::int64_t last_epoch = -1;
};

struct WarmupCosineLROptions {
  /// Must be set.
  std::int64_t total_num_steps = 0;
  /// Factors on the initial learning rate.
  double warmup_min_ratio = 0.0;
  std::int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 0.0001;
  std::string warmup_type = "log";
  std::int64_t last_epoch = -1;
};

struct LRRangeTestOptions {
  double lr_range_test_min_lr = 1e-3;
  std::int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;
  std::int64_t last_epoch = -1;
};

struct OneCycleOptions {
  /// Must be set.
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0.0;
  std::int64_t cycle_first_step_size = 2000;
  /// Unset: as many as the first.
  std::optional<std::int64_t> cycle_second_step_size = std::nullopt;
  std::int64_t decay_step_size = 0;
  /// The first of `betas` falls while the learning rate rises; without effect on optimizers that
  /// have none.
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0.0;
  std::int64_t last_epoch = -1;
};

ACCELERATE_VALUE_FIELDS(WarmupLROptions, warmup_min_lr, warmup_max_lr, warmup_num_steps,
                        warmup_type);
ACCELERATE_VALUE_FIELDS(WarmupDecayLROptions, total_num_steps, warmup_min_lr, warmup_max_lr,
                        warmup_num_steps, warmup_type);
ACCELERATE_VALUE_FIELDS(WarmupCosineLROptions, total_num_steps, warmup_min_ratio, warmup_num_steps,
                        cos_min_ratio, warmup_type);
ACCELERATE_VALUE_FIELDS(LRRangeTestOptions, lr_range_test_min_lr, lr_range_test_step_size,
                        lr_range_test_step_rate, lr_range_test_staircase);
ACCELERATE_VALUE_FIELDS(OneCycleOptions, cycle_min_lr, cycle_max_lr, decay_lr_rate,
                        cycle_first_step_size, cycle_second_step_size, decay_step_size,
                        cycle_momentum, cycle_min_mom, cycle_max_mom, decay_mom_rate);

#pragma GCC visibility pop

/// Rises to `warmup_max_lr` in `warmup_num_steps` steps and keeps it.
using WarmupLR = FormulaLR<WarmupLROptions>;
/// Rises, then falls linearly to 0 at `total_num_steps`.
using WarmupDecayLR = FormulaLR<WarmupDecayLROptions>;
/// Rises, then falls as a cosine to `cos_min_ratio` at `total_num_steps`.
using WarmupCosineLR = FormulaLR<WarmupCosineLROptions>;
/// Rises by `lr_range_test_step_rate` every `lr_range_test_step_size` steps, to find a good rate.
using LRRangeTest = FormulaLR<LRRangeTestOptions>;
/// Rises and falls once, then decays.
using OneCycle = FormulaLR<OneCycleOptions>;

extern template class FormulaLR<WarmupLROptions>;
extern template class FormulaLR<WarmupDecayLROptions>;
extern template class FormulaLR<WarmupCosineLROptions>;
extern template class FormulaLR<LRRangeTestOptions>;
extern template class FormulaLR<OneCycleOptions>;

}  // namespace accelerate
