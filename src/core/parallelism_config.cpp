// Sizes of the dimensions of a run, their checks, and the mesh that they span.
#include "accelerate/parallelism_config.h"

#include <algorithm>
#include <ostream>
#include <tuple>

#include "core/json.h"
#include "core/record.h"

namespace accelerate {
namespace detail {
namespace {

const std::string kParallelismPrefix = "PARALLELISM_CONFIG_";

using Sizes = std::vector<std::pair<std::string, std::int64_t>>;

/// In the order of the mesh: the last has neighbouring ranks.
Sizes sizes_of(const ParallelismConfig& config) {
  return {{"pp", config.pp_size.value_or(1)},
          {"dp_replicate", config.dp_replicate_size.value_or(1)},
          {"dp_shard", config.dp_shard_size.value_or(1)},
          {"cp", config.cp_size.value_or(1)},
          {"sp", config.sp_size.value_or(1)},
          {"tp", config.tp_size.value_or(1)}};
}

/// "dp_replicate_size 1, dp_shard_size 2, ...", for messages. Python has no pipeline: it is shown
/// if it is used.
std::string factors_of(const ParallelismConfig& config) {
  std::vector<std::string> factors;
  for (const auto& [name, size] : sizes_of(config)) {
    if (name != "pp" || size > 1) factors.push_back(str(name, "_size ", size));
  }
  return join(factors);
}

/// The product of the sizes of `names`; nothing where 64 bits do not hold it.
std::optional<std::int64_t> product_of(const ParallelismConfig& config,
                                       const std::vector<std::string>& names) {
  std::int64_t product = 1;
  for (const auto& [name, size] : sizes_of(config)) {
    if (std::ranges::find(names, name) == names.end()) continue;
    if (__builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

const std::vector<std::string> kAllNames = {"pp", "dp_replicate", "dp_shard", "cp", "sp", "tp"};

std::int64_t size_of(const ParallelismConfig& config, const std::vector<std::string>& names) {
  if (const auto product = product_of(config, names)) return *product;
  throw ConfigError(str("The sizes of the ParallelismConfig (", factors_of(config),
                        ") multiply to a number beyond 64 bits. Together they must be the number ",
                        "of processes."));
}

/// Those of `names` whose size is above 1, in the given order.
std::vector<std::string> enabled(const ParallelismConfig& config,
                                 const std::vector<std::string>& names) {
  const auto sizes = sizes_of(config);
  std::vector<std::string> result;
  for (const auto& name : names) {
    const auto found = std::ranges::find(sizes, name, &Sizes::value_type::first);
    if (found->second > 1) result.push_back(name);
  }
  return result;
}

template <class Handler>
void resolve_handler(std::optional<Handler>& handler, std::int64_t size,
                     const Environment& environment, Warnings& warnings) {
  if (handler || size > 1) handler = resolve(handler.value_or(Handler{}), environment, warnings);
}

}  // namespace

template <>
struct RecordTraits<TorchTensorParallelPlugin> {
  using T = TorchTensorParallelPlugin;
  static auto fields() {
    return std::tuple{field("tp_size", &T::tp_size),
                      field("torch_device_mesh", &T::torch_device_mesh)};
  }
  static void finish(T& plugin, const T&, const Environment&, Warnings& warnings) {
    require_at_least(1, "tp_size", plugin.tp_size);
    warnings.emplace_back(
        "TorchTensorParallelPlugin is deprecated. Use ParallelismConfig with tp_size instead.");
  }
};

template <>
struct RecordTraits<TorchTensorParallelConfig> {
  using T = TorchTensorParallelConfig;
  static auto fields() { return std::tuple{field("enable_async_tp", &T::enable_async_tp)}; }
  static void finish(T& config, const T&, const Environment&, Warnings& warnings) {
    if (config.enable_async_tp) {
      warnings.emplace_back("enable_async_tp has no effect: it is not supported.");
    }
  }
};

template <>
struct RecordTraits<TorchContextParallelConfig> {
  using T = TorchContextParallelConfig;
  static auto fields() {
    return std::tuple{field("cp_comm_strategy", &T::cp_comm_strategy,
                            kParallelismPrefix + "CP_COMM_STRATEGY", "allgather")};
  }
  static void finish(T& config, const T&, const Environment&, Warnings&) {
    require_one_of({"allgather", "alltoall"}, "cp_comm_strategy", *config.cp_comm_strategy);
  }
};

template <>
struct RecordTraits<DeepSpeedSequenceParallelConfig> {
  using T = DeepSpeedSequenceParallelConfig;
  static auto fields() {
    return std::tuple{field("sp_seq_length", &T::sp_seq_length),
                      field("sp_seq_length_is_variable", &T::sp_seq_length_is_variable,
                            kParallelismPrefix + "SP_SEQ_LENGTH_IS_VARIABLE", true)
                          .true_word(),
                      field("sp_attn_implementation", &T::sp_attn_implementation,
                            kParallelismPrefix + "SP_ATTN_IMPLEMENTATION")};
  }
  static void finish(T& config, const T&, const Environment& environment, Warnings&) {
    if (!*config.sp_seq_length_is_variable && !config.sp_seq_length) {
      read_length(config, environment);
    }
    if (config.sp_seq_length) require_at_least(1, "sp_seq_length", *config.sp_seq_length);
    if (!config.sp_attn_implementation) return;
    const auto& name = *config.sp_attn_implementation;
    const bool hub_kernel =
        name.find('/') != std::string::npos && name.find("flash-attn") != std::string::npos;
    if (hub_kernel) return;
    require_one_of({"flash_attention_2", "flash_attention_3", "sdpa"}, "sp_attn_implementation",
                   name);
  }
  static void read_length(T& config, const Environment& environment) {
    const std::string variable = kParallelismPrefix + "SP_SEQ_LENGTH";
    const auto text = environment.get(variable);
    if (!text) {
      throw ConfigError(str("sp_seq_length_is_variable is false, but neither sp_seq_length nor ",
                            variable, " tells the length."));
    }
    // The launcher writes an unset value as Python shows it.
    if (*text != "None") config.sp_seq_length = read_integer(*text, variable);
  }
};

template <>
struct RecordTraits<ParallelismConfig> {
  using T = ParallelismConfig;
  static auto fields() {
    const auto& prefix = kParallelismPrefix;
    return std::tuple{
        field("dp_replicate_size", &T::dp_replicate_size, prefix + "DP_REPLICATE_SIZE", 1),
        field("dp_shard_size", &T::dp_shard_size, prefix + "DP_SHARD_SIZE", 1),
        field("tp_size", &T::tp_size, prefix + "TP_SIZE", 1),
        field("cp_size", &T::cp_size, prefix + "CP_SIZE", 1),
        field("cp_backend", &T::cp_backend, prefix + "CP_BACKEND", "torch"),
        field("sp_size", &T::sp_size, prefix + "SP_SIZE", 1),
        field("sp_backend", &T::sp_backend, prefix + "SP_BACKEND", "deepspeed"),
        field("tp_handler", &T::tp_handler),
        field("cp_handler", &T::cp_handler),
        field("sp_handler", &T::sp_handler),
        field("pp_size", &T::pp_size, prefix + "PP_SIZE", 1)};
  }

  static void finish(T& config, const T&, const Environment& environment, Warnings& warnings) {
    require_at_least(1, "dp_replicate_size", *config.dp_replicate_size);
    require_at_least(1, "dp_shard_size", *config.dp_shard_size);
    require_at_least(1, "tp_size", *config.tp_size);
    require_at_least(1, "cp_size", *config.cp_size);
    require_one_of({"torch"}, "cp_backend", *config.cp_backend);
    require_at_least(1, "sp_size", *config.sp_size);
    require_one_of({"deepspeed"}, "sp_backend", *config.sp_backend);
    require_at_least(1, "pp_size", *config.pp_size);
    static_cast<void>(config.total_size());  // says so if there is none
    if (config.cp_enabled() && config.sp_enabled()) {
      throw ConfigError(str("cp_size is ", *config.cp_size, " and sp_size is ", *config.sp_size,
                            ": context and sequence parallelism exclude each other. Set one of ",
                            "them to 1."));
    }
    // As in Python, sequence parallelism is free to stand beside pure replication.
    if ((config.tp_enabled() || config.cp_enabled()) && config.dp_replicate_enabled() &&
        !config.dp_shard_enabled()) {
      throw ConfigError(str("tp_size is ", *config.tp_size, " and cp_size is ", *config.cp_size,
                            ", which do not go with pure replication (dp_replicate_size ",
                            *config.dp_replicate_size, ", dp_shard_size 1). Set dp_shard_size ",
                            "above 1."));
    }
    resolve_handler(config.tp_handler, *config.tp_size, environment, warnings);
    resolve_handler(config.cp_handler, *config.cp_size, environment, warnings);
    resolve_handler(config.sp_handler, *config.sp_size, environment, warnings);
  }
};

namespace {

const Value* entry_of(const Value::Dict& dict, std::string_view key) {
  const Value* value = dict.get(key);
  return value == nullptr || value->is_none() ? nullptr : value;
}

template <class T>
void take(const Value::Dict& dict, std::string_view key, std::optional<T>& field) {
  const Value* value = entry_of(dict, key);
  if (value == nullptr) return;
  if constexpr (std::is_same_v<T, bool>) field = value->as_bool();
  if constexpr (std::is_same_v<T, std::int64_t>) field = value->as_int();
  if constexpr (std::is_same_v<T, std::string>) field = value->as_string();
}

/// A key that nobody reads would be a setting without effect.
void check_keys(const Value::Dict& dict, const Value::Dict& known, const std::string& owner) {
  for (const auto& [key, value] : dict) {
    if (known.contains(key)) continue;
    std::vector<std::string> names;
    for (const auto& [name, unset] : known) names.push_back(name.to_string());
    throw ConfigError(
        str(owner, " has the unknown key ", key.repr(), ". Choose among: ", join(names), "."));
  }
}

/// The entry of a handler, or nothing.
template <class Handler>
const Value::Dict* handler_entry(const Value::Dict& dict, const std::string& key) {
  const Value* entry = entry_of(dict, key);
  if (entry == nullptr) return nullptr;
  check_keys(entry->as_dict(), dict_of(Handler{}), str("The parallelism configuration's ", key));
  return &entry->as_dict();
}

ParallelismConfig config_from(const Value::Dict& dict) {
  check_keys(dict, dict_of(ParallelismConfig{}), "The parallelism configuration");
  ParallelismConfig config;
  take(dict, "dp_replicate_size", config.dp_replicate_size);
  take(dict, "dp_shard_size", config.dp_shard_size);
  take(dict, "tp_size", config.tp_size);
  take(dict, "cp_size", config.cp_size);
  take(dict, "cp_backend", config.cp_backend);
  take(dict, "sp_size", config.sp_size);
  take(dict, "sp_backend", config.sp_backend);
  take(dict, "pp_size", config.pp_size);
  if (const auto* handler = handler_entry<TorchTensorParallelConfig>(dict, "tp_handler")) {
    std::optional<bool> asynchronous;
    take(*handler, "enable_async_tp", asynchronous);
    config.tp_handler = TorchTensorParallelConfig{asynchronous.value_or(false)};
  }
  if (const auto* handler = handler_entry<TorchContextParallelConfig>(dict, "cp_handler")) {
    take(*handler, "cp_comm_strategy", config.cp_handler.emplace().cp_comm_strategy);
  }
  if (const auto* handler = handler_entry<DeepSpeedSequenceParallelConfig>(dict, "sp_handler")) {
    auto& sequence = config.sp_handler.emplace();
    take(*handler, "sp_seq_length", sequence.sp_seq_length);
    take(*handler, "sp_seq_length_is_variable", sequence.sp_seq_length_is_variable);
    take(*handler, "sp_attn_implementation", sequence.sp_attn_implementation);
  }
  return config;
}

}  // namespace
}  // namespace detail

ACCELERATE_RECORD(TorchTensorParallelPlugin);
ACCELERATE_RECORD(TorchTensorParallelConfig);
ACCELERATE_RECORD(TorchContextParallelConfig);
ACCELERATE_RECORD(DeepSpeedSequenceParallelConfig);
ACCELERATE_RECORD(ParallelismConfig);

bool ParallelismConfig::operator==(const ParallelismConfig& other) const {
  const auto fields = [](const ParallelismConfig& config) {
    return std::tie(config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.cp_size,
                    config.cp_backend, config.sp_size, config.sp_backend, config.tp_handler,
                    config.cp_handler, config.sp_handler, config.pp_size);
  };
  return fields(*this) == fields(other);
}

std::int64_t ParallelismConfig::total_size() const {
  return detail::size_of(*this, detail::kAllNames);
}

std::int64_t ParallelismConfig::data_parallel_size() const {
  return detail::size_of(*this, {"dp_replicate", "dp_shard"});
}

std::int64_t ParallelismConfig::non_data_parallel_size() const {
  return detail::size_of(*this, {"tp", "cp", "sp", "pp"});
}

std::vector<std::string> ParallelismConfig::dp_dim_names() const {
  return detail::enabled(*this, {"dp_replicate", "dp_shard"});
}

std::vector<std::string> ParallelismConfig::non_dp_dim_names() const {
  return detail::enabled(*this, {"tp", "cp", "sp", "pp"});
}

std::vector<std::string> ParallelismConfig::dp_shard_cp_dim_names() const {
  return detail::enabled(*this, {"dp_shard", "cp"});
}

std::vector<std::string> ParallelismConfig::dp_cp_dim_names() const {
  return detail::enabled(*this, {"dp_replicate", "dp_shard", "cp"});
}

std::vector<std::string> ParallelismConfig::fsdp_dim_names() const {
  auto names = detail::enabled(*this, {"dp_replicate"});
  names.emplace_back("dp_shard_cp");
  return names;
}

std::vector<std::string> ParallelismConfig::active_mesh_dims() const {
  return detail::enabled(*this, {"dp_replicate", "dp_shard", "tp", "cp", "sp", "pp"});
}

std::optional<MeshLayout> ParallelismConfig::mesh() const {
  std::vector<std::string> names;
  std::vector<std::int64_t> shape;
  for (const auto& [name, size] : detail::sizes_of(*this)) {
    if (size <= 1) continue;
    names.push_back(name);
    shape.push_back(size);
  }
  if (names.empty()) return std::nullopt;
  MeshLayout mesh(std::move(names), std::move(shape));
  const auto flatten = [&](const char* name, const std::vector<std::string>& dimensions) {
    if (!dimensions.empty()) mesh.flatten(name, dimensions);
  };
  flatten("dp", dp_dim_names());
  flatten("dp_shard_cp", dp_shard_cp_dim_names());
  flatten("dp_cp", dp_cp_dim_names());
  return mesh;
}

std::string ParallelismConfig::to_json() const {
  return detail::json_dumps(detail::dict_of(*this));
}

ParallelismConfig ParallelismConfig::from_json(std::string_view text) {
  const Value tree = detail::json_loads(text, "The parallelism configuration");
  try {
    return detail::config_from(tree.as_dict());
  } catch (const ArgumentError& wrong_kind) {
    throw ConfigError(
        detail::str("The parallelism configuration ", text, " does not fit: ", wrong_kind.what()));
  }
}

ParallelismConfig validated_for(const ParallelismConfig& config, const ParallelismFacts& facts) {
  ParallelismConfig result = config;
  if (!facts.distributed && config.total_size() == 1) return result;
  if (config.total_size() == 1) result.dp_replicate_size = facts.num_processes;
  if (result.total_size() != facts.num_processes) {
    throw ConfigError(detail::str("The sizes of the ParallelismConfig multiply to ",
                                  result.total_size(), " (", detail::factors_of(result),
                                  "), but the run has ", facts.num_processes, " processes."));
  }
  if (result.cp_enabled() && !facts.allow_cp_standalone) {
    if (!facts.fsdp_version) {
      throw ConfigError(detail::str("cp_size is ", *result.cp_size,
                                    ", but there is no fsdp_plugin. ",
                                    "Context parallelism also shards the model: give one of ",
                                    "fsdp_version 2, or set ACCELERATE_ALLOW_CP_STANDALONE=true."));
    }
    if (*facts.fsdp_version == 1) {
      throw ConfigError(detail::str("cp_size is ", *result.cp_size,
                                    ", which needs fsdp_version 2, ",
                                    "but the fsdp_plugin is of version 1."));
    }
  }
  const auto unused = [](bool given, bool is_enabled, const char* name) {
    if (!given || is_enabled) return;
    detail::warn_once(detail::str("ParallelismConfig has a ", name, "_handler, but ", name,
                                  "_size is 1: the handler has no effect."));
  };
  unused(result.tp_handler.has_value(), result.tp_enabled(), "tp");
  unused(result.cp_handler.has_value(), result.cp_enabled(), "cp");
  unused(result.sp_handler.has_value(), result.sp_enabled(), "sp");
  return result;
}

ParallelismConfig to_parallelism_config(const TorchTensorParallelPlugin& plugin) {
  return {.tp_size = plugin.tp_size};
}

std::ostream& operator<<(std::ostream& out, const ParallelismConfig& config) {
  out << "ParallelismConfig(";
  for (const auto& [key, value] : detail::dict_of(config)) {
    out << key.to_string() << "=" << value.repr() << ", ";
  }
  out << "total_size=";
  if (const auto total = detail::product_of(config, detail::kAllNames)) return out << *total << ")";
  return out << "beyond 64 bits)";
}

}  // namespace accelerate
