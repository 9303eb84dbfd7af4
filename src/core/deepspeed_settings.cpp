#include "core/deepspeed_settings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/value/fields.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

using S = DeepSpeedSettings;

/// The keys that mean something here.
constexpr std::tuple kKnown{
    field("train_batch_size", &S::train_batch_size),
    field("train_micro_batch_size_per_gpu", &S::micro_batch_size),
    field("gradient_accumulation_steps", &S::accumulation_steps),
    field("gradient_clipping", &S::gradient_clipping),
    field("fp16.enabled", &S::fp16),
    field("fp16.auto_cast", &S::fp16_auto_cast),
    field("fp16.loss_scale", &S::loss_scale),
    field("fp16.initial_scale_power", &S::initial_scale_power),
    field("fp16.loss_scale_window", &S::loss_scale_window),
    field("fp16.hysteresis", &S::hysteresis),
    field("fp16.consecutive_hysteresis", &S::consecutive_hysteresis),
    field("fp16.min_loss_scale", &S::min_loss_scale),
    field("bf16.enabled", &S::bf16),
    field("bf16.check_grad_overflow", &S::check_grad_overflow),
    field("zero_optimization.stage", &S::stage),
    field("zero_optimization.reduce_bucket_size", &S::reduce_bucket_size),
    field("zero_optimization.allgather_bucket_size", &S::allgather_bucket_size),
    field("zero_optimization.overlap_comm", &S::overlap_comm),
    field("zero_optimization.contiguous_gradients", &S::contiguous_gradients),
    field("zero_optimization.reduce_scatter", &S::reduce_scatter),
    field("zero_optimization.stage3_prefetch_bucket_size", &S::prefetch_bucket_size),
    field("zero_optimization.stage3_param_persistence_threshold", &S::param_persistence_threshold),
    field("zero_optimization.stage3_max_live_parameters", &S::max_live_parameters),
    field("zero_optimization.stage3_max_reuse_distance", &S::max_reuse_distance),
    field("zero_optimization.sub_group_size", &S::sub_group_size),
    field("zero_optimization.stage3_gather_16bit_weights_on_model_save", &S::gather_16bit_weights),
    field("zero_optimization.ignore_unused_parameters", &S::ignore_unused_parameters),
    field("zero_optimization.round_robin_gradients", &S::round_robin_gradients),
    field("zero_optimization.allgather_partitions", &S::allgather_partitions),
    field("zero_optimization.legacy_stage1", &S::legacy_stage1),
    field("zero_optimization.stage3_model_persistence_threshold", &S::model_persistence_threshold),
    field("zero_optimization.memory_efficient_linear", &S::memory_efficient_linear),
    field("zero_optimization.elastic_checkpoint", &S::elastic_checkpoint),
    field("zero_optimization.load_from_fp32_weights", &S::load_from_fp32_weights),
    field("zero_optimization.zero_hpz_partition_size", &S::hpz_partition_size),
    field("zero_optimization.mics_shard_size", &S::mics_shard_size),
    field("zero_optimization.offload_optimizer.device", &S::optimizer_device),
    field("zero_optimization.offload_optimizer.nvme_path", &S::optimizer_path),
    field("zero_optimization.offload_optimizer.pin_memory", &S::optimizer_pin_memory),
    field("zero_optimization.offload_optimizer.buffer_count", &S::optimizer_buffer_count),
    field("zero_optimization.offload_optimizer.pipeline_read", &S::optimizer_pipeline_read),
    field("zero_optimization.offload_optimizer.pipeline_write", &S::optimizer_pipeline_write),
    field("zero_optimization.offload_optimizer.ratio", &S::optimizer_ratio),
    field("zero_optimization.offload_param.device", &S::param_device),
    field("zero_optimization.offload_param.nvme_path", &S::param_path),
    field("zero_optimization.offload_param.pin_memory", &S::param_pin_memory),
    field("zero_optimization.offload_param.buffer_count", &S::param_buffer_count),
    field("zero_optimization.offload_param.buffer_size", &S::param_buffer_size),
    field("zero_optimization.offload_param.max_in_cpu", &S::param_max_in_cpu),
    field("aio", &S::aio),
    field("optimizer.type", &S::optimizer_type),
    field("optimizer.params", &S::optimizer_params),
    field("scheduler.type", &S::scheduler_type),
    field("scheduler.params", &S::scheduler_params),
    field("communication_data_type", &S::communication_data_type),
    field("seq_parallel_communication_data_type", &S::seq_parallel_communication_data_type),
    field("prescale_gradients", &S::prescale_gradients),
    field("gradient_predivide_factor", &S::gradient_predivide_factor),
    field("zero_allow_untested_optimizer", &S::allow_untested_optimizer),
    field("zero_force_ds_cpu_optimizer", &S::force_cpu_optimizer),
    field("steps_per_print", &S::steps_per_print),
    field("dump_state", &S::dump_state),
    field("wall_clock_breakdown", &S::wall_clock_breakdown),
    field("tensor_parallel.autotp_size", &S::autotp_size)};

/// What a known key becomes here, where that is not what DeepSpeed does with it.
struct Emulation {
  std::string_view key;
  std::string_view becomes;
};
constexpr std::string_view kNoEffect = "it has no effect on results here";
constexpr std::string_view kByPrefetchBucket =
    "it has no effect here: modules are gathered together by stage3_prefetch_bucket_size";
constexpr std::string_view kForNvme =
    "it has no effect here: the files of nvme are mapped, and the kernel reads ahead and writes "
    "behind";
constexpr auto kEmulated = std::to_array<Emulation>({
    {"zero_optimization.reduce_bucket_size", "modules up to this size are reduced together"},
    {"zero_optimization.allgather_bucket_size",
     "modules are gathered as they are reduced, by reduce_bucket_size"},
    {"zero_optimization.stage3_prefetch_bucket_size",
     "modules up to this size are gathered together"},
    {"zero_optimization.stage3_param_persistence_threshold",
     "parameters with fewer elements stay gathered"},
    {"zero_optimization.stage3_max_live_parameters",
     "no module is gathered ahead of its use if two of the largest exceed it"},
    {"zero_optimization.stage3_max_reuse_distance", kNoEffect},
    {"zero_optimization.zero_hpz_partition_size", "it is the number of processes of a shard group"},
    {"zero_optimization.mics_shard_size", "it is the number of processes of a shard group"},
    {"zero_optimization.round_robin_gradients", kNoEffect},
    {"zero_optimization.allgather_partitions", kNoEffect},
    {"zero_optimization.legacy_stage1", kNoEffect},
    {"zero_optimization.stage3_model_persistence_threshold",
     "parameters stay gathered by their own size alone"},
    {"zero_optimization.memory_efficient_linear", kNoEffect},
    {"zero_optimization.elastic_checkpoint",
     "checkpoints load with any number of processes all the same"},
    {"zero_optimization.sub_group_size",
     "it has no effect here: what is offloaded steps as a whole, and the files of nvme are mapped"},
    {"aio", kForNvme},
    {"zero_optimization.offload_optimizer.buffer_count", kForNvme},
    {"zero_optimization.offload_optimizer.pipeline_read", kForNvme},
    {"zero_optimization.offload_optimizer.pipeline_write", kForNvme},
    {"zero_optimization.offload_param.buffer_count", kForNvme},
    {"zero_optimization.offload_param.buffer_size", kForNvme},
    {"zero_optimization.offload_param.max_in_cpu", kForNvme},
    {"zero_optimization.offload_optimizer.fast_init", kForNvme},
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kNoEffect},
    {"zero_optimization.mics_hierarchical_params_gather", kNoEffect},
    {"zero_optimization.module_granularity_threshold", kByPrefetchBucket},
    {"zero_optimization.stage3_module_granularity_threshold", kByPrefetchBucket},
    {"zero_optimization.log_trace_cache_warnings",
     "it has no effect here: processes that gather in different orders are told of in any case"},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kNoEffect},
    {"zero_optimization.enable_sanity_checks",
     "it has no effect here: processes that stray are named in any case"},
    {"bf16.immediate_grad_update", kNoEffect},
    {"disable_allgather", kNoEffect},
    {"pipeline", "it has no effect: stages are those of an accelerate::Pipeline"},
    {"seq_parallel_communication_data_type", "it has no effect without sequence parallelism"},
    {"wall_clock_breakdown",
     "it prints nothing here; `accelerate monitor` shows the times of steps"},
});

/// Switches whose other position DeepSpeed has for speed alone.
struct FixedSwitch {
  std::string_view key;
  bool S::* member;
  std::string_view instead;
};
constexpr auto kFixed = std::to_array<FixedSwitch>({
    {"zero_optimization.contiguous_gradients", &S::contiguous_gradients,
     "gradients are copied into one buffer all the same"},
    {"zero_optimization.reduce_scatter", &S::reduce_scatter,
     "each process gets its part of the mean all the same, which is that of an all-reduce"},
    {"zero_optimization.load_from_fp32_weights", &S::load_from_fp32_weights,
     "masters are loaded in float32 all the same"},
});

/// Keys and sections of DeepSpeed that have no counterpart, and what to use instead; their values
/// that ask for nothing pass.
struct Refused {
  std::string_view key;
  std::string_view instead;
};
constexpr std::string_view kPackage =
    "it is part of the DeepSpeed package, which is not used here. Remove it, or set it to false";
constexpr std::string_view kPrecision =
    "types are those of the bf16 and fp16 sections. Set bf16.enabled or fp16.enabled";
constexpr std::string_view kCommunication =
    "what is sent is not compressed in blocks. Set communication_data_type to a type of 16 bits";
constexpr std::string_view kOffload =
    "Adam steps on the host by offload_optimizer alone. Set offload_optimizer.device to cpu";
constexpr std::string_view kProfile =
    "times and operations are shown by accelerator.profile(), and by `accelerate monitor`";
constexpr std::string_view kTrackers =
    "values are logged by the accelerator. Set log_with of AcceleratorOptions, and call "
    "init_trackers and log";
constexpr std::string_view kMasters =
    "masters are float32. For states of half the size use offload_optimizer";
constexpr std::string_view kLoader = "batches are those of the data loader. Set drop_last there";
constexpr std::string_view kData =
    "batches are those of the data loader. Give it a sampler that chooses them";
constexpr auto kRefused = std::to_array<Refused>({
    {"zero_optimization.zero_quantized_weights", kCommunication},
    {"zero_optimization.zero_quantized_gradients", kCommunication},
    {"zero_optimization.zero_quantized_nontrainable_weights", kCommunication},
    {"zero_optimization.zeropp_loco_param", kCommunication},
    {"zero_optimization.zenflow", kOffload},
    {"zero_optimization.super_offload", kOffload},
    {"zero_optimization.offload_optimizer.super_offload", kOffload},
    {"zero_optimization.cpu_offload",
     "it has become offload_optimizer. Set offload_optimizer to "
     "{\"device\": \"cpu\"}"},
    {"zero_optimization.cpu_offload_param",
     "it has become offload_param. Set offload_param to {\"device\": \"cpu\"} with stage 3"},
    {"zero_optimization.cpu_offload_use_pin_memory",
     "it has become pin_memory of offload_optimizer and offload_param"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save",
     "it has become stage3_gather_16bit_weights_on_model_save"},
    {"fp16.fp16_master_weights_and_grads", kMasters},
    {"amp", kPrecision},
    {"torch_autocast", kPrecision},
    {"data_types",
     "gradients are added up in the type of the masters. Set "
     "communication_data_type for what they are reduced in"},
    {"sparse_gradients",
     "a sharded model has no sparse gradients. Make its Embedding with sparse(false), or train it "
     "by data parallelism"},
    {"sparse_attention",
     "attention is the model's own. Call at::scaled_dot_product_attention with a mask"},
    {"activation_checkpointing",
     "blocks are computed again where the model says it. Call activation_checkpoint() around them"},
    {"tensorboard", kTrackers},
    {"wandb", kTrackers},
    {"comet", kTrackers},
    {"csv_monitor", kTrackers},
    {"comms_logger", kProfile},
    {"flops_profiler", kProfile},
    {"checkpoint",
     "any stage and number of processes loads a checkpoint by load_state. Give "
     "save_state a folder of its own for each"},
    {"nebula", "checkpoints are written in the background by save_state with asynchronous = true"},
    {"memory_breakdown", kProfile},
    {"dataloader_drop_last", kLoader},
    {"hybrid_engine",
     "a model generates as it is. Call its forward under NoGradGuard, and gathered_parameters for "
     "code that reads weights"},
    {"compile",
     "models are not compiled. accelerator.capture() replays the steps of a GPU without the "
     "host"},
    {"bf16.bf16_master_weights_and_grads", kMasters},
    {"bf16.bf16_optimizer_states", kMasters},
    {"data_efficiency", kData},
    {"curriculum_learning", kData},
    {"progressive_layer_drop",
     "layers are dropped by the model. Skip them in its forward, on all processes alike"},
    {"compression_training",
     "weights are compressed by load_and_quantize_model, or by mixed_precision fp8"},
    {"elasticity",
     "a run goes on with another number of processes by load_state. Use `accelerate "
     "launch --max_restarts`"},
    {"autotuning",
     "nothing is tried out. Set the sizes of buckets; accelerator.profile() shows "
     "the times"},
    {"msamp",
     "MS-AMP is a Python package that is no longer maintained. Use fp8 with AO "
     "(AORecipeKwargs)"},
    {"moe",
     "experts are layers of the model. Name their classes in transformer_moe_cls_names of "
     "the plugin"},
    {"eigenvalue", kPackage},
    {"zenflow", kOffload},
    {"super_offload", kOffload},
});

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  for (const auto& refused : kRefused) keys.emplace_back(refused.key);
  for (const auto& emulated : kEmulated) keys.emplace_back(emulated.key);
  std::apply([&](const auto&... fields) { (keys.emplace_back(fields.name), ...); }, kKnown);
  std::ranges::sort(keys);
  const auto again = std::ranges::unique(keys);
  keys.erase(again.begin(), again.end());
  return keys;
}

bool is_known(std::string_view key) {
  return std::ranges::find(kEmulated, key, &Emulation::key) != kEmulated.end() ||
         std::apply([&](const auto&... fields) { return ((fields.name == key) || ...); }, kKnown);
}

/// A section can be there and be off, or ask for nothing.
bool is_on(const Value& entry) {
  if (entry.is_none()) return false;
  if (entry.is_bool()) return entry.as_bool();
  if (!entry.is_dict()) return true;
  const auto& section = entry.as_dict();
  if (const Value* enabled = section.get("enabled"); enabled != nullptr && enabled->is_bool()) {
    return enabled->as_bool();
  }
  for (const auto& [name, value] : section) {
    if (is_on(value)) return true;
  }
  return false;
}

[[noreturn]] void refuse(const Refused& refused) {
  throw UnsupportedError(str("'", refused.key,
                             "' in the DeepSpeed configuration is not supported: ", refused.instead,
                             "."));
}

void check_section(const Value::Dict& section, const std::string& prefix) {
  for (const auto& [name, value] : section) {
    const std::string key = prefix + name.to_string();
    if (is_known(key)) continue;
    const auto refused = std::ranges::find(kRefused, std::string_view(key), &Refused::key);
    if (refused != kRefused.end()) {
      if (is_on(value)) refuse(*refused);
      continue;
    }
    const auto keys = all_keys();
    const bool is_section = std::ranges::any_of(
        keys, [&](const std::string& one) { return one.starts_with(key + "."); });
    if (!is_section) {
      throw ConfigError(str("'", key, "' in the DeepSpeed configuration is not known here.",
                            did_you_mean(key, keys), " Remove it, or correct its name."));
    }
    if (value.is_dict()) {
      check_section(value.as_dict(), key + ".");
    } else if (!value.is_none()) {
      throw ConfigError(str("'", key, "' in the DeepSpeed configuration is ", value.repr(),
                            ", but must be a section: {...}."));
    }
  }
}

[[noreturn]] void refuse_kind(std::string_view key, const Value& value, std::string_view wanted) {
  throw ConfigError(str("'", key, "' in the DeepSpeed configuration is ", value.repr(),
                        ", but must be ", wanted, "."));
}

void read(std::string_view key, const Value& value, bool& member) {
  const auto text = value.is_string() ? to_lower(value.as_string()) : "";
  if (!value.is_bool() && text != "true" && text != "false") {
    refuse_kind(key, value, "true or false");
  }
  member = value.is_bool() ? value.as_bool() : text == "true";
}

void read(std::string_view key, const Value& value, double& member) {
  if (!value.is_int() && !value.is_double()) refuse_kind(key, value, "a number");
  member = value.as_double();
}

/// Whole numbers may be written as 2e8.
void read(std::string_view key, const Value& value, std::int64_t& member) {
  constexpr double kMost = 9e18;
  const bool whole = value.is_int() || (value.is_double() && std::abs(value.as_double()) < kMost &&
                                        std::trunc(value.as_double()) == value.as_double());
  if (!whole) refuse_kind(key, value, "a whole number");
  member = value.is_int() ? value.as_int() : static_cast<std::int64_t>(value.as_double());
}

void read(std::string_view key, const Value& value, std::string& member) {
  if (!value.is_string()) refuse_kind(key, value, "a text");
  member = value.as_string();
}

void read(std::string_view key, const Value& value, Value::Dict& member) {
  if (!value.is_dict()) refuse_kind(key, value, "a section: {...}");
  member = value.as_dict();
}

template <class T>
void read(std::string_view key, const Value& value, std::optional<T>& member) {
  read(key, value, member.emplace());
}

void require(bool valid, std::string_view key, const auto& value, std::string_view range) {
  if (valid) return;
  throw ConfigError(
      str("'", key, "' in the DeepSpeed configuration is ", value, ", but must be ", range, "."));
}

void check_ranges(const S& settings) {
  require(settings.stage >= 0 && settings.stage <= 3, "zero_optimization.stage", settings.stage,
          "0, 1, 2 or 3");
  require(settings.gradient_clipping >= 0, "gradient_clipping", settings.gradient_clipping,
          "0 (no clipping) or more");
  require(settings.hysteresis >= 1, "fp16.hysteresis", settings.hysteresis, "1 or more");
  require(settings.loss_scale_window >= 1, "fp16.loss_scale_window", settings.loss_scale_window,
          "1 or more");
  require(settings.optimizer_ratio == 1, "zero_optimization.offload_optimizer.ratio",
          settings.optimizer_ratio, "1: all of the optimizer is moved");
  require(settings.gradient_predivide_factor > 0, "gradient_predivide_factor",
          settings.gradient_predivide_factor, "more than 0");
  require(settings.ignore_unused_parameters, "zero_optimization.ignore_unused_parameters", "false",
          "true: parameters that a loss does not reach count as zeros");
  require(settings.autotp_size <= 1, "tensor_parallel.autotp_size", settings.autotp_size,
          "0: models are not split by tensor parallelism on their own");
  if (settings.fp16 && settings.bf16) {
    throw ConfigError("The DeepSpeed configuration enables both fp16 and bf16. Choose one.");
  }
}

}  // namespace

void check_deepspeed_keys(const Value::Dict& tree) { check_section(tree, ""); }

DeepSpeedSettings deepspeed_settings(const Value::Dict& tree) {
  check_deepspeed_keys(tree);
  const HfDeepSpeedConfig config(tree);
  DeepSpeedSettings settings;
  for_each_field(settings, kKnown, [&](const auto& known, auto& member) {
    const Value value = config.get_value(known.name);
    if (value.is_none()) return;
    if (value == Value("auto")) {
      throw ConfigError(str("'", known.name, "' is 'auto' in the DeepSpeed configuration, and ",
                            "nothing here tells its value. Set it in the configuration."));
    }
    read(known.name, value, member);
  });
  check_ranges(settings);
  for (const auto& [key, becomes] : kEmulated) {
    if (config.get_value(key).is_none()) continue;
    settings.notes.push_back(str("'", key, "' of the DeepSpeed configuration: ", becomes, "."));
  }
  for (const auto& [key, member, instead] : kFixed) {
    if (settings.*member) continue;
    settings.notes.push_back(
        str("'", key, "' of the DeepSpeed configuration is false: ", instead, "."));
  }
  return settings;
}

void derive_batch_sizes(DeepSpeedSettings& settings, std::int64_t data_parallel_size) {
  auto& train = settings.train_batch_size;
  auto& micro = settings.micro_batch_size;
  auto& steps = settings.accumulation_steps;
  if (!train && !micro) {
    throw ConfigError(
        "The DeepSpeed configuration has neither train_batch_size nor "
        "train_micro_batch_size_per_gpu. Set one of them.");
  }
  if (!micro && !steps) steps = 1;
  if (!train && !steps) steps = 1;
  // A remainder shows in the product below.
  if (!steps) steps = *train / std::max<std::int64_t>(1, *micro * data_parallel_size);
  if (!micro) micro = *train / std::max<std::int64_t>(1, *steps * data_parallel_size);
  if (!train) train = *micro * *steps * data_parallel_size;
  if (*micro >= 1 && *steps >= 1 && *train == *micro * *steps * data_parallel_size) return;
  throw ConfigError(
      str("The batch sizes of the DeepSpeed configuration do not fit: "
          "train_batch_size is ",
          *train, ", but train_micro_batch_size_per_gpu * ",
          "gradient_accumulation_steps * processes is ", *micro, " * ", *steps, " * ",
          data_parallel_size, ". Set one of them to 'auto'."));
}

}  // namespace accelerate::detail::inline core
