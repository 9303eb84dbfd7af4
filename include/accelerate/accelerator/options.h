// accelerate/accelerator/options.h - how an `Accelerator` is made.
//
// Part of accelerate/accelerator.h. Fields have Python's names and order; what is left out comes
// from the variables that `accelerate launch` sets, then from its default.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/enums.h"
#include "accelerate/kwargs.h"
#include "accelerate/parallelism_config.h"
#include "accelerate/state/partial_state_options.h"
#include "accelerate/tracking.h"

namespace accelerate {

struct AcceleratorOptions {
  /// Whether `prepare` moves models and optimizer states, and loaders their batches, to the device.
  bool device_placement = true;
  /// The same as `dataloader_config.split_batches`.
  std::optional<bool> split_batches = std::nullopt;
  /// Unset: ACCELERATE_MIXED_PRECISION, else `kNo`. fp16 on the CPU computes in float32.
  std::optional<PrecisionType> mixed_precision = std::nullopt;
  /// Unset: those of an earlier accelerator of this process, else 1.
  /// ACCELERATE_GRADIENT_ACCUMULATION_STEPS goes before it, unless the plugin is given.
  std::optional<std::int64_t> gradient_accumulation_steps = std::nullopt;
  /// Stay on the CPU; ACCELERATE_USE_CPU says the same.
  bool cpu = false;
  DataLoaderConfiguration dataloader_config = {};
  std::optional<DeepSpeedPlugin> deepspeed_plugin = std::nullopt;
  std::optional<FullyShardedDataParallelPlugin> fsdp_plugin = std::nullopt;
  std::optional<TorchTensorParallelPlugin> torch_tp_plugin = std::nullopt;
  std::optional<MegatronLMPlugin> megatron_lm_plugin = std::nullopt;
  /// Which random states all processes take from process 0 before each pass over a loader.
  std::vector<RNGType> rng_types = {RNGType::kGenerator};
  /// Trackers by `LoggerType`, by name or as objects (accelerate/tracking.h); `init_trackers`
  /// starts them. `kAll`: all that are available.
  std::vector<TrackerChoice> log_with = {};
  std::optional<std::filesystem::path> project_dir = std::nullopt;
  std::optional<ProjectConfiguration> project_config = std::nullopt;
  /// In place of `gradient_accumulation_steps`.
  std::optional<GradientAccumulationPlugin> gradient_accumulation_plugin = std::nullopt;
  /// Whether schedulers step only where the optimizer did; false: whenever they are told to.
  bool step_scheduler_with_optimizer = true;
  /// One of each kind at most.
  std::vector<KwargsHandler> kwargs_handlers = {};
  std::optional<DynamoBackend> dynamo_backend = std::nullopt;
  /// In place of `dynamo_backend`.
  std::optional<TorchDynamoPlugin> dynamo_plugin = std::nullopt;
  /// In place of `deepspeed_plugin`, by name; the first one is active.
  std::vector<std::pair<std::string, DeepSpeedPlugin>> deepspeed_plugins = {};
  std::optional<ParallelismConfig> parallelism_config = std::nullopt;

  /// Ours. Whether one optimizer step is as many scheduler steps as there are processes, Python's
  /// rule for schedules that were written for one process.
  bool step_scheduler_per_process = true;
  /// Ours. A group that the host program has made and keeps.
  Lent<c10d::ProcessGroup> process_group = {};
  /// Ours. Steps from one comparison of some parameters across processes to the next; parameters
  /// that differ are a `CommError` in `backward`. 0 turns it off, and with it the checks of what
  /// prepared optimizers step. ACCELERATE_DRIFT_CHECK goes before it.
  std::int64_t drift_check = 1;
};

}  // namespace accelerate
