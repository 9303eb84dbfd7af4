// Handlers and configurations: what their fields mean and which values fit together.
#include "accelerate/kwargs.h"

#include <algorithm>
#include <array>

#include "accelerate/constants.h"
#include "core/record.h"

namespace accelerate {
namespace detail {
namespace {

using namespace std::chrono_literals;

struct PowerSgdOption {
  std::string_view name;
  std::string_view wanted;
  bool (*fits)(const Value&);
};

bool is_truth(const Value& value) { return value.is_bool(); }
bool is_whole(const Value& value) { return value.is_int(); }
bool is_number(const Value& value) { return value.is_int() || value.is_double(); }

const std::array kPowerSgdOptions{
    PowerSgdOption{"matrix_approximation_rank", "a whole number", is_whole},
    PowerSgdOption{"start_powerSGD_iter", "a whole number", is_whole},
    PowerSgdOption{"min_compression_rate", "a number", is_number},
    PowerSgdOption{"use_error_feedback", "true or false", is_truth},
    PowerSgdOption{"warm_start", "true or false", is_truth},
    PowerSgdOption{"orthogonalization_epsilon", "a number", is_number},
    PowerSgdOption{"random_seed", "a whole number", is_whole},
    PowerSgdOption{"compression_stats_logging_frequency", "a whole number", is_whole},
    PowerSgdOption{"batch_tensors_with_same_shape", "true or false", is_truth}};

[[noreturn]] void refuse_power_sgd_option(const std::string& name) {
  std::vector<std::string> known;
  for (const auto& option : kPowerSgdOptions) known.emplace_back(option.name);
  const auto near = nearest(name, known);
  throw ConfigError(str("comm_state_option has the unknown key '", name, "'. Known are: ",
                        join(known), ".", near.empty() ? "" : str(" Did you mean '", near, "'?")));
}

void check_power_sgd_options(const Value::Dict& options) {
  for (const auto& [key, value] : options) {
    const auto name = key.to_string();
    const auto known = std::ranges::find(kPowerSgdOptions, name, &PowerSgdOption::name);
    if (known == kPowerSgdOptions.end()) refuse_power_sgd_option(name);
    if (!known->fits(value)) {
      throw ConfigError(str("comm_state_option has ", name, " = ", value.repr(), ", which is not ",
                            known->wanted, "."));
    }
  }
  const auto truth = [&](std::string_view key) { return options.get(key, true).as_bool(); };
  const auto start = options.get("start_powerSGD_iter", 1000).as_int();
  if (start <= 1 && (truth("use_error_feedback") || truth("warm_start"))) {
    throw ConfigError(str("comm_state_option has start_powerSGD_iter = ", start, ", but error ",
                          "feedback and warm start need plain steps first. Set it to at least 2, ",
                          "or turn use_error_feedback and warm_start off."));
  }
}

}  // namespace

template <>
struct RecordTraits<AutocastKwargs> {
  using T = AutocastKwargs;
  static auto fields() {
    return std::tuple{field("enabled", &T::enabled), field("cache_enabled", &T::cache_enabled)};
  }
};

template <>
struct RecordTraits<DistributedDataParallelKwargs> {
  using T = DistributedDataParallelKwargs;
  static auto fields() {
    return std::tuple{field("dim", &T::dim),
                      field("broadcast_buffers", &T::broadcast_buffers),
                      field("bucket_cap_mb", &T::bucket_cap_mb),
                      field("find_unused_parameters", &T::find_unused_parameters),
                      field("check_reduction", &T::check_reduction),
                      field("gradient_as_bucket_view", &T::gradient_as_bucket_view),
                      field("static_graph", &T::static_graph),
                      field("comm_hook", &T::comm_hook).hidden(),
                      field("comm_wrapper", &T::comm_wrapper).hidden(),
                      field("comm_state_option", &T::comm_state_option).hidden()};
  }
  static void finish(T& record, const T&, const Environment&, Warnings& warnings) {
    using Hook = DDPCommunicationHookType;
    require_at_least(0, "bucket_cap_mb", record.bucket_cap_mb);
    if (record.comm_wrapper == Hook::kPowerSgd || record.comm_wrapper == Hook::kBatchedPowerSgd) {
      throw ConfigError(str("comm_wrapper is '", record.comm_wrapper,
                            "', which cannot wrap a hook. Choose one of: no, fp16, bf16."));
    }
    if (record.comm_hook == Hook::kNo && record.comm_wrapper != Hook::kNo) {
      warnings.push_back(
          str("comm_wrapper = ", record.comm_wrapper, " does nothing without a comm_hook."));
    }
    if (record.comm_hook == Hook::kPowerSgd || record.comm_hook == Hook::kBatchedPowerSgd) {
      check_power_sgd_options(record.comm_state_option);
    } else if (!record.comm_state_option.empty()) {
      warnings.push_back(str("comm_state_option has no effect with comm_hook = ", record.comm_hook,
                             "; it is for power_sgd and batched_power_sgd."));
    }
  }
};

template <>
struct RecordTraits<GradScalerKwargs> {
  using T = GradScalerKwargs;
  static auto fields() {
    return std::tuple{field("init_scale", &T::init_scale),
                      field("growth_factor", &T::growth_factor),
                      field("backoff_factor", &T::backoff_factor),
                      field("growth_interval", &T::growth_interval), field("enabled", &T::enabled)};
  }
  static void finish(T& record, const T&, const Environment&, Warnings&) {
    if (!record.enabled) return;
    if (record.growth_factor <= 1.0) {
      throw ConfigError(
          str("growth_factor is ", record.growth_factor, ", but it must be above 1."));
    }
    if (record.backoff_factor >= 1.0) {
      throw ConfigError(
          str("backoff_factor is ", record.backoff_factor, ", but it must be below 1."));
    }
  }
};

template <>
struct RecordTraits<InitProcessGroupKwargs> {
  using T = InitProcessGroupKwargs;
  static auto fields() {
    return std::tuple{field("backend", &T::backend), field("init_method", &T::init_method),
                      field("timeout", &T::timeout)};
  }
  static void finish(T& record, const T&, const Environment&, Warnings&) {
    if (!record.backend) record.backend = "nccl";
    if (!record.timeout) record.timeout = *record.backend == "nccl" ? 600s : 1800s;
    if (*record.timeout <= 0ms) {
      throw ConfigError(
          str("timeout is ", record.timeout->count(), " ms, but it must be positive."));
    }
  }
};

template <>
struct RecordTraits<ProfileSchedule> {
  using T = ProfileSchedule;
  static auto fields() {
    return std::tuple{field("wait", &T::wait), field("warmup", &T::warmup),
                      field("active", &T::active), field("repeat", &T::repeat),
                      field("skip_first", &T::skip_first)};
  }
};

template <>
struct RecordTraits<ProfileKwargs> {
  using T = ProfileKwargs;
  static auto fields() {
    return std::tuple{field("activities", &T::activities),
                      field("schedule_option", &T::schedule_option),
                      field("on_trace_ready", &T::on_trace_ready),
                      field("record_shapes", &T::record_shapes),
                      field("profile_memory", &T::profile_memory),
                      field("with_stack", &T::with_stack),
                      field("with_flops", &T::with_flops),
                      field("with_modules", &T::with_modules),
                      field("output_trace_dir", &T::output_trace_dir)};
  }
  static void finish(T& record, const T&, const Environment&, Warnings& warnings) {
    if (!record.schedule_option) return;
    const auto& schedule = *record.schedule_option;
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
};

template <>
struct RecordTraits<DataLoaderConfiguration> {
  using T = DataLoaderConfiguration;
  static auto fields() {
    return std::tuple{field("split_batches", &T::split_batches),
                      field("dispatch_batches", &T::dispatch_batches),
                      field("even_batches", &T::even_batches),
                      field("use_seedable_sampler", &T::use_seedable_sampler),
                      field("data_seed", &T::data_seed),
                      field("non_blocking", &T::non_blocking),
                      field("use_stateful_dataloader", &T::use_stateful_dataloader),
                      field("already_sharded", &T::already_sharded)};
  }
};

template <>
struct RecordTraits<ProjectConfiguration> {
  using T = ProjectConfiguration;
  static auto fields() {
    return std::tuple{field("project_dir", &T::project_dir),
                      field("logging_dir", &T::logging_dir),
                      field("automatic_checkpoint_naming", &T::automatic_checkpoint_naming),
                      field("total_limit", &T::total_limit),
                      field("iteration", &T::iteration),
                      field("save_on_each_node", &T::save_on_each_node),
                      field("save_on_preemption", &T::save_on_preemption)};
  }
  static void finish(T& record, const T&, const Environment&, Warnings&) {
    record.set_directories(record.project_dir);
    if (record.total_limit) require_at_least(1, "total_limit", *record.total_limit);
    require_at_least(0, "iteration", record.iteration);
  }
};

template <>
struct RecordTraits<GradientAccumulationPlugin> {
  using T = GradientAccumulationPlugin;
  static auto fields() {
    return std::tuple{field("num_steps", &T::num_steps),
                      field("adjust_scheduler", &T::adjust_scheduler),
                      field("sync_with_dataloader", &T::sync_with_dataloader),
                      field("sync_each_batch", &T::sync_each_batch)};
  }
  static void finish(T& record, const T&, const Environment&, Warnings&) {
    if (record.num_steps) require_at_least(1, "num_steps", *record.num_steps);
    // Parity: Python's default is true, but it never reaches the scheduler.
    if (!record.adjust_scheduler) record.adjust_scheduler = false;
  }
};

template <>
struct RecordTraits<TorchDynamoPlugin> {
  using T = TorchDynamoPlugin;
  static auto fields() {
    const std::string prefix = "ACCELERATE_DYNAMO_";
    return std::tuple{
        field("backend", &T::backend, prefix + "BACKEND", DynamoBackend::kNo).lowered(),
        field("mode", &T::mode, prefix + "MODE", "default"),
        field("fullgraph", &T::fullgraph, prefix + "USE_FULLGRAPH", false),
        field("dynamic", &T::dynamic, prefix + "USE_DYNAMIC"),
        field("options", &T::options),
        field("disable", &T::disable),
        field("use_regional_compilation", &T::use_regional_compilation,
              prefix + "USE_REGIONAL_COMPILATION", false)
            .not_passed()};
  }
  static void finish(T& record, const T&, const Environment&, Warnings&) {
    std::vector<std::string> modes(kTorchDynamoModes.begin(), kTorchDynamoModes.end());
    // Torch takes it; Python's list of choices has not caught up.
    modes.emplace_back("max-autotune-no-cudagraphs");
    require_one_of(modes, "mode", *record.mode);
  }
};

template <>
struct RecordTraits<BnbQuantizationConfig> {
  using T = BnbQuantizationConfig;
  static constexpr bool kIncompleteByDefault = true;
  static auto fields() {
    return std::tuple{field("load_in_8bit", &T::load_in_8bit),
                      field("llm_int8_threshold", &T::llm_int8_threshold),
                      field("load_in_4bit", &T::load_in_4bit),
                      field("bnb_4bit_quant_type", &T::bnb_4bit_quant_type),
                      field("bnb_4bit_use_double_quant", &T::bnb_4bit_use_double_quant),
                      field("bnb_4bit_compute_dtype", &T::bnb_4bit_compute_dtype),
                      field("torch_dtype", &T::torch_dtype),
                      field("skip_modules", &T::skip_modules),
                      field("keep_in_fp32_modules", &T::keep_in_fp32_modules)};
  }
  static void finish(T& record, const T&, const Environment&, Warnings& warnings) {
    if (record.load_in_4bit == record.load_in_8bit) {
      throw ConfigError(str("load_in_4bit and load_in_8bit are both ", record.load_in_4bit,
                            ". Set one of them to true."));
    }
    require_one_of({"fp4", "nf4"}, "bnb_4bit_quant_type", record.bnb_4bit_quant_type);
    if (record.load_in_4bit && record.llm_int8_threshold != 6.0) {
      warnings.emplace_back("llm_int8_threshold has no effect on a model in 4 bits.");
    }
    if (!record.torch_dtype) {
      record.torch_dtype = record.load_in_8bit ? FloatType::kFp16 : record.bnb_4bit_compute_dtype;
    }
  }
};

}  // namespace detail

ACCELERATE_RECORD(AutocastKwargs);
ACCELERATE_RECORD(DistributedDataParallelKwargs);
ACCELERATE_RECORD(GradScalerKwargs);
ACCELERATE_RECORD(InitProcessGroupKwargs);
ACCELERATE_RECORD(ProfileKwargs);
ACCELERATE_RECORD(DataLoaderConfiguration);
ACCELERATE_RECORD(ProjectConfiguration);
ACCELERATE_RECORD(GradientAccumulationPlugin);
ACCELERATE_RECORD(TorchDynamoPlugin);
ACCELERATE_RECORD(BnbQuantizationConfig);

void ProjectConfiguration::set_directories(const std::optional<std::filesystem::path>& directory) {
  project_dir = directory;
  if (!logging_dir) logging_dir = directory;
}

}  // namespace accelerate
