// src/core/deepspeed_auto.h - the last round of "auto": what `prepare` knows fills a DeepSpeed
// configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/deepspeed_plugin.h"
#include "core/resolve.h"

namespace accelerate::detail::inline core {

enum class GivenObject : std::uint8_t {
  kNone,
  kReal,
  kDummy  // DummyOptim, DummyScheduler: the configuration has the real one
};

/// What one call of `prepare` was given.
struct DeepSpeedObjects {
  /// What a global batch is divided by.
  [[nodiscard]] std::int64_t data_parallel_size() const {
    return num_processes / processes_per_batch;
  }

  /// The batch size of each data loader; nullopt if it has none.
  std::vector<std::optional<std::int64_t>> batch_sizes = {};
  bool split_batches = false;
  std::int64_t num_processes = 1;
  /// Processes that read the same batch: those of the dimensions tp, cp and sp.
  std::int64_t processes_per_batch = 1;
  /// Of the accelerator.
  std::int64_t gradient_accumulation_steps = 1;
  bool has_model = false;
  /// Of the model; nullopt if it does not tell any.
  std::optional<std::vector<std::int64_t>> hidden_sizes = std::nullopt;

  GivenObject optimizer = GivenObject::kNone;
  /// Of a `DummyOptim`.
  double lr = 0.001;
  double weight_decay = 0;

  GivenObject scheduler = GivenObject::kNone;
  // Of a `DummyScheduler`.
  bool has_scheduler_callable = false;
  double scheduler_lr = 0.001;
  std::int64_t warmup_num_steps = 0;
  std::optional<std::int64_t> total_num_steps = std::nullopt;
};

/// Fills the "auto" entries of a resolved plugin and returns the gradient accumulation steps of the
/// run. Throws `ConfigError` for an "auto" without a value, and for an optimizer or scheduler that
/// is given twice or not at all. Without a model only the batch sizes and the steps are looked at.
ACCELERATE_API std::int64_t fill_deepspeed_config(DeepSpeedPlugin& plugin,
                                                  const DeepSpeedObjects& objects,
                                                  Warnings& warnings);

/// The part of it that looks at the optimizer and the scheduler.
ACCELERATE_API void check_optimizer_and_scheduler(const DeepSpeedPlugin& plugin,
                                                  const DeepSpeedObjects& objects);

}  // namespace accelerate::detail::inline core
