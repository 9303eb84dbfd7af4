#include "core/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "accelerate/errors.h"
#include "accelerate/value/from_value.h"
#include "core/files.h"
#include "core/json.h"
#include "core/log.h"
#include "core/numbers.h"
#include "core/text.h"
#include "core/yaml.h"

namespace accelerate {
namespace detail::inline core {
namespace {

namespace fs = std::filesystem;

constexpr double kExact = 9007199254740992.0;  // 2^53: whole numbers up to here are exact

struct Section {
  std::string_view name;
  std::string_view prefix;  ///< of all keys
  bool optional_prefix;     ///< a file may leave it out
  std::string_view keys;    ///< without the prefix
};

// The flags of the launcher that have no top-level key, and what the questionnaire writes.
// clang-format off
constexpr auto kSections = std::to_array<Section>({
    {"deepspeed_config", "", false,
     "deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile "
     "deepspeed_inclusion_filter deepspeed_moe_layer_cls_names "
     "deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping "
     "offload_optimizer_device offload_optimizer_nvme_path offload_param_device "
     "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model zero_stage"},
    {"dynamo_config", "dynamo_", true,
     "backend mode use_dynamic use_fullgraph use_regional_compilation"},
    {"fp8_config", "fp8_", true,
     "amax_compute_algo amax_compute_algorithm amax_history_len amax_history_length "
     "backend enable_fsdp_float8_all_gather format interval margin opt_level "
     "optimization_level override_linear_precision pad_inner_dim use_autocast_during_eval"},
    {"fsdp_config", "fsdp_", true,
     "activation_checkpointing auto_wrap_policy backward_prefetch "
     "cpu_ram_efficient_loading forward_prefetch ignored_modules min_num_params "
     "offload_params reshard_after_forward sharding_strategy state_dict_type "
     "sync_module_states transformer_layer_cls_to_wrap use_orig_params version"},
    {"megatron_lm_config", "megatron_lm_", false,
     "attention_backend attention_dropout attention_softmax_in_fp32 "
     "calculate_per_token_loss context_parallel_size decoder_last_pipeline_num_layers "
     "eod_mask_loss expert_model_parallel_size expert_tensor_parallel_size "
     "gradient_clipping hidden_dropout no_load_optim no_save_optim num_micro_batches "
     "optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations "
     "recompute_granularity recompute_method recompute_num_layers sequence_parallelism "
     "tp_degree use_custom_fsdp use_distributed_optimizer use_precision_aware_optimizer "
     "use_rotary_position_embeddings"},
    // mpirun_ccl is of older versions; the launcher still knows it.
    {"mpirun_config", "mpirun_", false,
     "ccl hostfile"},
    {"parallelism_config", "parallelism_config_", false,
     "cp_backend cp_comm_strategy cp_size dp_replicate_size dp_shard_size pp_size "
     "sp_attn_implementation sp_backend sp_seq_length sp_seq_length_is_variable sp_size "
     "tp_size"},
});
// clang-format on

template <class T>
constexpr bool kIsOptional = tree::detail::kIs<T, std::optional>;

/// What a member of this type expects, for messages.
template <class T>
std::string expectation() {
  if constexpr (kIsOptional<T>) return expectation<typename T::value_type>();
  if constexpr (std::same_as<T, bool>) return "true or false";
  if constexpr (std::same_as<T, std::int64_t>) return "a whole number";
  if constexpr (std::same_as<T, std::string>) return "a text; put it into quotes";
  if constexpr (std::same_as<T, std::vector<std::string>>) return "a list of texts";
  if constexpr (std::same_as<T, Value::Dict>) return "a section with keys and values";
  if constexpr (Spelled<T>) return "one of: " + join(list<T>());
  return "";
}

/// An entry of a file as a member of type `T` expects it: files may spell numbers as texts and
/// texts as numbers. Entries that do not fit stay as they are.
template <class T>
Value adapted(const Value& value) {
  if constexpr (kIsOptional<T>) {
    return adapted<typename T::value_type>(value);
  } else if constexpr (std::same_as<T, bool>) {
    try {
      if (value.is_int()) return str_to_bool(value.repr());
      if (value.is_string()) return str_to_bool(value.as_string());
    } catch (const ArgumentError&) {
      return value;
    }
  } else if constexpr (std::same_as<T, std::int64_t>) {
    // YAML takes 1e8 for a text and 4.0 for a float: both mean a whole number here.
    double number = std::numeric_limits<double>::quiet_NaN();
    if (value.is_double()) number = value.as_double();
    if (value.is_string()) number = parse_number<double>(trim(value.as_string())).value_or(number);
    const bool whole = std::trunc(number) == number && std::abs(number) <= kExact;
    return whole ? Value(static_cast<std::int64_t>(number)) : value;
  } else if constexpr (std::same_as<T, std::string>) {
    if (value.is_int() || value.is_double()) return value.repr();  // gpu_ids: 0
  } else if constexpr (std::same_as<T, std::vector<std::string>>) {
    if (value.is_string()) return Value::list({value});
    if (!value.is_list()) return value;
    Value::List items;
    for (const auto& item : value.as_list()) items.push_back(adapted<std::string>(item));
    return items;
  } else if constexpr (Spelled<T>) {
    constexpr bool kLower = std::same_as<T, PrecisionType>;
    // Unquoted NO and no are the boolean false in YAML.
    if (value.is_bool() && !value.as_bool()) return kLower ? "no" : "NO";
    if (kLower && value.is_string()) return to_lower(value.as_string());
  }
  return value;
}

/// Reads one entry of a file. Throws `ConfigError` with file and key when it does not fit.
template <class T>
void read_entry(const std::string& source, std::string_view key, const Value& value, T& member) {
  const Value entry = adapted<T>(value);
  if constexpr (Spelled<T>) {  // suggests the nearest choice
    if (entry.is_string()) {
      member = from_string<T>(entry.as_string(), str(source, ": '", key, "'"));
      return;
    }
  } else if constexpr (kIsOptional<T>) {
    read_entry(source, key, value, member.emplace());
    return;
  }
  try {
    member = from_value<T>(entry);
  } catch (const ArgumentError&) {
    throw ConfigError(
        str(source, ": '", key, "' is ", value.repr(), ", expected ", expectation<T>(), "."));
  }
}

// How a member stands in a file. Python turns empty sections into none, inside sections as well.
Value file_value(const Value& value) {
  if (!value.is_dict()) return value;
  if (value.as_dict().empty()) return {};
  Value::Dict dict;
  for (const auto& [key, inner] : value.as_dict()) dict.set(key, file_value(inner));
  return dict;
}

void warn_of_unknown_section_keys(const std::string& source, std::string_view section,
                                  const Value::Dict& dict) {
  const auto known = known_section_keys(section);
  if (known.empty()) return;
  for (const auto& [key, value] : dict) {
    const auto text = key.to_string();
    const auto prefixed = str(optional_section_prefix(section), text);
    if (std::ranges::find(known, text) != known.end()) continue;
    if (std::ranges::find(known, prefixed) != known.end()) continue;
    auto hint = did_you_mean(text, known);
    if (hint.empty()) hint = did_you_mean(prefixed, known);
    warn(str(source, ": '", text, "' in ", section, " is not known and has no effect.", hint));
  }
}

// Old spellings become new ones.
void modernise(Value::Dict& dict, const std::string& source) {
  for (const auto* retired : {"ipex_config", "tp_config"}) {
    if (dict.erase(retired)) {
      warn(str(source, ": '", retired, "' is of an older version and no longer has an effect."));
    }
  }
  if (const auto* fp16 = dict.get("fp16")) {
    bool on = false;
    if (!fp16->is_none()) read_entry(source, "fp16", *fp16, on);
    if (on && !dict.contains("mixed_precision")) dict.set("mixed_precision", "fp16");
    dict.erase("fp16");
  }
  if (const auto* found = dict.get("dynamo_backend")) {
    const Value backend = *found;
    dict.erase("dynamo_backend");
    const bool off =
        backend == "NO" || backend == "no" || (backend.is_bool() && !backend.as_bool());
    dict.set("dynamo_config", off ? Value::Dict{} : Value::Dict{{"dynamo_backend", backend}});
  }
}

template <class C>
void check_keys(const Value::Dict& dict, const std::string& source) {
  std::vector<std::string> known;
  for_each_field(C(), converted_fields<C>(),
                 [&](const auto& field, const auto&) { known.emplace_back(field.name); });
  std::vector<std::string> unknown;
  std::vector<std::string> near;
  for (const auto& [key, value] : dict) {
    const auto text = key.to_string();
    if (std::ranges::find(known, text) != known.end()) continue;
    unknown.push_back(text);
    if (const auto guess = nearest(text, known); !guess.empty()) near.push_back(guess);
  }
  if (unknown.empty()) return;
  std::ranges::sort(unknown);
  const auto hint = near.empty() ? std::string() : str(" Near to them: ", join(near), ".");
  throw ConfigError(str(source, " has unknown keys (", Value(unknown).repr(),
                        "). Upgrade accelerate, or fix or remove these keys.", hint));
}

template <class C>
C read_config(Value::Dict dict, const std::string& source) {
  if (!dict.contains("distributed_type")) {
    throw ConfigError(str(source, " must have a `distributed_type`."));
  }
  modernise(dict, source);
  check_keys<C>(dict, source);
  C config;
  for_each_field(config, converted_fields<C>(), [&](const auto& field, auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    const Value* value = dict.get(field.name);
    if (value == nullptr) return;
    if (!value->is_none()) {
      read_entry(source, field.name, *value, member);
    } else if constexpr (kIsOptional<Member>) {
      member.reset();  // explicitly none, whatever the default is
    }
    if constexpr (std::same_as<Member, Value::Dict>) {
      warn_of_unknown_section_keys(source, field.name, member);
    }
  });
  return config;
}

template <class C>
Value::Dict write_config(const C& config) {
  Value::Dict dict;
  for_each_field(config, converted_fields<C>(), [&](const auto& field, const auto& member) {
    auto value = file_value(to_value(member));
    if (!value.is_none()) dict.set(field.name, std::move(value));
  });
  return dict;
}

std::string name_of(const fs::path& path) { return str("The config file at ", path.string()); }

Value::Dict read_dict(const fs::path& path, bool json) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw ConfigError(str(name_of(path),
                          " does not exist. Pass an existing file, or make one with "
                          "`accelerate config`."));
  }
  // A pipe without a writer, or a device, would be waited for without end.
  if (!fs::is_regular_file(path, ignored) && !fs::is_directory(path, ignored)) {
    throw ConfigError(str(name_of(path), " is a pipe or a device. Pass a regular file."));
  }
  const auto text = read_whole_file(path);
  const auto source = name_of(path);
  auto value = json ? json_loads_unique(text, source) : yaml_loads_unique(text, source);
  if (value.is_none()) throw ConfigError(source + " is empty.");
  if (!value.is_dict()) {
    throw ConfigError(str(source, " must hold keys and values, not a ", value.kind_name(), "."));
  }
  return std::move(value).as_dict();
}

template <class C>
C read_file(const fs::path& path, bool json) {
  return C::from_dict(read_dict(path, json), name_of(path));
}

}  // namespace

Value::Dict read_config_file(const fs::path& path) {
  return read_dict(path, path.extension() == ".json");
}

Config config_from(const Value::Dict& content, const fs::path& path) {
  const auto source = name_of(path);
  auto where = ComputeEnvironment::kLocalMachine;
  if (const Value* found = content.get("compute_environment"); found && !found->is_none()) {
    read_entry(source, "compute_environment", *found, where);
  }
  if (where == ComputeEnvironment::kLocalMachine) return ClusterConfig::from_dict(content, source);
  return SageMakerConfig::from_dict(content, source);
}

std::vector<std::string> known_section_keys(std::string_view section) {
  std::vector<std::string> keys;
  for (const Section& each : kSections) {
    if (each.name != section) continue;
    for (const auto& key : split(each.keys, ' ')) keys.push_back(str(each.prefix, key));
  }
  return keys;
}

std::string_view optional_section_prefix(std::string_view section) {
  const auto* found = std::ranges::find(kSections, section, &Section::name);
  return found != kSections.end() && found->optional_prefix ? found->prefix : "";
}

fs::path huggingface_home(const Environment& environment) {
  if (const auto home = environment.get("HF_HOME")) return expand_user(*home, environment);
  const auto cache = environment.get("XDG_CACHE_HOME").value_or("~/.cache");
  return expand_user(cache, environment) / "huggingface";
}

fs::path default_config_file(const Environment& environment) {
  return huggingface_home(environment) / "accelerate" / "default_config.yaml";
}

ClusterConfig basic_config(std::string_view mixed_precision, DistributedType several,
                           int accelerator_count) {
  const auto precision = to_lower(mixed_precision);
  if (!contains<PrecisionType>(precision)) {
    throw ArgumentError(
        str("`mixed_precision` should be one of 'no', 'fp16', 'bf16' or 'fp8', not '",
            mixed_precision, "'."));
  }
  ClusterConfig config;
  config.mixed_precision = from_string<PrecisionType>(precision);
  config.use_cpu = accelerator_count == 0;
  config.num_processes = std::max(accelerator_count, 1);
  config.distributed_type = accelerator_count > 1 ? several : DistributedType::kNo;
  return config;
}

std::optional<fs::path> write_basic_config(std::string_view mixed_precision,
                                           const fs::path& save_location, DistributedType several,
                                           int accelerator_count) {
  const auto config = basic_config(mixed_precision, several, accelerator_count);
  std::error_code error;
  if (fs::exists(save_location, error)) {
    warn(str("There is a configuration at ", save_location.string(),
             " already; it is left alone. Edit or remove it, or give another place."));
    return std::nullopt;
  }
  if (save_location.has_parent_path()) fs::create_directories(save_location.parent_path(), error);
  if (error) {
    throw ConfigError(str("Cannot make the folder '", save_location.parent_path().string(),
                          "': ", error.message(), "."));
  }
  config.to_json_file(save_location);  // as Python: JSON, whatever the name
  return save_location;
}

}  // namespace detail::inline core

using detail::read_config;

/// The members that read and write files, which are the same for both kinds of configuration.
#define ACCELERATE_CONFIG_FILES(T)                                                     \
  T T::from_yaml_file(const std::filesystem::path& path) {                             \
    return detail::read_file<T>(path, /*json=*/false);                                 \
  }                                                                                    \
  T T::from_json_file(const std::filesystem::path& path) {                             \
    return detail::read_file<T>(path, /*json=*/true);                                  \
  }                                                                                    \
  void T::to_yaml_file(const std::filesystem::path& path) const {                      \
    detail::write_file_atomically(path, detail::yaml_dumps(to_dict()));                \
  }                                                                                    \
  void T::to_json_file(const std::filesystem::path& path) const {                      \
    const auto text = detail::json_dumps(to_dict(), {.indent = 2, .sort_keys = true}); \
    detail::write_file_atomically(path, text + "\n");                                  \
  }                                                                                    \
  Value::Dict T::to_dict() const { return detail::write_config(*this); }

ACCELERATE_CONFIG_FILES(ClusterConfig)
ACCELERATE_CONFIG_FILES(SageMakerConfig)
#undef ACCELERATE_CONFIG_FILES

ClusterConfig ClusterConfig::from_dict(const Value::Dict& dict, const std::string& source) {
  auto config = read_config<ClusterConfig>(dict, source);
  if (!dict.contains("num_processes") && config.distributed_type == DistributedType::kNo) {
    config.num_processes = 1;
  }
  return config;
}

SageMakerConfig SageMakerConfig::from_dict(const Value::Dict& dict, const std::string& source) {
  for (const auto* key : {"ec2_instance_type", "iam_role_name"}) {
    if (dict.get(key, nullptr).is_none()) {
      throw ConfigError(
          detail::str(source, " is for Amazon SageMaker and must have a `", key, "`."));
    }
  }
  return read_config<SageMakerConfig>(dict, source);
}

std::filesystem::path default_config_file() {
  return detail::default_config_file(Environment::process());
}

Config load_config_from_file(const std::optional<std::filesystem::path>& config_file) {
  const auto path = config_file.value_or(default_config_file());
  return detail::config_from(detail::read_config_file(path), path);
}

}  // namespace accelerate
