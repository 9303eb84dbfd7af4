// Sizes of the dimensions of a run, their checks, and the mesh that they span.
#include "accelerate/parallelism_config.h"

#include <algorithm>
#include <ostream>

#include "accelerate/value/from_value.h"
#include "core/json.h"
#include "core/options.h"

namespace accelerate {

using namespace detail;

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

static ACCELERATE_VALUE_FIELDS(TorchTensorParallelPlugin, tp_size, torch_device_mesh);
static void finish(TorchTensorParallelPlugin& plugin, const TorchTensorParallelPlugin&,
                   const Environment&, Warnings& warnings) {
  require_at_least(1, "tp_size", plugin.tp_size);
  warnings.emplace_back(
      "TorchTensorParallelPlugin is deprecated. Use ParallelismConfig with tp_size instead.");
}

static ACCELERATE_VALUE_FIELDS(TorchTensorParallelConfig, enable_async_tp);
static void finish(TorchTensorParallelConfig& config, const TorchTensorParallelConfig&,
                   const Environment&, Warnings& warnings) {
  if (config.enable_async_tp) {
    warnings.emplace_back("enable_async_tp has no effect: it is not supported.");
  }
}

static auto value_fields(std::type_identity<TorchContextParallelConfig>) {
  return with_variables(kParallelismPrefix,
                        ACCELERATE_FIELDS(TorchContextParallelConfig, cp_comm_strategy));
}
static TorchContextParallelConfig option_defaults(std::type_identity<TorchContextParallelConfig>) {
  return {.cp_comm_strategy = "allgather"};
}
static void finish(TorchContextParallelConfig& config, const TorchContextParallelConfig&,
                   const Environment&, Warnings&) {
  require_one_of({"allgather", "alltoall"}, "cp_comm_strategy", *config.cp_comm_strategy);
}

static void read_length(DeepSpeedSequenceParallelConfig& config, const Environment& environment) {
  const std::string variable = kParallelismPrefix + "SP_SEQ_LENGTH";
  const auto text = environment.get(variable);
  if (!text) {
    throw ConfigError(str("sp_seq_length_is_variable is false, but neither sp_seq_length nor ",
                          variable, " tells the length."));
  }
  // The launcher writes an unset value as Python shows it.
  if (*text != "None") config.sp_seq_length = read_integer(*text, variable);
}

static auto value_fields(std::type_identity<DeepSpeedSequenceParallelConfig>) {
  using T = DeepSpeedSequenceParallelConfig;
  return std::tuple{option("sp_seq_length", &T::sp_seq_length, ""),
                    option("sp_seq_length_is_variable", &T::sp_seq_length_is_variable,
                           kParallelismPrefix + "SP_SEQ_LENGTH_IS_VARIABLE", OptionRule::kTrueWord),
                    option("sp_attn_implementation", &T::sp_attn_implementation,
                           kParallelismPrefix + "SP_ATTN_IMPLEMENTATION")};
}
static DeepSpeedSequenceParallelConfig option_defaults(
    std::type_identity<DeepSpeedSequenceParallelConfig>) {
  return {.sp_seq_length_is_variable = true};
}
static void finish(DeepSpeedSequenceParallelConfig& config, const DeepSpeedSequenceParallelConfig&,
                   const Environment& environment, Warnings&) {
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
static auto value_fields(std::type_identity<ParallelismConfig>) {
  return std::tuple_cat(
      with_variables(kParallelismPrefix,
                     ACCELERATE_FIELDS(ParallelismConfig, dp_replicate_size, dp_shard_size, tp_size,
                                       cp_size, cp_backend, sp_size, sp_backend)),
      ACCELERATE_FIELDS(ParallelismConfig, tp_handler, cp_handler, sp_handler),
      with_variables(kParallelismPrefix, ACCELERATE_FIELDS(ParallelismConfig, pp_size)));
}
static ParallelismConfig option_defaults(std::type_identity<ParallelismConfig>) {
  return {.dp_replicate_size = 1,
          .dp_shard_size = 1,
          .tp_size = 1,
          .cp_size = 1,
          .cp_backend = "torch",
          .sp_size = 1,
          .sp_backend = "deepspeed",
          .pp_size = 1};
}

static void finish(ParallelismConfig& config, const ParallelismConfig&,
                   const Environment& environment, Warnings& warnings) {
  require_at_least(1, "dp_replicate_size", *config.dp_replicate_size);
  require_at_least(1, "dp_shard_size", *config.dp_shard_size);
  require_at_least(1, "tp_size", *config.tp_size);
  require_at_least(1, "cp_size", *config.cp_size);
  require_one_of({"torch"}, "cp_backend", *config.cp_backend);
  require_at_least(1, "sp_size", *config.sp_size);
  require_one_of({"deepspeed"}, "sp_backend", *config.sp_backend);
  require_at_least(1, "pp_size", *config.pp_size);
  static_cast<void>(config.total_size());  // throws beyond 64 bits
  if (config.cp_enabled() && config.sp_enabled()) {
    throw ConfigError(str("cp_size is ", *config.cp_size, " and sp_size is ", *config.sp_size,
                          ": context and sequence parallelism exclude each other. Set one of ",
                          "them to 1."));
  }
  // As in Python, sequence parallelism is free to stand beside pure replication. A pipeline has
  // nothing else: its copies may be cut.
  const bool is_cut = (config.tp_enabled() && !config.pp_enabled()) || config.cp_enabled();
  if (is_cut && config.dp_replicate_enabled() && !config.dp_shard_enabled()) {
    throw ConfigError(str("tp_size is ", *config.tp_size, " and cp_size is ", *config.cp_size,
                          ", which do not go with pure replication (dp_replicate_size ",
                          *config.dp_replicate_size, ", dp_shard_size 1). Set dp_shard_size ",
                          "above 1."));
  }
  resolve_handler(config.tp_handler, *config.tp_size, environment, warnings);
  resolve_handler(config.cp_handler, *config.cp_size, environment, warnings);
  resolve_handler(config.sp_handler, *config.sp_size, environment, warnings);
}

namespace {

/// Reads the entries of `dict` into the fields of these names; none leaves a field as it is. Throws
/// `ConfigError` for a key that is no field: a setting without effect.
template <class T>
void read_entries(const Value::Dict& dict, const std::string& owner, T& options) {
  const auto known = dict_of(options);
  std::vector<std::string> names;
  for (const auto& key : known.keys()) names.push_back(key.to_string());
  for (const auto& [key, value] : dict) {
    if (known.contains(key)) continue;
    throw ConfigError(
        str(owner, " has the unknown key ", key.repr(), ". Choose among: ", join(names), "."));
  }
  for_each_field(options, converted_fields<T>(), [&](const auto& field, auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    const Value* value = dict.get(field.name);
    if (value == nullptr || value->is_none()) return;
    if constexpr (requires { Member::value_type::kOptionsName; }) {
      read_entries(value->as_dict(), str(owner, "'s ", field.name), member.emplace());
    } else {
      member = from_value<Member>(*value);
    }
  });
}

}  // namespace

ACCELERATE_OPTIONS(TorchTensorParallelPlugin);
ACCELERATE_OPTIONS(TorchTensorParallelConfig);
ACCELERATE_OPTIONS(TorchContextParallelConfig);
ACCELERATE_OPTIONS(DeepSpeedSequenceParallelConfig);
ACCELERATE_OPTIONS(ParallelismConfig);

bool ParallelismConfig::operator==(const ParallelismConfig& other) const {
  bool equal = true;
  for_each_field(*this, value_fields(std::type_identity<ParallelismConfig>{}),
                 [&](const auto& field, const auto& member) {
                   equal = equal && member == other.*field.member;
                 });
  return equal;
}

std::int64_t ParallelismConfig::total_size() const { return size_of(*this, kAllNames); }

std::int64_t ParallelismConfig::data_parallel_size() const {
  return size_of(*this, {"dp_replicate", "dp_shard"});
}

std::int64_t ParallelismConfig::non_data_parallel_size() const {
  return size_of(*this, {"tp", "cp", "sp", "pp"});
}

std::vector<std::string> ParallelismConfig::dp_dim_names() const {
  return enabled(*this, {"dp_replicate", "dp_shard"});
}

std::vector<std::string> ParallelismConfig::non_dp_dim_names() const {
  return enabled(*this, {"tp", "cp", "sp", "pp"});
}

std::vector<std::string> ParallelismConfig::dp_shard_cp_dim_names() const {
  return enabled(*this, {"dp_shard", "cp"});
}

std::vector<std::string> ParallelismConfig::dp_cp_dim_names() const {
  return enabled(*this, {"dp_replicate", "dp_shard", "cp"});
}

std::vector<std::string> ParallelismConfig::fsdp_dim_names() const {
  auto names = enabled(*this, {"dp_replicate"});
  names.emplace_back("dp_shard_cp");
  return names;
}

std::vector<std::string> ParallelismConfig::active_mesh_dims() const {
  return enabled(*this, {"dp_replicate", "dp_shard", "tp", "cp", "sp", "pp"});
}

std::optional<MeshLayout> ParallelismConfig::mesh() const {
  std::vector<std::string> names;
  std::vector<std::int64_t> shape;
  for (const auto& [name, size] : sizes_of(*this)) {
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
  if (sp_enabled()) {
    flatten("dp_shard_sp", enabled(*this, {"dp_shard", "sp"}));
    flatten("dp_sp", enabled(*this, {"dp_replicate", "dp_shard", "sp"}));
  }
  return mesh;
}

std::string ParallelismConfig::to_json() const { return json_dumps(dict_of(*this)); }

ParallelismConfig ParallelismConfig::from_json(std::string_view text) {
  const Value tree = json_loads(text, "The parallelism configuration");
  try {
    ParallelismConfig config;
    read_entries(tree.as_dict(), "The parallelism configuration", config);
    return config;
  } catch (const ArgumentError& wrong_kind) {
    throw ConfigError(
        str("The parallelism configuration ", text, " does not fit: ", wrong_kind.what()));
  }
}

ParallelismConfig validated_for(const ParallelismConfig& config, const ParallelismFacts& facts) {
  ParallelismConfig result = config;
  if (!facts.distributed && config.total_size() == 1) return result;
  if (config.total_size() == 1) result.dp_replicate_size = facts.num_processes;
  if (result.total_size() != facts.num_processes) {
    throw ConfigError(str("The sizes of the ParallelismConfig multiply to ", result.total_size(),
                          " (", factors_of(result), "), but the run has ", facts.num_processes,
                          " processes."));
  }
  if (result.cp_enabled() && !facts.allow_cp_standalone) {
    if (!facts.fsdp_version) {
      throw ConfigError(str("cp_size is ", *result.cp_size, ", but there is no fsdp_plugin. ",
                            "Context parallelism also shards the model: give one of ",
                            "fsdp_version 2, or set ACCELERATE_ALLOW_CP_STANDALONE=true."));
    }
    if (*facts.fsdp_version == 1) {
      throw ConfigError(str("cp_size is ", *result.cp_size, ", which needs fsdp_version 2, ",
                            "but the fsdp_plugin is of version 1."));
    }
  }
  const auto unused = [](bool given, bool is_enabled, const char* name) {
    if (!given || is_enabled) return;
    warn_once(str("ParallelismConfig has a ", name, "_handler, but ", name,
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
  for (const auto& [key, value] : dict_of(config)) {
    out << key.to_string() << "=" << value.repr() << ", ";
  }
  out << "total_size=";
  if (const auto total = product_of(config, kAllNames)) return out << *total << ")";
  return out << "beyond 64 bits)";
}

}  // namespace accelerate
