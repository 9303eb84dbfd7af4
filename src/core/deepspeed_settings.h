// src/core/deepspeed_settings.h - what a DeepSpeed configuration asks for, key by key.
//
// Every key is one of: a field of `DeepSpeedSettings`; refused by name; unknown, which is an error
// too. None is ignored.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "accelerate/api.h"
#include "accelerate/kwargs/deepspeed_plugin.h"
#include "core/resolve.h"

namespace accelerate::detail::inline core {

/// The keys of a configuration with DeepSpeed's defaults.
struct DeepSpeedSettings {
  std::optional<std::int64_t> train_batch_size = std::nullopt;
  std::optional<std::int64_t> micro_batch_size = std::nullopt;
  std::optional<std::int64_t> accumulation_steps = std::nullopt;
  /// 0: no clipping.
  double gradient_clipping = 0;

  bool fp16 = false;
  bool fp16_auto_cast = false;
  /// 0: dynamic.
  double loss_scale = 0;
  std::int64_t initial_scale_power = 16;
  std::int64_t loss_scale_window = 1000;
  std::int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  bool bf16 = false;
  bool check_grad_overflow = false;

  std::int64_t stage = 0;
  std::int64_t reduce_bucket_size = 500'000'000;
  std::int64_t allgather_bucket_size = 500'000'000;
  bool overlap_comm = true;
  bool contiguous_gradients = true;
  bool reduce_scatter = true;
  std::int64_t prefetch_bucket_size = 50'000'000;
  std::int64_t param_persistence_threshold = 100'000;
  std::int64_t max_live_parameters = 1'000'000'000;
  std::int64_t max_reuse_distance = 1'000'000'000;
  std::int64_t sub_group_size = 1'000'000'000;
  bool gather_16bit_weights = false;
  bool ignore_unused_parameters = true;
  bool round_robin_gradients = false;
  bool allgather_partitions = true;
  bool legacy_stage1 = false;
  std::int64_t model_persistence_threshold = std::numeric_limits<std::int64_t>::max();
  bool memory_efficient_linear = true;
  bool elastic_checkpoint = false;
  bool load_from_fp32_weights = true;
  /// Processes of a shard group; 1 and below: all.
  std::int64_t hpz_partition_size = 1;
  std::int64_t mics_shard_size = -1;

  std::string optimizer_device = "none";
  std::optional<std::string> optimizer_path = std::nullopt;
  bool optimizer_pin_memory = false;
  std::int64_t optimizer_buffer_count = 4;
  bool optimizer_pipeline_read = false;
  bool optimizer_pipeline_write = false;
  double optimizer_ratio = 1;
  std::string param_device = "none";
  std::optional<std::string> param_path = std::nullopt;
  bool param_pin_memory = false;
  std::int64_t param_buffer_count = 5;
  std::int64_t param_buffer_size = 100'000'000;
  std::int64_t param_max_in_cpu = 1'000'000'000;

  Value::Dict aio = {};

  std::optional<std::string> optimizer_type = std::nullopt;
  Value::Dict optimizer_params = {};
  std::optional<std::string> scheduler_type = std::nullopt;
  Value::Dict scheduler_params = {};

  std::optional<std::string> communication_data_type = std::nullopt;
  std::optional<std::string> seq_parallel_communication_data_type = std::nullopt;
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1;
  bool allow_untested_optimizer = false;
  bool force_cpu_optimizer = true;
  double steps_per_print = 10;
  bool dump_state = false;
  bool wall_clock_breakdown = false;
  std::int64_t autotp_size = 0;

  /// Lines for the log: keys that are mapped to something else here.
  Warnings notes = {};
};

/// Throws `ConfigError` for a key that DeepSpeed configurations do not have here, with the nearest
/// one, and `UnsupportedError` for one that is refused. "auto" passes.
void check_deepspeed_keys(const Value::Dict& tree);

/// The settings of a tree that `check_deepspeed_keys` accepts. Throws `ConfigError` for a value of
/// a wrong kind or out of range, and for an "auto" that nothing has filled.
[[nodiscard]] ACCELERATE_API DeepSpeedSettings deepspeed_settings(const Value::Dict& tree);

/// Computes the missing ones of the three batch sizes: train = micro * accumulation * processes.
/// Throws `ConfigError` if all are missing or if they contradict each other.
ACCELERATE_API void derive_batch_sizes(DeepSpeedSettings& settings,
                                       std::int64_t data_parallel_size);

}  // namespace accelerate::detail::inline core
