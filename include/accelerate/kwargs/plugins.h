// accelerate/kwargs/plugins.h - accumulation, compilation, quantisation and sharding of a run.
//
// Part of accelerate/kwargs.h, with accelerate/kwargs/deepspeed_plugin.h and
// accelerate/kwargs/megatron_plugin.h. accelerate/kwargs/options.h says how fields that are left
// out get their values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs/deepspeed_plugin.h"
#include "accelerate/kwargs/megatron_plugin.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/kwargs/parallelism_handlers.h"
#include "accelerate/value.h"

// Templates of the library take these structs: with GCC that needs visible arguments.
#pragma GCC visibility push(default)

namespace accelerate {

/// How many backward passes share one optimizer step.
struct GradientAccumulationPlugin {
  static constexpr std::string_view kOptionsName = "GradientAccumulationPlugin";

  std::optional<std::int64_t> num_steps = std::nullopt;
  /// Step schedulers on accumulating batches too. Unset: no, which is what Python's default does.
  std::optional<bool> adjust_scheduler = std::nullopt;
  /// Step at the end of the data loader, even with fewer batches than `num_steps`.
  bool sync_with_dataloader = true;
  /// Reduce gradients on every batch: less memory, more communication.
  bool sync_each_batch = false;

  bool operator==(const GradientAccumulationPlugin&) const = default;
};

/// How a model is compiled. Variables begin with ACCELERATE_DYNAMO_.
struct TorchDynamoPlugin {
  static constexpr std::string_view kOptionsName = "TorchDynamoPlugin";

  /// BACKEND, no.
  std::optional<DynamoBackend> backend = std::nullopt;
  /// MODE, default: one of `kTorchDynamoModes`, or max-autotune-no-cudagraphs. Has no effect here.
  std::optional<std::string> mode = std::nullopt;
  /// USE_FULLGRAPH, false. For the backend CUDAGRAPHS, as the next.
  std::optional<bool> fullgraph = std::nullopt;
  /// USE_DYNAMIC, unset.
  std::optional<bool> dynamic = std::nullopt;
  std::optional<Value> options = std::nullopt;
  bool disable = false;
  /// USE_REGIONAL_COMPILATION, false. Not part of `to_kwargs`. Has no effect, with a warning.
  std::optional<bool> use_regional_compilation = std::nullopt;

  bool operator==(const TorchDynamoPlugin&) const = default;
};

/// Weights in 8 or 4 bits.
struct BnbQuantizationConfig {
  static constexpr std::string_view kOptionsName = "BnbQuantizationConfig";

  bool load_in_8bit = false;
  /// Columns with a larger value stay in 16 bits; for 8 bits only.
  double llm_int8_threshold = 6.0;
  bool load_in_4bit = false;
  /// fp4 or nf4.
  std::string bnb_4bit_quant_type = "fp4";
  bool bnb_4bit_use_double_quant = false;
  FloatType bnb_4bit_compute_dtype = FloatType::kFp16;
  /// The type of all other weights. Unset: fp16 for 8 bits, the compute type for 4 bits.
  std::optional<FloatType> torch_dtype = std::nullopt;
  std::optional<std::vector<std::string>> skip_modules = std::nullopt;
  std::optional<std::vector<std::string>> keep_in_fp32_modules = std::nullopt;

  /// "int4" or "int8": what the weights become.
  [[nodiscard]] std::string target_dtype() const { return load_in_4bit ? "int4" : "int8"; }

  bool operator==(const BnbQuantizationConfig&) const = default;
};

/// The types of a sharded model: `buffer_dtype` is of version 1, `output_dtype` of version 2.
struct ACCELERATE_API MixedPrecisionPolicy {
  std::optional<FloatType> param_dtype = std::nullopt;
  std::optional<FloatType> reduce_dtype = std::nullopt;
  std::optional<FloatType> buffer_dtype = std::nullopt;
  std::optional<FloatType> output_dtype = std::nullopt;

  /// Reads {"param_dtype": "bf16", ...}. Throws `ConfigError` unless it has the keys of the version
  /// and no others.
  [[nodiscard]] static MixedPrecisionPolicy from(const Value::Dict& dict, std::int64_t version);

  bool operator==(const MixedPrecisionPolicy&) const = default;
};

/// Whether parameters wait in host memory. `true` and `false` convert to it.
struct CPUOffload {
  CPUOffload(bool offload = false, bool pin = true)  // NOLINT(google-explicit-constructor)
      : offload_params(offload), pin_memory(pin) {}

  bool offload_params;
  bool pin_memory;

  bool operator==(const CPUOffload&) const = default;
};

/// Where a state dictionary of a sharded model lies.
struct StateDictConfig {
  bool offload_to_cpu = true;
  bool rank0_only = false;

  bool operator==(const StateDictConfig&) const = default;
};

struct SetMixedPrecisionOptions {
  /// Keep buffers in float32 (version 1).
  bool buffer_autocast = false;
  /// Replace a policy that is already there.
  bool override = false;
};

/// Sharding of parameters, gradients and optimizer states. Variables begin with FSDP_.
struct ACCELERATE_API FullyShardedDataParallelPlugin {
  static constexpr std::string_view kOptionsName = "FullyShardedDataParallelPlugin";

  /// VERSION, 1. 1 or 2.
  std::optional<std::int64_t> fsdp_version = std::nullopt;
  /// SHARDING_STRATEGY, FULL_SHARD. Version 1 only.
  std::optional<ShardingStrategy> sharding_strategy = std::nullopt;
  /// RESHARD_AFTER_FORWARD, true. A bool in version 2, a strategy in version 1.
  std::optional<std::variant<bool, ShardingStrategy>> reshard_after_forward = std::nullopt;
  /// BACKWARD_PREFETCH, unset. Version 1 only.
  std::optional<BackwardPrefetch> backward_prefetch = std::nullopt;
  /// A policy, or fp8 (which is bf16), fp16, bf16, fp32 for all its types.
  std::optional<std::variant<std::string, MixedPrecisionPolicy>> mixed_precision_policy =
      std::nullopt;
  /// AUTO_WRAP_POLICY, NO_WRAP. Or which modules become units.
  std::optional<std::variant<AutoWrapPolicy, Callback<bool(const torch::nn::Module&)>>>
      auto_wrap_policy = std::nullopt;
  /// OFFLOAD_PARAMS, false.
  std::optional<CPUOffload> cpu_offload = std::nullopt;
  /// IGNORED_MODULES, unset. Modules, or an expression that a module's whole name must match.
  std::optional<std::variant<std::string, std::vector<std::shared_ptr<torch::nn::Module>>>>
      ignored_modules = std::nullopt;
  /// STATE_DICT_TYPE, FULL_STATE_DICT in version 1 and SHARDED_STATE_DICT in version 2.
  std::optional<StateDictType> state_dict_type = std::nullopt;
  std::optional<StateDictConfig> state_dict_config = std::nullopt;
  std::optional<StateDictConfig> optim_state_dict_config = std::nullopt;
  bool limit_all_gathers = true;
  /// USE_ORIG_PARAMS, false. Version 1 only.
  std::optional<bool> use_orig_params = std::nullopt;
  /// How a module without storage gets one. Unset: empty tensors on the device of the process.
  Callback<void(torch::nn::Module&)> param_init_fn = {};
  /// SYNC_MODULE_STATES, false; true with `cpu_ram_efficient_loading`. Version 1 only. `prepare`
  /// synchronizes either way.
  std::optional<bool> sync_module_states = std::nullopt;
  /// FORWARD_PREFETCH, false. The variable is read in version 1 only.
  std::optional<bool> forward_prefetch = std::nullopt;
  /// ACTIVATION_CHECKPOINTING, false.
  std::optional<bool> activation_checkpointing = std::nullopt;
  /// CPU_RAM_EFFICIENT_LOADING, false. `prepare` gives all processes the values of the first one
  /// either way: build and load the model there, and on the others under `init_empty_weights`.
  std::optional<bool> cpu_ram_efficient_loading = std::nullopt;
  /// TRANSFORMER_CLS_TO_WRAP, a comma list. Unset: the no-split list of the model.
  std::optional<std::vector<std::string>> transformer_cls_names_to_wrap = std::nullopt;
  /// MIN_NUM_PARAMS, 0: no unit is made by size.
  std::optional<std::int64_t> min_num_params = std::nullopt;

  /// Sets all types from fp8, fp16, bf16 or fp32, unless a policy is there.
  void set_mixed_precision(std::string_view mixed_precision, SetMixedPrecisionOptions options = {});
  /// Changes the type when given, and fills the configurations that belong to it.
  void set_state_dict_type(std::optional<StateDictType> type = std::nullopt,
                           const Environment& environment = Environment::process());
  /// With TRANSFORMER_BASED_WRAP fills `transformer_cls_names_to_wrap` from the no-split list of
  /// the model and throws `ConfigError` for a class that the model does not have; SIZE_BASED_WRAP
  /// with a size of 0 becomes NO_WRAP. `prepare` asks for the same.
  void set_auto_wrap_policy(const torch::nn::Module& model);
  /// Fills an unset `cpu_offload` with false.
  void set_cpu_offload();
  /// Throws `ConfigError` unless the policy is one of the version: not a text, with no type of the
  /// other.
  void validate_mixed_precision_policy() const;
  /// Throws `ConfigError` if `cpu_offload` is unset.
  void validate_cpu_offload() const;
  /// The policy of a resolved plugin, or null.
  [[nodiscard]] const MixedPrecisionPolicy* policy() const;

  bool operator==(const FullyShardedDataParallelPlugin&) const = default;
};

/// Sets FSDP_CPU_RAM_EFFICIENT_LOADING to True, and ACCELERATE_USE_FSDP too where it is unset.
ACCELERATE_API void enable_fsdp_ram_efficient_loading();
/// Sets FSDP_CPU_RAM_EFFICIENT_LOADING to False.
ACCELERATE_API void disable_fsdp_ram_efficient_loading();

}  // namespace accelerate

#pragma GCC visibility pop
