#include "launch/settings.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "accelerate/errors.h"
#include "core/config.h"
#include "core/files.h"
#include "core/numbers.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

namespace fs = std::filesystem;

// Python's questionnaire writes the left names, its launcher reads the right ones.
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kOldKeys{{
    {"fp8_amax_history_length", "fp8_amax_history_len"},
    {"fp8_amax_compute_algorithm", "fp8_amax_compute_algo"},
    {"fp8_optimization_level", "fp8_opt_level"},
}};

// The flag of a key. In some sections keys may omit the prefix.
std::string flag_of_key(std::string_view section, std::string key) {
  const auto prefix = optional_section_prefix(section);
  if (!key.starts_with(prefix)) key = str(prefix, key);
  for (const auto& [old, current] : kOldKeys) {
    if (key == old) key = current;
  }
  return key;
}

std::optional<std::string> text_of(const Value& value, const std::string& source) {
  if (value.is_none()) return std::nullopt;
  if (value.is_bool()) return value.as_bool() ? "true" : "false";
  if (value.is_int() || value.is_double()) return value.repr();
  if (value.is_string()) return value.as_string();
  if (!value.is_list()) {
    throw ConfigError(str(source, " is a ", value.kind_name(), ", expected a single value."));
  }
  std::vector<std::string> parts;
  for (const auto& item : value.as_list()) {
    if (auto text = text_of(item, source)) parts.push_back(*text);
  }
  return join(parts, ",");
}

// The values of a configuration file by flag name.
class FileValues {
 public:
  explicit FileValues(const std::optional<ConfigFile>& file) : file_(file) {
    if (!file_ || !std::holds_alternative<ClusterConfig>(file_->config)) return;
    values_ = std::get<ClusterConfig>(file_->config).to_dict();
  }

  std::optional<std::string> find(const Flag& flag) const {
    if (flag.key.empty()) return std::nullopt;
    const Value* value = values_.get(flag.key);
    if (value == nullptr) return std::nullopt;
    if (flag.key.ends_with("_config")) {
      return value->is_dict() ? in_section(flag, value->as_dict()) : std::nullopt;
    }
    // Old files have `fp16: true` instead; ClusterConfig converts it to a precision.
    if (!file_->keys.contains(flag.key) && flag.key != "mixed_precision") return std::nullopt;
    return text_of(*value, source(flag.key));
  }

  std::string source(std::string_view key) const {
    return str("'", key, "' in ", file_ ? file_->path : "");
  }

 private:
  std::optional<std::string> in_section(const Flag& flag, const Value::Dict& section) const {
    std::optional<std::string> found;
    for (const auto& [key, value] : section) {
      if (flag_of_key(flag.key, key.to_string()) != flag.name) continue;
      if (auto text = text_of(value, source(key.to_string()))) found = std::move(text);
    }
    return found;
  }

  const std::optional<ConfigFile>& file_;
  Value::Dict values_;
};

// The value of the flag's variable. Python's launcher writes None for settings without a value.
std::optional<std::string> from_environment(const Flag& flag, const Environment& environment) {
  if (flag.name == "fp8_override_linear_precision") {
    std::vector<std::string> words;
    for (const auto* part : {"FPROP", "DGRAD", "WGRAD"}) {
      words.push_back(environment.get(str("ACCELERATE_FP8_OVERRIDE_", part)).value_or(""));
    }
    if (std::ranges::all_of(words, [](const auto& w) { return w.empty(); })) return std::nullopt;
    for (auto& word : words) word = word.empty() ? "false" : word;
    return join(words, ",");
  }
  // The number of threads has rules of its own (resolve.cpp).
  if (flag.variable.empty() || flag.variable == "OMP_NUM_THREADS") return std::nullopt;
  auto text = environment.get(std::string(flag.variable));
  if (text == "None") return std::nullopt;
  return text;
}

std::string_view variable_of(const Flag& flag) {
  return flag.kind == FlagKind::kTruths ? "ACCELERATE_FP8_OVERRIDE_*" : flag.variable;
}

// Like Python's launcher, accepts precisions in any case.
std::string checked(const Flag& flag, const std::string& text, const std::string& source) {
  return canonical_value(flag, flag.name == "mixed_precision" ? to_lower(text) : text, source);
}

}  // namespace

ConfigFile launch_config_from(const Value::Dict& content, const std::string& path) {
  ConfigFile file{.path = path, .config = config_from(content, path)};
  // The record does not tell which keys the file has.
  for (const auto& [key, value] : content) {
    if (!value.is_none()) file.keys.insert(key.to_string());
  }
  return file;
}

std::optional<ConfigFile> read_launch_config(const Arguments& arguments,
                                             const Environment& environment) {
  fs::path path;
  if (const auto given = arguments.values.find("config_file"); given != arguments.values.end()) {
    path = expand_user(given->second, environment);
  } else {
    path = default_config_file(environment);
    std::error_code ignored;
    if (arguments.on("cpu") || !fs::is_regular_file(path, ignored)) return std::nullopt;
  }
  return launch_config_from(read_config_file(path), path.string());
}

void Settings::set(std::string_view name, std::string value, SettingSource source,
                   std::string origin) {
  values_[std::string(name)] = Setting{.name = std::string(name),
                                       .value = std::move(value),
                                       .source = source,
                                       .origin = std::move(origin)};
}

std::optional<std::string> Settings::text(std::string_view name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return std::nullopt;
  return found->second.value;
}

bool Settings::truth(std::string_view name) const { return text(name) == "true"; }

std::optional<std::int64_t> Settings::integer(std::string_view name) const {
  const auto value = text(name);
  if (!value) return std::nullopt;
  return parse_number<std::int64_t>(*value);
}

std::optional<double> Settings::number(std::string_view name) const {
  const auto value = text(name);
  if (!value) return std::nullopt;
  return read_double(*value);
}

SettingSource Settings::source(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? SettingSource::kDefault : found->second.source;
}

std::string Settings::origin(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::string() : found->second.origin;
}

std::string Settings::label(std::string_view name) const {
  const auto found = values_.find(name);
  const bool there = found != values_.end();
  if (there && found->second.source == SettingSource::kEnvironment) return found->second.origin;
  if (there && found->second.source == SettingSource::kConfig) {
    const Flag* flag = find_flag(name);
    const bool own_key = flag != nullptr && !flag->key.empty() && !flag->key.ends_with("_config");
    return str("'", own_key ? flag->key : name, "' in ", found->second.origin);
  }
  return str("--", name);
}

std::vector<Setting> Settings::list() const {
  std::vector<Setting> result;
  for (const Flag& flag : launch_flags()) {
    const auto found = values_.find(flag.name);
    if (found != values_.end()) result.push_back(found->second);
  }
  return result;
}

void merge_settings(std::span<const Flag> flags, const Arguments& arguments,
                    const Environment& environment, const std::optional<ConfigFile>& config,
                    const std::function<bool(const Flag&)>& wanted, Settings& settings) {
  const FileValues file(config);
  for (const Flag& flag : flags) {
    const auto typed = arguments.values.find(flag.name);
    if (typed != arguments.values.end()) {
      settings.set(flag.name, typed->second, SettingSource::kFlag);
    } else if (!wanted(flag)) {
      continue;
    } else if (const auto text = from_environment(flag, environment)) {
      const std::string name(variable_of(flag));
      settings.set(flag.name, checked(flag, *text, name), SettingSource::kEnvironment, name);
    } else if (const auto said = file.find(flag)) {
      settings.set(flag.name, checked(flag, *said, file.source(flag.key)), SettingSource::kConfig,
                   config->path);
    } else if (!flag.fallback.empty()) {
      settings.set(flag.name, std::string(flag.fallback), SettingSource::kDefault);
    }
  }
}

}  // namespace accelerate::detail::launch
