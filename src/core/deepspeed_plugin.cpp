// DeepSpeed configurations: reading, queries, and bringing plugin and tree into step.
#include "accelerate/deepspeed_plugin.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/json.h"
#include "core/record.h"

namespace accelerate {
namespace detail {
namespace {

const std::string kDeepspeedPrefix = "ACCELERATE_DEEPSPEED_";

/// The bytes of URL-safe base64 with its padding, or nothing.
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

std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw ConfigError(str("The DeepSpeed configuration ", path, " cannot be read."));
  return std::move(text).str();
}

Value tree_from(const std::string& path_or_text) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path_or_text, ignored)) {
    return json_loads(file_text(path_or_text), path_or_text);
  }
  // What begins as JSON is meant as JSON: its own error says where it goes wrong.
  if (trim(path_or_text).starts_with('{')) {
    return json_loads(path_or_text, "The DeepSpeed configuration");
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

/// One field of the plugin and its place in the tree.
struct Link {
  std::string_view key;
  Value (*get)(const DeepSpeedPlugin&);
  void (*set)(DeepSpeedPlugin&, const Value&);
};

// clang-format off
const std::array<Link, 8> kLinks{{
    {"gradient_accumulation_steps",
     [](const DeepSpeedPlugin& p) { return value_of(p.gradient_accumulation_steps); },
     [](DeepSpeedPlugin& p, const Value& v) { p.gradient_accumulation_steps = v.as_int(); }},
    {"gradient_clipping",
     [](const DeepSpeedPlugin& p) { return value_of(p.gradient_clipping); },
     [](DeepSpeedPlugin& p, const Value& v) { p.gradient_clipping = v.as_double(); }},
    {"zero_optimization.stage",
     [](const DeepSpeedPlugin& p) { return value_of(p.zero_stage); },
     [](DeepSpeedPlugin& p, const Value& v) { p.zero_stage = v.as_int(); }},
    {"zero_optimization.offload_optimizer.device",
     [](const DeepSpeedPlugin& p) { return value_of(p.offload_optimizer_device); },
     [](DeepSpeedPlugin& p, const Value& v) { p.offload_optimizer_device = v.as_string(); }},
    {"zero_optimization.offload_param.device",
     [](const DeepSpeedPlugin& p) { return value_of(p.offload_param_device); },
     [](DeepSpeedPlugin& p, const Value& v) { p.offload_param_device = v.as_string(); }},
    {"zero_optimization.offload_param.nvme_path",
     [](const DeepSpeedPlugin& p) { return value_of(p.offload_param_nvme_path); },
     [](DeepSpeedPlugin& p, const Value& v) { p.offload_param_nvme_path = v.as_string(); }},
    {"zero_optimization.offload_optimizer.nvme_path",
     [](const DeepSpeedPlugin& p) { return value_of(p.offload_optimizer_nvme_path); },
     [](DeepSpeedPlugin& p, const Value& v) { p.offload_optimizer_nvme_path = v.as_string(); }},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save",
     [](const DeepSpeedPlugin& p) { return value_of(p.zero3_save_16bit_model); },
     [](DeepSpeedPlugin& p, const Value& v) { p.zero3_save_16bit_model = v.as_bool(); }},
}};
// clang-format on

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
      {"gradient_accumulation_steps", value_of(plugin.gradient_accumulation_steps)},
      {"zero_optimization",
       Value::Dict{{"stage", *plugin.zero_stage},
                   {"offload_optimizer",
                    offload(*plugin.offload_optimizer_device, *plugin.offload_optimizer_nvme_path)},
                   {"offload_param",
                    offload(*plugin.offload_param_device, *plugin.offload_param_nvme_path)},
                   {"stage3_gather_16bit_weights_on_model_save", *plugin.zero3_save_16bit_model}}}};
  const Value clipping = value_of(plugin.gradient_clipping);
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
  for (const auto& link : kLinks) {
    const auto [node, key] = config.find_config_node(link.key);
    if (node == nullptr) continue;
    Value* entry = node->get(key);
    if (is_auto_text(entry)) *entry = link.get(plugin);
    if (entry == nullptr || entry->is_none() || is_auto_text(entry)) continue;
    try {
      link.set(plugin, *entry);
    } catch (const ArgumentError& wrong_kind) {
      throw ConfigError(str("In the DeepSpeed configuration, '", link.key, "' is ", entry->repr(),
                            ": ", wrong_kind.what()));
    }
  }
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

}  // namespace

template <>
struct RecordTraits<DeepSpeedPlugin> {
  using T = DeepSpeedPlugin;
  static auto fields() {
    const auto& prefix = kDeepspeedPrefix;
    return std::tuple{
        field("hf_ds_config", &T::hf_ds_config),
        field("gradient_accumulation_steps", &T::gradient_accumulation_steps),
        field("gradient_clipping", &T::gradient_clipping),
        field("zero_stage", &T::zero_stage, prefix + "ZERO_STAGE", 2),
        field("is_train_batch_min", &T::is_train_batch_min),
        field("offload_optimizer_device", &T::offload_optimizer_device,
              prefix + "OFFLOAD_OPTIMIZER_DEVICE", "none"),
        field("offload_param_device", &T::offload_param_device, prefix + "OFFLOAD_PARAM_DEVICE",
              "none"),
        field("offload_optimizer_nvme_path", &T::offload_optimizer_nvme_path,
              prefix + "OFFLOAD_OPTIMIZER_NVME_PATH", "none"),
        field("offload_param_nvme_path", &T::offload_param_nvme_path,
              prefix + "OFFLOAD_PARAM_NVME_PATH", "none"),
        field("zero3_init_flag", &T::zero3_init_flag),
        field("zero3_save_16bit_model", &T::zero3_save_16bit_model,
              prefix + "ZERO3_SAVE_16BIT_MODEL", false)
            .true_word(),
        field("transformer_moe_cls_names", &T::transformer_moe_cls_names,
              prefix + "MOE_LAYER_CLS_NAMES"),
        field("enable_msamp", &T::enable_msamp),
        field("msamp_opt_level", &T::msamp_opt_level, "ACCELERATE_FP8_OPT_LEVEL", OptLevel::kO1)};
  }

  static void finish(T& plugin, const T& given, const Environment& environment,
                     Warnings& warnings) {
    read_steps_and_clipping(plugin, environment);
    if (!plugin.enable_msamp) {
      plugin.enable_msamp =
          to_upper(environment.get("ACCELERATE_FP8_BACKEND").value_or("")) == "MSAMP";
    }
    read_or_build_tree(plugin, given, environment);
    plugin.hf_ds_config->config().set("steps_per_print", std::numeric_limits<double>::infinity());
    if (*plugin.zero_stage < 0 || *plugin.zero_stage > 3) {
      throw ConfigError(str("zero_stage is ", *plugin.zero_stage, ". Choose 0, 1, 2 or 3."));
    }
    check_offload("optimizer", *plugin.offload_optimizer_device,
                  *plugin.offload_optimizer_nvme_path);
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

  static void read_steps_and_clipping(T& plugin, const Environment& environment) {
    const auto read = [&](const std::string& variable, auto& field, auto number) {
      if (field) return;
      const auto text = environment.get(variable).value_or("auto");
      if (text == "auto") {
        field = kAuto;
      } else {
        field = number(text, variable);
      }
    };
    read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", plugin.gradient_accumulation_steps,
         read_integer);
    read("ACCELERATE_GRADIENT_CLIPPING", plugin.gradient_clipping, read_double);
  }

  static void read_or_build_tree(T& plugin, const T& given, const Environment& environment) {
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
};

}  // namespace detail

ACCELERATE_RECORD(DeepSpeedPlugin);

HfDeepSpeedConfig::HfDeepSpeedConfig(const std::string& path_or_text) {
  Value tree = detail::tree_from(path_or_text);
  if (!tree.is_dict()) {
    throw ConfigError(detail::str(
        "'", path_or_text, "' is not a DeepSpeed configuration. Expected: ",
        "the path of a JSON file, a JSON object, or such an object in ", "URL-safe base64."));
  }
  config_ = std::move(tree).as_dict();
}

std::pair<const Value::Dict*, std::string> HfDeepSpeedConfig::find_config_node(
    std::string_view key) const {
  const auto parts = detail::split(key, '.');
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
    throw ConfigError(detail::str("The DeepSpeed configuration has no entry '", key,
                                  "'. It is: ", Value(config_).repr()));
  }
}

bool HfDeepSpeedConfig::is_true(std::string_view key) const {
  return detail::truthy(get_value(key));
}

bool HfDeepSpeedConfig::is_false(std::string_view key) const {
  const Value value = get_value(key);
  return !value.is_none() && !detail::truthy(value);
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
  return detail::is_auto_text(&value);
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
    if (detail::to_lower(detail::shown(get_value(other + ".enabled"))) == "true") {
      throw ConfigError(detail::str("mixed_precision is '", mixed_precision,
                                    "', but the DeepSpeed ", "configuration enables ", other,
                                    ". Choose one of the two."));
    }
  }
  if (precision == PrecisionType::kFp8) detail::finish_msamp(*this);
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
  if (detail::is_auto_text(entry)) {
    if (wanted == nullptr) {
      throw ConfigError(detail::str("'", key, "' is 'auto' in the DeepSpeed configuration, and ",
                                    "nothing here tells its value. Set it in the configuration."));
    }
    *entry = *wanted;
  } else if (mismatches != nullptr && wanted != nullptr && !entry->is_none() && *entry != *wanted) {
    mismatches->push_back(detail::str("- ds ", key, "=", detail::shown(*entry), " vs arg ", key,
                                      "=", detail::shown(*wanted)));
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
  throw ConfigError(detail::str("These values of the DeepSpeed configuration differ from those of ",
                                "the run:\n", detail::join(mismatches, "\n"),
                                "\nThe easiest remedy is to set them to 'auto'."));
}

}  // namespace accelerate
