// DeepSpeed configurations: reading, queries, and reconciling plugin and tree.
#include "accelerate/kwargs/deepspeed_plugin.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "accelerate/value/from_value.h"
#include "core/files.h"
#include "core/json.h"
#include "core/options.h"

namespace accelerate {

using namespace detail;

namespace {

const std::string kDeepspeedPrefix = "ACCELERATE_DEEPSPEED_";

/// The bytes of URL-safe base64 with its padding; nullopt if the text is not base64.
std::optional<std::string> base64_decoded(std::string_view text) {
  static constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const auto padding = text.size() - std::min(text.find('='), text.size());
  if (padding > 2) return std::nullopt;
  std::string bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (const char c : text.substr(0, text.size() - padding)) {
    const auto digit = kAlphabet.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count & 0xFF));
    }
  }
  return bytes;
}

Value tree_from(const std::string& path_or_text) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path_or_text, ignored)) {
    return json_loads_unique(read_whole_file(path_or_text), path_or_text);
  }
  // What begins as JSON is meant as JSON: its own error says where it goes wrong.
  if (trim(path_or_text).starts_with('{')) {
    return json_loads_unique(path_or_text, "The DeepSpeed configuration");
  }
  if (const auto decoded = base64_decoded(path_or_text)) {
    try {
      return json_loads(*decoded);
    } catch (const ConfigError&) {
      // Not base64 either; a short word can look like it.
    }
  }
  return nullptr;
}

/// As Python's bool() takes it.
bool truthy(const Value& value) {
  if (value.is_none()) return false;
  if (value.is_bool()) return value.as_bool();
  if (value.is_int() || value.is_double()) return value.as_double() != 0.0;
  if (value.is_string()) return !value.as_string().empty();
  if (value.is_dict()) return !value.as_dict().empty();
  if (value.is_list() || value.is_tuple()) return !value.items().empty();
  return true;
}

/// As Python's str() shows it.
std::string shown(const Value& value) {
  return value.is_string() ? value.as_string() : value.repr();
}

bool is_auto_text(const Value* value) {
  return value != nullptr && value->is_string() && value->as_string() == "auto";
}

/// The fields of the plugin that have a place in the tree, under their dotted keys.
constexpr std::tuple kLinks{
    field("gradient_accumulation_steps", &DeepSpeedPlugin::gradient_accumulation_steps),
    field("gradient_clipping", &DeepSpeedPlugin::gradient_clipping),
    field("zero_optimization.stage", &DeepSpeedPlugin::zero_stage),
    field("zero_optimization.offload_optimizer.device", &DeepSpeedPlugin::offload_optimizer_device),
    field("zero_optimization.offload_param.device", &DeepSpeedPlugin::offload_param_device),
    field("zero_optimization.offload_param.nvme_path", &DeepSpeedPlugin::offload_param_nvme_path),
    field("zero_optimization.offload_optimizer.nvme_path",
          &DeepSpeedPlugin::offload_optimizer_nvme_path),
    field("zero_optimization.stage3_gather_16bit_weights_on_model_save",
          &DeepSpeedPlugin::zero3_save_16bit_model)};

/// Keys of an Accelerate configuration that must not stand beside a DeepSpeed file.
const std::vector<std::string> kFileOnlyKeys{
    "gradient_accumulation_steps", "gradient_clipping",      "zero_stage",
    "offload_optimizer_device",    "offload_param_device",   "offload_param_nvme_path",
    "offload_optimizer_nvme_path", "zero3_save_16bit_model", "mixed_precision"};

void check_no_double_settings(const Environment& environment) {
  for (const auto& name : split(environment.get("ACCELERATE_CONFIG_DS_FIELDS").value_or(""), ',')) {
    if (std::ranges::find(kFileOnlyKeys, name) == kFileOnlyKeys.end()) continue;
    throw ConfigError(str("The Accelerate configuration sets '", name, "' beside a DeepSpeed ",
                          "configuration file. Keep it in the DeepSpeed file only, as all of: ",
                          join(kFileOnlyKeys), "."));
  }
}

/// The tree of a plugin without a file.
Value::Dict tree_of(const DeepSpeedPlugin& plugin) {
  const auto offload = [](const std::string& device, const std::string& path) {
    return Value::Dict{{"device", device}, {"nvme_path", device == "nvme" ? Value(path) : Value()}};
  };
  Value::Dict tree{
      {"train_batch_size", "auto"},
      {"train_micro_batch_size_per_gpu", "auto"},
      {"gradient_accumulation_steps", to_value(plugin.gradient_accumulation_steps)},
      {"zero_optimization",
       Value::Dict{{"stage", *plugin.zero_stage},
                   {"offload_optimizer",
                    offload(*plugin.offload_optimizer_device, *plugin.offload_optimizer_nvme_path)},
                   {"offload_param",
                    offload(*plugin.offload_param_device, *plugin.offload_param_nvme_path)},
                   {"stage3_gather_16bit_weights_on_model_save", *plugin.zero3_save_16bit_model}}}};
  const Value clipping = to_value(plugin.gradient_clipping);
  if (truthy(clipping)) tree.set("gradient_clipping", clipping);
  return tree;
}

/// "auto" in the file takes the value of the plugin; anything else overrules it.
void reconcile(DeepSpeedPlugin& plugin) {
  auto& config = *plugin.hf_ds_config;
  if (!config.config().contains("gradient_accumulation_steps")) {
    config.config().set("gradient_accumulation_steps", 1);
  }
  if (!config.config().contains("zero_optimization")) {
    throw ConfigError(
        "The DeepSpeed configuration has no 'zero_optimization' section. Add it, with its "
        "'stage'.");
  }
  for_each_field(plugin, kLinks, [&](const auto& link, auto& member) {
    const auto [node, key] = config.find_config_node(link.name);
    if (node == nullptr) return;
    Value* entry = node->get(key);
    if (is_auto_text(entry)) *entry = to_value(member);
    if (entry == nullptr || entry->is_none() || is_auto_text(entry)) return;
    try {
      member = from_value<std::remove_cvref_t<decltype(member)>>(*entry);
    } catch (const ArgumentError& wrong_kind) {
      throw ConfigError(str("In the DeepSpeed configuration, '", link.name, "' is ", entry->repr(),
                            ": ", wrong_kind.what()));
    }
  });
}

void check_offload(std::string_view name, const std::string& device, const std::string& path) {
  require_one_of({"none", "cpu", "nvme"}, str("offload_", name, "_device"), device);
  if (device == "nvme" && path == "none") {
    throw ConfigError(
        str("offload_", name, "_device is nvme, but offload_", name, "_nvme_path is not set."));
  }
}

void finish_msamp(DeepSpeedPlugin& plugin) {
  auto& tree = plugin.hf_ds_config->config();
  if (!*plugin.enable_msamp || tree.contains("msamp")) return;
  if (*plugin.zero_stage == 3) {
    throw UnsupportedError("MS-AMP does not go with ZeRO stage 3. Use stage 0, 1 or 2.");
  }
  tree.set("msamp",
           Value::Dict{{"enabled", true}, {"opt_level", to_string(*plugin.msamp_opt_level)}});
}

void read_or_build_tree(DeepSpeedPlugin& plugin, const DeepSpeedPlugin& given,
                        const Environment& environment) {
  if (!plugin.hf_ds_config) {
    const auto text = environment.get(kDeepspeedPrefix + "CONFIG_FILE").value_or("none");
    if (text != "none") plugin.hf_ds_config = text;
  }
  if (!plugin.hf_ds_config) {
    plugin.hf_ds_config = tree_of(plugin);
    return;
  }
  // A tree that was built here before, and comes back with its plugin, is no file.
  const bool built =
      given.hf_ds_config && given.hf_ds_config->config().contains("steps_per_print") &&
      given.get_value("steps_per_print") == Value(std::numeric_limits<double>::infinity());
  if (!built) check_no_double_settings(environment);
  reconcile(plugin);
}

}  // namespace

static auto value_fields(std::type_identity<DeepSpeedPlugin>) {
  using T = DeepSpeedPlugin;
  const auto& prefix = kDeepspeedPrefix;
  return std::tuple_cat(
      ACCELERATE_FIELDS(T, hf_ds_config),
      with_variables("ACCELERATE_",
                     ACCELERATE_FIELDS(T, gradient_accumulation_steps, gradient_clipping)),
      with_variables(prefix, ACCELERATE_FIELDS(T, zero_stage)),
      ACCELERATE_FIELDS(T, is_train_batch_min),
      with_variables(prefix,
                     ACCELERATE_FIELDS(T, offload_optimizer_device, offload_param_device,
                                       offload_optimizer_nvme_path, offload_param_nvme_path)),
      ACCELERATE_FIELDS(T, zero3_init_flag),
      std::tuple{option("zero3_save_16bit_model", &T::zero3_save_16bit_model,
                        prefix + "ZERO3_SAVE_16BIT_MODEL", OptionRule::kTrueWord),
                 option("transformer_moe_cls_names", &T::transformer_moe_cls_names,
                        prefix + "MOE_LAYER_CLS_NAMES")},
      ACCELERATE_FIELDS(T, enable_msamp),
      std::tuple{option("msamp_opt_level", &T::msamp_opt_level, "ACCELERATE_FP8_OPT_LEVEL")});
}

static DeepSpeedPlugin option_defaults(std::type_identity<DeepSpeedPlugin>) {
  return {.gradient_accumulation_steps = kAuto,
          .gradient_clipping = kAuto,
          .zero_stage = 2,
          .offload_optimizer_device = "none",
          .offload_param_device = "none",
          .offload_optimizer_nvme_path = "none",
          .offload_param_nvme_path = "none",
          .zero3_save_16bit_model = false,
          .msamp_opt_level = OptLevel::kO1};
}

static void finish(DeepSpeedPlugin& plugin, const DeepSpeedPlugin& given,
                   const Environment& environment, Warnings& warnings) {
  if (!plugin.enable_msamp) {
    plugin.enable_msamp =
        to_upper(environment.get("ACCELERATE_FP8_BACKEND").value_or("")) == "MSAMP";
  }
  read_or_build_tree(plugin, given, environment);
  plugin.hf_ds_config->config().set("steps_per_print", std::numeric_limits<double>::infinity());
  if (*plugin.zero_stage < 0 || *plugin.zero_stage > 3) {
    throw ConfigError(str("zero_stage is ", *plugin.zero_stage, ". Choose 0, 1, 2 or 3."));
  }
  check_offload("optimizer", *plugin.offload_optimizer_device, *plugin.offload_optimizer_nvme_path);
  check_offload("param", *plugin.offload_param_device, *plugin.offload_param_nvme_path);

  const bool stage_3 = plugin.hf_ds_config->is_zero3();
  if (!plugin.zero3_init_flag) {
    plugin.zero3_init_flag = environment.flag(kDeepspeedPrefix + "ZERO3_INIT", stage_3);
  }
  if (*plugin.zero3_init_flag && !stage_3) {
    warnings.emplace_back("zero3_init_flag is set to false: it is for ZeRO stage 3 alone.");
    plugin.zero3_init_flag = false;
  }
  finish_msamp(plugin);
}

ACCELERATE_OPTIONS(DeepSpeedPlugin);

HfDeepSpeedConfig::HfDeepSpeedConfig(const std::string& path_or_text) {
  Value tree = tree_from(path_or_text);
  if (!tree.is_dict()) {
    throw ConfigError(str("'", path_or_text, "' is not a DeepSpeed configuration. Expected: ",
                          "the path of a JSON file, a JSON object, or such an object in ",
                          "URL-safe base64."));
  }
  config_ = std::move(tree).as_dict();
}

std::pair<const Value::Dict*, std::string> HfDeepSpeedConfig::find_config_node(
    std::string_view key) const {
  const auto parts = split(key, '.');
  const Value::Dict* node = &config_;
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    const Value* next = node->get(parts[i]);
    if (next == nullptr || !next->is_dict()) return {nullptr, parts.back()};
    node = &next->as_dict();
  }
  return {node, parts.back()};
}

std::pair<Value::Dict*, std::string> HfDeepSpeedConfig::find_config_node(std::string_view key) {
  auto [node, last] = std::as_const(*this).find_config_node(key);
  return {const_cast<Value::Dict*>(node), std::move(last)};  // NOLINT: the tree is ours to change
}

Value HfDeepSpeedConfig::get_value(std::string_view key, Value fallback) const {
  const auto [node, last] = find_config_node(key);
  return node == nullptr ? fallback : node->get(last, std::move(fallback));
}

void HfDeepSpeedConfig::del_config_sub_tree(std::string_view key, bool must_exist) {
  const auto [node, last] = find_config_node(key);
  const Value* entry = node == nullptr ? nullptr : node->get(last);
  if (entry != nullptr && !entry->is_none()) {
    node->erase(last);
  } else if (must_exist) {
    throw ConfigError(str("The DeepSpeed configuration has no entry '", key,
                          "'. It is: ", Value(config_).repr()));
  }
}

bool HfDeepSpeedConfig::is_true(std::string_view key) const { return truthy(get_value(key)); }

bool HfDeepSpeedConfig::is_false(std::string_view key) const {
  const Value value = get_value(key);
  return !value.is_none() && !truthy(value);
}

bool HfDeepSpeedConfig::is_zero2() const {
  return get_value("zero_optimization.stage") == Value(2);
}
bool HfDeepSpeedConfig::is_zero3() const {
  return get_value("zero_optimization.stage") == Value(3);
}

bool HfDeepSpeedConfig::is_offload() const {
  if (!is_zero2() && !is_zero3()) return false;
  const auto elsewhere = [&](std::string_view key) {
    const Value device = get_value(key);
    return device == Value("cpu") || device == Value("nvme");
  };
  return elsewhere("zero_optimization.offload_optimizer.device") ||
         elsewhere("zero_optimization.offload_param.device");
}

const Value::Dict& DeepSpeedPlugin::deepspeed_config() const {
  if (hf_ds_config) return hf_ds_config->config();
  throw StateError("This DeepSpeedPlugin has no configuration yet. Call resolved(plugin) first.");
}

Value DeepSpeedPlugin::get_value(std::string_view key, Value fallback) const {
  static_cast<void>(deepspeed_config());
  return hf_ds_config->get_value(key, std::move(fallback));
}

bool DeepSpeedPlugin::is_auto(std::string_view key) const {
  const Value value = get_value(key);
  return is_auto_text(&value);
}

void DeepSpeedPlugin::set_mixed_precision(std::string_view mixed_precision) {
  const auto precision = from_string<PrecisionType>(mixed_precision, "mixed_precision");
  static_cast<void>(deepspeed_config());
  auto& tree = hf_ds_config->config();
  // Matrix products in 8 bits run inside of a bf16 model.
  const bool fp16 = precision == PrecisionType::kFp16;
  const bool bf16 = precision == PrecisionType::kBf16 || precision == PrecisionType::kFp8;
  if (precision != PrecisionType::kNo) {
    const std::string other = fp16 ? "bf16" : "fp16";
    if (to_lower(shown(get_value(other + ".enabled"))) == "true") {
      throw ConfigError(str("mixed_precision is '", mixed_precision, "', but the DeepSpeed ",
                            "configuration enables ", other, ". Choose one of the two."));
    }
  }
  if (precision == PrecisionType::kFp8) finish_msamp(*this);
  const auto section = [&](const char* name, Value::Dict content) {
    if (!tree.contains(name)) tree.set(name, std::move(content));
  };
  section("fp16", fp16 ? Value::Dict{{"enabled", true}, {"auto_cast", true}}
                       : Value::Dict{{"enabled", false}});
  section("bf16", Value::Dict{{"enabled", bf16}});
  fill_match("fp16.enabled", Value::Dict{{"fp16.enabled", fp16}});
  fill_match("bf16.enabled", Value::Dict{{"bf16.enabled", bf16}});
}

void DeepSpeedPlugin::fill_match(std::string_view key, const Value::Dict& values,
                                 std::vector<std::string>* mismatches) {
  static_cast<void>(deepspeed_config());
  const auto [node, last] = hf_ds_config->find_config_node(key);
  Value* entry = node == nullptr ? nullptr : node->get(last);
  if (entry == nullptr) return;
  const Value* wanted = values.get(key);
  if (is_auto_text(entry)) {
    if (wanted == nullptr) {
      throw ConfigError(str("'", key, "' is 'auto' in the DeepSpeed configuration, and ",
                            "nothing here tells its value. Set it in the configuration."));
    }
    *entry = *wanted;
  } else if (mismatches != nullptr && wanted != nullptr && !entry->is_none() && *entry != *wanted) {
    mismatches->push_back(
        str("- ds ", key, "=", shown(*entry), " vs arg ", key, "=", shown(*wanted)));
  }
}

void DeepSpeedPlugin::deepspeed_config_process(const Value::Dict& values, bool must_match) {
  std::vector<std::string> keys;
  const auto collect = [&](const auto& self, const Value::Dict& tree,
                           const std::string& prefix) -> void {
    for (const auto& [key, value] : tree) {
      const auto name = prefix + key.to_string();
      if (value.is_dict()) {
        self(self, value.as_dict(), name + ".");
      } else {
        keys.push_back(name);
      }
    }
  };
  collect(collect, deepspeed_config(), "");
  std::vector<std::string> mismatches;
  for (const auto& key : keys) fill_match(key, values, must_match ? &mismatches : nullptr);
  if (mismatches.empty()) return;
  throw ConfigError(str("These values of the DeepSpeed configuration differ from those of ",
                        "the run:\n", join(mismatches, "\n"),
                        "\nThe easiest remedy is to set them to 'auto'."));
}

}  // namespace accelerate
