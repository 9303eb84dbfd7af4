// accelerate/kwargs.h - handlers, configurations and plugins that an `Accelerator` takes.
//
//     Accelerator accelerator({.kwargs_handlers = {GradScalerKwargs{.init_scale = 1024.0},
//                                                  InitProcessGroupKwargs{.timeout = 20min}}});
//
// Field names and their order are Python's. accelerate/kwargs/options.h says how fields that are
// left out get their values and how options become a dictionary.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs/fp8_recipes.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/kwargs/plugins.h"
#include "accelerate/value.h"

// Templates of the library take these structs: with GCC that needs visible arguments.
#pragma GCC visibility push(default)

namespace accelerate {

class Profiler;

/// How forward passes run in mixed precision.
struct AutocastKwargs {
  static constexpr std::string_view kOptionsName = "AutocastKwargs";

  /// false makes an island of full precision.
  bool enabled = true;
  /// Keep the converted weights until the outermost scope ends. Unset: LibTorch's choice.
  std::optional<bool> cache_enabled = std::nullopt;

  bool operator==(const AutocastKwargs&) const = default;
};

/// How gradients are reduced between processes.
struct DistributedDataParallelKwargs {
  static constexpr std::string_view kOptionsName = "DistributedDataParallelKwargs";

  std::int64_t dim = 0;
  bool broadcast_buffers = true;
  /// In units of 1024 * 1024 bytes.
  std::int64_t bucket_cap_mb = 25;
  /// Accept parameters that the loss does not reach.
  bool find_unused_parameters = false;
  bool check_reduction = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  /// How gradients are compressed on the way; not part of `to_kwargs`, as the next two.
  DDPCommunicationHookType comm_hook = DDPCommunicationHookType::kNo;
  /// Casts to 16 bits around the hook: no, fp16 or bf16. Does nothing without a hook.
  DDPCommunicationHookType comm_wrapper = DDPCommunicationHookType::kNo;
  /// For the PowerSGD hooks: matrix_approximation_rank, start_powerSGD_iter, min_compression_rate,
  /// use_error_feedback, warm_start, orthogonalization_epsilon, random_seed,
  /// compression_stats_logging_frequency, batch_tensors_with_same_shape.
  Value::Dict comm_state_option = {};

  bool operator==(const DistributedDataParallelKwargs&) const = default;
};

/// How the loss is scaled in float16.
struct GradScalerKwargs {
  static constexpr std::string_view kOptionsName = "GradScalerKwargs";

  double init_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  bool enabled = true;

  bool operator==(const GradScalerKwargs&) const = default;
};

/// How the processes find each other.
struct InitProcessGroupKwargs {
  static constexpr std::string_view kOptionsName = "InitProcessGroupKwargs";

  /// Unset, it counts as "nccl" for the timeout and forces nothing.
  std::optional<std::string> backend = std::nullopt;
  std::optional<std::string> init_method = std::nullopt;
  /// Unset: 600 s for NCCL, 1800 s for the others.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;

  bool operator==(const InitProcessGroupKwargs&) const = default;
};

/// Which steps a profiler records: after `skip_first` steps, cycles of `wait` idle, `warmup`
/// discarded and `active` recorded ones; `repeat` cycles, 0 for no end.
struct ProfileSchedule {
  std::int64_t wait = 0;
  std::int64_t warmup = 0;
  std::int64_t active = 1;
  std::int64_t repeat = 0;
  std::int64_t skip_first = 0;

  bool operator==(const ProfileSchedule&) const = default;
};

/// What a profiler records.
struct ProfileKwargs {
  static constexpr std::string_view kOptionsName = "ProfileKwargs";

  /// Unset: all that this machine has.
  std::optional<std::vector<ProfilerActivity>> activities = std::nullopt;
  std::optional<ProfileSchedule> schedule_option = std::nullopt;
  Callback<void(Profiler&)> on_trace_ready = {};
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_stack = false;
  bool with_flops = false;
  bool with_modules = false;
  /// Where each process writes a Chrome trace, profile_<process_index>.json. Unset: no file.
  std::optional<std::filesystem::path> output_trace_dir = std::nullopt;

  bool operator==(const ProfileKwargs&) const = default;
};

/// How data loaders cut batches and deal them out to processes.
struct DataLoaderConfiguration {
  static constexpr std::string_view kOptionsName = "DataLoaderConfiguration";

  /// Cut each batch into one part per process, instead of giving each process whole batches.
  bool split_batches = false;
  /// Read on the main process and send the others their part. Unset: for iterable datasets only.
  std::optional<bool> dispatch_batches = std::nullopt;
  /// Repeat samples from the start so that all processes see equally many batches.
  bool even_batches = true;
  bool use_seedable_sampler = false;
  /// The seed of the seedable sampler. Unset: the default seed of Torch.
  std::optional<std::int64_t> data_seed = std::nullopt;
  bool non_blocking = false;
  bool use_stateful_dataloader = false;
  /// The dataset of each process already holds its part alone: nothing is dealt out.
  bool already_sharded = false;

  bool operator==(const DataLoaderConfiguration&) const = default;
};

/// Where a run keeps its files. `resolved` lets `logging_dir` follow `project_dir`.
struct ACCELERATE_API ProjectConfiguration {
  static constexpr std::string_view kOptionsName = "ProjectConfiguration";

  std::optional<std::filesystem::path> project_dir = std::nullopt;
  std::optional<std::filesystem::path> logging_dir = std::nullopt;
  /// `save_state` writes to checkpoints/checkpoint_<iteration> below the project.
  bool automatic_checkpoint_naming = false;
  /// How many of those to keep. Unset: all.
  std::optional<std::int64_t> total_limit = std::nullopt;
  std::int64_t iteration = 0;
  bool save_on_each_node = false;
  /// Save the state when the scheduler of the cluster asks this run to stop.
  bool save_on_preemption = false;
  /// Record what `accelerate monitor` shows, in monitor/ of `logging_dir` (without one, of the
  /// working folder). ACCELERATE_MONITOR goes before it.
  bool monitor = false;

  /// Sets `project_dir`, and `logging_dir` where it is unset.
  void set_directories(const std::optional<std::filesystem::path>& directory = std::nullopt);

  bool operator==(const ProjectConfiguration&) const = default;
};

/// A handler for `kwargs_handlers`; one of each kind at most.
using KwargsHandler = std::variant<AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs,
                                   InitProcessGroupKwargs, ProfileKwargs, AORecipeKwargs,
                                   TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs>;

/// Validates each handler. Throws `ConfigError` naming the kind that comes twice.
ACCELERATE_API void validate(const std::vector<KwargsHandler>& handlers,
                             const Environment& environment = Environment::process());

/// The handler of one kind, or null.
template <OptionsStruct T>
[[nodiscard]] const T* find_handler(const std::vector<KwargsHandler>& handlers) {
  for (const auto& handler : handlers) {
    if (const auto* found = std::get_if<T>(&handler)) return found;
  }
  return nullptr;
}

}  // namespace accelerate

#pragma GCC visibility pop
