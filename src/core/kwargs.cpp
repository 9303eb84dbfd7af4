// Handlers and configurations: what their fields mean and which values fit together.
#include "accelerate/kwargs.h"

#include "accelerate/constants.h"
#include "core/options.h"
#include "core/power_sgd_options.h"

namespace accelerate {

using namespace detail;
using namespace std::chrono_literals;

static ACCELERATE_VALUE_FIELDS(AutocastKwargs, enabled, cache_enabled);

static auto value_fields(std::type_identity<DistributedDataParallelKwargs>) {
  using T = DistributedDataParallelKwargs;
  return std::tuple_cat(
      ACCELERATE_FIELDS(T, dim, broadcast_buffers, bucket_cap_mb, find_unused_parameters,
                        check_reduction, gradient_as_bucket_view, static_graph),
      std::tuple{option("comm_hook", &T::comm_hook, "", OptionRule::kHidden),
                 option("comm_wrapper", &T::comm_wrapper, "", OptionRule::kHidden),
                 option("comm_state_option", &T::comm_state_option, "", OptionRule::kHidden)});
}
static void finish(DistributedDataParallelKwargs& options, const DistributedDataParallelKwargs&,
                   const Environment&, Warnings& warnings) {
  using Hook = DDPCommunicationHookType;
  require_at_least(0, "bucket_cap_mb", options.bucket_cap_mb);
  if (options.comm_wrapper == Hook::kPowerSgd || options.comm_wrapper == Hook::kBatchedPowerSgd) {
    throw ConfigError(str("comm_wrapper is '", options.comm_wrapper,
                          "', which cannot wrap a hook. Choose one of: no, fp16, bf16."));
  }
  if (options.comm_hook == Hook::kNo && options.comm_wrapper != Hook::kNo) {
    warnings.push_back(
        str("comm_wrapper = ", options.comm_wrapper, " does nothing without a comm_hook."));
  }
  if (options.comm_hook == Hook::kPowerSgd || options.comm_hook == Hook::kBatchedPowerSgd) {
    static_cast<void>(PowerSgdOptions::of(options.comm_state_option));
  } else if (!options.comm_state_option.empty()) {
    warnings.push_back(str("comm_state_option has no effect with comm_hook = ", options.comm_hook,
                           "; it is for power_sgd and batched_power_sgd."));
  }
}

static ACCELERATE_VALUE_FIELDS(GradScalerKwargs, init_scale, growth_factor, backoff_factor,
                               growth_interval, enabled);
static void finish(GradScalerKwargs& options, const GradScalerKwargs&, const Environment&,
                   Warnings&) {
  if (!options.enabled) return;
  if (options.growth_factor <= 1.0) {
    throw ConfigError(str("growth_factor is ", options.growth_factor, ", but it must be above 1."));
  }
  if (options.backoff_factor >= 1.0) {
    throw ConfigError(
        str("backoff_factor is ", options.backoff_factor, ", but it must be below 1."));
  }
}

static ACCELERATE_VALUE_FIELDS(InitProcessGroupKwargs, backend, init_method, timeout);
static void finish(InitProcessGroupKwargs& options, const InitProcessGroupKwargs&,
                   const Environment&, Warnings&) {
  if (!options.backend) options.backend = "nccl";
  if (!options.timeout) options.timeout = *options.backend == "nccl" ? 600s : 1800s;
  if (*options.timeout <= 0ms) {
    throw ConfigError(
        str("timeout is ", options.timeout->count(), " ms, but it must be positive."));
  }
}

static ACCELERATE_VALUE_FIELDS(ProfileSchedule, wait, warmup, active, repeat, skip_first);

static ACCELERATE_VALUE_FIELDS(ProfileKwargs, activities, schedule_option, on_trace_ready,
                               record_shapes, profile_memory, with_stack, with_flops, with_modules,
                               output_trace_dir);
static void finish(ProfileKwargs& options, const ProfileKwargs&, const Environment&,
                   Warnings& warnings) {
  if (!options.schedule_option) return;
  const auto& schedule = *options.schedule_option;
  require_at_least(0, "schedule_option.wait", schedule.wait);
  require_at_least(0, "schedule_option.warmup", schedule.warmup);
  require_at_least(1, "schedule_option.active", schedule.active);
  require_at_least(0, "schedule_option.repeat", schedule.repeat);
  require_at_least(0, "schedule_option.skip_first", schedule.skip_first);
  if (schedule.warmup == 0) {
    warnings.emplace_back(
        "schedule_option.warmup is 0: the first recorded steps include the start of the "
        "profiler itself.");
  }
}

static ACCELERATE_VALUE_FIELDS(DataLoaderConfiguration, split_batches, dispatch_batches,
                               even_batches, use_seedable_sampler, data_seed, non_blocking,
                               use_stateful_dataloader, already_sharded);

static ACCELERATE_VALUE_FIELDS(ProjectConfiguration, project_dir, logging_dir,
                               automatic_checkpoint_naming, total_limit, iteration,
                               save_on_each_node, save_on_preemption, monitor);
static void finish(ProjectConfiguration& options, const ProjectConfiguration&,
                   const Environment& environment, Warnings&) {
  options.monitor = environment.flag("ACCELERATE_MONITOR", options.monitor);
  options.set_directories(options.project_dir);
  if (options.total_limit) require_at_least(1, "total_limit", *options.total_limit);
  require_at_least(0, "iteration", options.iteration);
}

static ACCELERATE_VALUE_FIELDS(GradientAccumulationPlugin, num_steps, adjust_scheduler,
                               sync_with_dataloader, sync_each_batch);
static GradientAccumulationPlugin option_defaults(std::type_identity<GradientAccumulationPlugin>) {
  // Parity: Python's default is true, but it never reaches the scheduler.
  return {.adjust_scheduler = false};
}
static void finish(GradientAccumulationPlugin& options, const GradientAccumulationPlugin&,
                   const Environment&, Warnings&) {
  if (options.num_steps) require_at_least(1, "num_steps", *options.num_steps);
}

static auto value_fields(std::type_identity<TorchDynamoPlugin>) {
  using T = TorchDynamoPlugin;
  const std::string prefix = "ACCELERATE_DYNAMO_";
  return std::tuple{option("backend", &T::backend, prefix + "BACKEND", OptionRule::kLowerCase),
                    option("mode", &T::mode, prefix + "MODE"),
                    option("fullgraph", &T::fullgraph, prefix + "USE_FULLGRAPH"),
                    option("dynamic", &T::dynamic, prefix + "USE_DYNAMIC"),
                    option("options", &T::options, ""),
                    option("disable", &T::disable, ""),
                    option("use_regional_compilation", &T::use_regional_compilation,
                           prefix + "USE_REGIONAL_COMPILATION", OptionRule::kDictOnly)};
}
static TorchDynamoPlugin option_defaults(std::type_identity<TorchDynamoPlugin>) {
  return {.backend = DynamoBackend::kNo,
          .mode = "default",
          .fullgraph = false,
          .use_regional_compilation = false};
}
static void finish(TorchDynamoPlugin& options, const TorchDynamoPlugin&, const Environment&,
                   Warnings&) {
  std::vector<std::string> modes(kTorchDynamoModes.begin(), kTorchDynamoModes.end());
  // Torch takes it; Python's list of choices has not caught up.
  modes.emplace_back("max-autotune-no-cudagraphs");
  require_one_of(modes, "mode", *options.mode);
}

static ACCELERATE_VALUE_FIELDS(BnbQuantizationConfig, load_in_8bit, llm_int8_threshold,
                               load_in_4bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant,
                               bnb_4bit_compute_dtype, torch_dtype, skip_modules,
                               keep_in_fp32_modules);
static void finish(BnbQuantizationConfig& options, const BnbQuantizationConfig&, const Environment&,
                   Warnings& warnings) {
  if (options.load_in_4bit == options.load_in_8bit) {
    throw ConfigError(str("load_in_4bit and load_in_8bit are both ", options.load_in_4bit,
                          ". Set one of them to true."));
  }
  require_one_of({"fp4", "nf4"}, "bnb_4bit_quant_type", options.bnb_4bit_quant_type);
  if (!(options.llm_int8_threshold >= 0)) {
    throw ConfigError(str("llm_int8_threshold is ", options.llm_int8_threshold,
                          ". Set it to 0, for no outliers, or to a magnitude."));
  }
  if (options.load_in_4bit && options.llm_int8_threshold != 6.0) {
    warnings.emplace_back("llm_int8_threshold has no effect on a model in 4 bits.");
  }
  if (!options.torch_dtype) {
    options.torch_dtype = options.load_in_8bit ? FloatType::kFp16 : options.bnb_4bit_compute_dtype;
  }
}

ACCELERATE_OPTIONS(AutocastKwargs);
ACCELERATE_OPTIONS(DistributedDataParallelKwargs);
ACCELERATE_OPTIONS(GradScalerKwargs);
ACCELERATE_OPTIONS(InitProcessGroupKwargs);
ACCELERATE_OPTIONS(ProfileKwargs);
ACCELERATE_OPTIONS(DataLoaderConfiguration);
ACCELERATE_OPTIONS(ProjectConfiguration);
ACCELERATE_OPTIONS(GradientAccumulationPlugin);
ACCELERATE_OPTIONS(TorchDynamoPlugin);
ACCELERATE_OPTIONS(BnbQuantizationConfig);

void ProjectConfiguration::set_directories(const std::optional<std::filesystem::path>& directory) {
  project_dir = directory;
  if (!logging_dir) logging_dir = directory;
}

}  // namespace accelerate
