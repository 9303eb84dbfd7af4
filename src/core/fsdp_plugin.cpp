// Fully sharded data parallelism: what its fields mean in version 1 and in version 2.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes parts of its own <regex> for uninitialised when sanitizers are on.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <regex>

#include "accelerate/kwargs/plugins.h"
#include "core/options.h"
#include "core/process_variables.h"

namespace accelerate {

using namespace detail;

namespace {

using Fsdp = FullyShardedDataParallelPlugin;

const std::string kFsdpPrefix = "FSDP_";

/// The strategy that a text names; unset for a truth word, which says nothing in version 1.
std::optional<ShardingStrategy> strategy_in(const Environment& environment,
                                            const std::string& variable) {
  const auto text = environment.get(variable);
  if (!text) return std::nullopt;
  if (contains<ShardingStrategy>(*text)) return from_string<ShardingStrategy>(*text);
  try {
    static_cast<void>(str_to_bool(*text));
    return std::nullopt;
  } catch (const ArgumentError&) {
    return from_string<ShardingStrategy>(*text, variable);  // throws with the choices
  }
}

/// Version 1 has two variables for one thing. The launcher always exports FULL_SHARD in the first,
/// so that another strategy in the second is what the user chose.
ShardingStrategy strategy_from(const Environment& environment, Warnings& warnings) {
  const auto first = strategy_in(environment, kFsdpPrefix + "SHARDING_STRATEGY");
  const auto second = strategy_in(environment, kFsdpPrefix + "RESHARD_AFTER_FORWARD");
  const auto launcher_default = ShardingStrategy::kFullShard;
  if (!first || !second || *first == *second) {
    return first.value_or(second.value_or(launcher_default));
  }
  if (*second == launcher_default) return *first;
  if (*first != launcher_default) {
    throw ConfigError(str("FSDP_SHARDING_STRATEGY is ", *first,
                          " and FSDP_RESHARD_AFTER_FORWARD is ", *second,
                          ". They mean the same in version 1: set one of them."));
  }
  warnings.push_back(str("FSDP_RESHARD_AFTER_FORWARD is ", *second,
                         ", which is used instead of FSDP_SHARDING_STRATEGY = ", *first, "."));
  return *second;
}

void finish_version_1(Fsdp& plugin, const Environment& environment, Warnings& warnings) {
  if (plugin.reshard_after_forward) {
    const auto* strategy = std::get_if<ShardingStrategy>(&*plugin.reshard_after_forward);
    if (strategy == nullptr) {
      throw ConfigError(str("reshard_after_forward is ",
                            std::get<bool>(*plugin.reshard_after_forward),
                            ", but with fsdp_version 1 it must be a ShardingStrategy."));
    }
    if (plugin.sharding_strategy && *plugin.sharding_strategy != *strategy) {
      throw ConfigError(str("sharding_strategy is ", *plugin.sharding_strategy,
                            " and reshard_after_forward is ", *strategy,
                            ". They mean the same in version 1: set one of them."));
    }
    plugin.sharding_strategy = *strategy;
  } else if (!plugin.sharding_strategy) {
    plugin.sharding_strategy = strategy_from(environment, warnings);
  }
  const auto fill = [&](std::optional<bool>& value, const char* name) {
    if (!value) value = environment.flag(kFsdpPrefix + name);
  };
  fill(plugin.use_orig_params, "USE_ORIG_PARAMS");
  fill(plugin.sync_module_states, "SYNC_MODULE_STATES");
  fill(plugin.forward_prefetch, "FORWARD_PREFETCH");
  if (*plugin.cpu_ram_efficient_loading && !*plugin.sync_module_states) {
    warnings.emplace_back(
        "sync_module_states is set to true: with cpu_ram_efficient_loading only the first process "
        "has the weights.");
    plugin.sync_module_states = true;
  }
}

template <class T>
void drop(std::optional<T>& field, std::string_view name, std::string_view why,
          Warnings& warnings) {
  if (!field) return;
  warnings.push_back(str(name, " has no effect with fsdp_version 2: ", why));
  field.reset();
}

void finish_version_2(Fsdp& plugin, const Environment& environment, Warnings& warnings) {
  if (!plugin.reshard_after_forward) {
    if (plugin.sharding_strategy) {
      throw ConfigError(str("sharding_strategy is ", *plugin.sharding_strategy,
                            ", which is of fsdp_version 1. With version 2 set ",
                            "reshard_after_forward to true or false."));
    }
    plugin.reshard_after_forward = environment.flag(kFsdpPrefix + "RESHARD_AFTER_FORWARD", true);
  }
  if (const auto* strategy = std::get_if<ShardingStrategy>(&*plugin.reshard_after_forward)) {
    throw ConfigError(str("reshard_after_forward is ", *strategy,
                          ", but with fsdp_version 2 it must be true or false."));
  }
  drop(plugin.backward_prefetch, "backward_prefetch", "units are always fetched ahead.", warnings);
  drop(plugin.use_orig_params, "use_orig_params", "the original parameters are always used.",
       warnings);
  drop(plugin.sync_module_states, "sync_module_states", "it is not needed.", warnings);
}

void finish_wrapping(Fsdp& plugin, const Environment& environment) {
  if (!plugin.auto_wrap_policy) {
    const auto text = environment.get(kFsdpPrefix + "AUTO_WRAP_POLICY");
    plugin.auto_wrap_policy =
        text ? from_string<AutoWrapPolicy>(*text, kFsdpPrefix + "AUTO_WRAP_POLICY")
             : AutoWrapPolicy::kNoWrap;
  }
  const auto* policy = std::get_if<AutoWrapPolicy>(&*plugin.auto_wrap_policy);
  if (policy == nullptr) return;
  if (*policy == AutoWrapPolicy::kTransformerBasedWrap && !plugin.transformer_cls_names_to_wrap) {
    if (const auto names = environment.get(kFsdpPrefix + "TRANSFORMER_CLS_TO_WRAP")) {
      plugin.transformer_cls_names_to_wrap = split(*names, ',');
    }
  }
  if (*policy == AutoWrapPolicy::kSizeBasedWrap) {
    const std::string variable = kFsdpPrefix + "MIN_NUM_PARAMS";
    if (!plugin.min_num_params) {
      plugin.min_num_params =
          environment.contains(variable) ? read<std::int64_t>(environment, variable) : 0;
    }
    require_at_least(0, "min_num_params", *plugin.min_num_params);
    // As in Python: no unit is made by a size of 0, instead of one of every module.
    if (*plugin.min_num_params == 0) plugin.auto_wrap_policy = AutoWrapPolicy::kNoWrap;
  }
}

void finish_ignored_modules(const Fsdp& plugin) {
  if (!plugin.ignored_modules) return;
  const auto* expression = std::get_if<std::string>(&*plugin.ignored_modules);
  if (expression == nullptr) return;
  try {
    std::regex checked(*expression);
  } catch (const std::regex_error&) {
    throw ConfigError(str("ignored_modules is '", *expression,
                          "', which is not a regular expression of the ECMAScript kind."));
  }
}

void finish_precision(Fsdp& plugin) {
  if (!plugin.mixed_precision_policy) return;
  if (const auto* text = std::get_if<std::string>(&*plugin.mixed_precision_policy)) {
    plugin.set_mixed_precision(std::string(*text), {.override = true});
    return;
  }
  plugin.validate_mixed_precision_policy();
}

}  // namespace

static ACCELERATE_VALUE_FIELDS(MixedPrecisionPolicy, param_dtype, reduce_dtype, buffer_dtype,
                               output_dtype);

static ACCELERATE_VALUE_FIELDS(CPUOffload, offload_params, pin_memory);

static ACCELERATE_VALUE_FIELDS(StateDictConfig, offload_to_cpu, rank0_only);

static auto value_fields(std::type_identity<Fsdp>) {
  return std::tuple_cat(
      std::tuple{option("fsdp_version", &Fsdp::fsdp_version, kFsdpPrefix + "VERSION")},
      ACCELERATE_FIELDS(Fsdp, sharding_strategy, reshard_after_forward),
      with_variables(kFsdpPrefix, ACCELERATE_FIELDS(Fsdp, backward_prefetch)),
      ACCELERATE_FIELDS(Fsdp, mixed_precision_policy, auto_wrap_policy, cpu_offload),
      with_variables(kFsdpPrefix, ACCELERATE_FIELDS(Fsdp, ignored_modules)),
      ACCELERATE_FIELDS(Fsdp, state_dict_type, state_dict_config, optim_state_dict_config,
                        limit_all_gathers, use_orig_params, param_init_fn, sync_module_states,
                        forward_prefetch),
      with_variables(kFsdpPrefix,
                     ACCELERATE_FIELDS(Fsdp, activation_checkpointing, cpu_ram_efficient_loading)),
      ACCELERATE_FIELDS(Fsdp, transformer_cls_names_to_wrap, min_num_params));
}
static Fsdp option_defaults(std::type_identity<Fsdp>) {
  return {.fsdp_version = 1, .activation_checkpointing = false, .cpu_ram_efficient_loading = false};
}

static void finish(Fsdp& plugin, const Fsdp& given, const Environment& environment,
                   Warnings& warnings) {
  if (*plugin.fsdp_version != 1 && *plugin.fsdp_version != 2) {
    throw ConfigError(str("fsdp_version is ", *plugin.fsdp_version, ". Choose 1 or 2."));
  }
  if (given.sharding_strategy) {
    warnings.emplace_back(
        "sharding_strategy is deprecated in Python Accelerate; reshard_after_forward says the "
        "same.");
  }
  if (!plugin.cpu_offload) plugin.cpu_offload = environment.flag(kFsdpPrefix + "OFFLOAD_PARAMS");
  if (plugin.backward_prefetch == BackwardPrefetch::kNoPrefetch) plugin.backward_prefetch.reset();
  if (*plugin.fsdp_version == 1) finish_version_1(plugin, environment, warnings);
  if (*plugin.fsdp_version == 2) finish_version_2(plugin, environment, warnings);
  plugin.set_state_dict_type(std::nullopt, environment);
  finish_wrapping(plugin, environment);
  finish_ignored_modules(plugin);
  finish_precision(plugin);
}

ACCELERATE_OPTIONS(FullyShardedDataParallelPlugin);

MixedPrecisionPolicy MixedPrecisionPolicy::from(const Value::Dict& dict, std::int64_t version) {
  const std::string last = version == 1 ? "buffer_dtype" : "output_dtype";
  MixedPrecisionPolicy policy;
  std::size_t found = 0;
  const auto read = [&](const std::string& key, std::optional<FloatType>& type) {
    const Value* value = dict.get(key);
    if (value == nullptr) return;
    type = from_string<FloatType>(value->as_string(), key);
    ++found;
  };
  read("param_dtype", policy.param_dtype);
  read("reduce_dtype", policy.reduce_dtype);
  read(last, version == 1 ? policy.buffer_dtype : policy.output_dtype);
  if (found == 3 && dict.size() == 3) return policy;
  throw ConfigError(str("The mixed precision policy ", Value(dict).repr(),
                        " must have the keys param_dtype, reduce_dtype and ", last,
                        " with fsdp_version ", version, ", and no others."));
}

void FullyShardedDataParallelPlugin::set_mixed_precision(std::string_view mixed_precision,
                                                         SetMixedPrecisionOptions options) {
  const std::string name(mixed_precision);
  require_one_of({"fp8", "fp16", "bf16", "fp32"}, "mixed_precision", name);
  if (mixed_precision_policy && !options.override) return;
  // 8-bit matrix products run inside of a bf16 model.
  const auto type = name == "fp8" ? FloatType::kBf16 : from_string<FloatType>(name);
  MixedPrecisionPolicy policy{.param_dtype = type, .reduce_dtype = type};
  if (fsdp_version.value_or(1) == 1) {
    policy.buffer_dtype = options.buffer_autocast ? FloatType::kFp32 : type;
  } else {
    policy.output_dtype = type;
  }
  mixed_precision_policy = policy;
}

void FullyShardedDataParallelPlugin::set_state_dict_type(std::optional<StateDictType> type,
                                                         const Environment& environment) {
  const auto version = fsdp_version.value_or(1);
  auto chosen = type ? type : state_dict_type;
  if (!chosen) {
    const std::string variable = kFsdpPrefix + "STATE_DICT_TYPE";
    const auto text = environment.get(variable);
    chosen = text           ? from_string<StateDictType>(*text, variable)
             : version == 1 ? StateDictType::kFullStateDict
                            : StateDictType::kShardedStateDict;
  }
  if (version == 2 && *chosen == StateDictType::kLocalStateDict) {
    throw ConfigError(
        "state_dict_type is LOCAL_STATE_DICT, which fsdp_version 2 does not have. Choose one of: "
        "SHARDED_STATE_DICT, FULL_STATE_DICT.");
  }
  const auto config_of = [](std::optional<StateDictType> kind) -> std::optional<StateDictConfig> {
    if (!kind || *kind == StateDictType::kLocalStateDict) return std::nullopt;
    return StateDictConfig{.rank0_only = *kind == StateDictType::kFullStateDict};
  };
  // A configuration that came with the former type goes with it; one of the user's stays.
  const auto follow = [&](std::optional<StateDictConfig>& config) {
    if (!config || (chosen != state_dict_type && config == config_of(state_dict_type))) {
      config = config_of(chosen);
    }
  };
  follow(state_dict_config);
  follow(optim_state_dict_config);
  state_dict_type = chosen;
}

void FullyShardedDataParallelPlugin::set_cpu_offload() {
  if (!cpu_offload) cpu_offload = false;
}

void FullyShardedDataParallelPlugin::validate_cpu_offload() const {
  if (cpu_offload) return;
  throw ConfigError("cpu_offload is not set. Set it to true, false or a CPUOffload.");
}

void FullyShardedDataParallelPlugin::validate_mixed_precision_policy() const {
  const auto* const types = policy();
  if (types == nullptr) {
    throw ConfigError(
        "mixed_precision_policy must be a MixedPrecisionPolicy. Set one, or call "
        "set_mixed_precision.");
  }
  if (fsdp_version.value_or(1) == 1 && types->output_dtype) {
    throw ConfigError(
        "mixed_precision_policy has output_dtype, which is of fsdp_version 2. Version 1 has "
        "param_dtype, reduce_dtype and buffer_dtype.");
  }
  if (fsdp_version == 2 && types->buffer_dtype) {
    throw ConfigError(
        "mixed_precision_policy has buffer_dtype, which is of fsdp_version 1. Version 2 has "
        "param_dtype, reduce_dtype and output_dtype.");
  }
}

const MixedPrecisionPolicy* FullyShardedDataParallelPlugin::policy() const {
  return mixed_precision_policy ? std::get_if<MixedPrecisionPolicy>(&*mixed_precision_policy)
                                : nullptr;
}

void enable_fsdp_ram_efficient_loading() {
  const std::string use_fsdp = "ACCELERATE_USE_FSDP";
  if (!Environment::process().contains(use_fsdp)) set_process_variable(use_fsdp, "True");
  set_process_variable("FSDP_CPU_RAM_EFFICIENT_LOADING", "True");
}

void disable_fsdp_ram_efficient_loading() {
  set_process_variable("FSDP_CPU_RAM_EFFICIENT_LOADING", "False");
}

}  // namespace accelerate
