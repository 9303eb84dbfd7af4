// src/launch/settings.h - the settings of a launch with their sources, merged by precedence:
// flag, environment, configuration file, default.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/config.h"
#include "accelerate/environment.h"
#include "launch/command.h"
#include "launch/flags.h"
#include "launch/plan.h"

namespace accelerate::detail::launch {

/// The content of a configuration file.
struct ConfigFile {
  std::string path;
  Config config;
  /// The keys that the file has; all other settings have their defaults.
  std::set<std::string, std::less<>> keys = {};
};

/// Reads the file of --config_file, or the default one if it exists and --cpu was not typed. Throws
/// `ConfigError`.
[[nodiscard]] std::optional<ConfigFile> read_launch_config(const Arguments& arguments,
                                                           const Environment& environment);
/// A configuration file made from its content.
[[nodiscard]] ConfigFile launch_config_from(const Value::Dict& content, const std::string& path);

/// Values by flag name, in the form of `canonical_value`.
class Settings {
 public:
  void set(std::string_view name, std::string value, SettingSource source, std::string origin = {});

  [[nodiscard]] bool has(std::string_view name) const { return values_.contains(name); }
  [[nodiscard]] std::optional<std::string> text(std::string_view name) const;
  /// True if the setting exists and is "true".
  [[nodiscard]] bool truth(std::string_view name) const;
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view name) const;
  [[nodiscard]] std::optional<double> number(std::string_view name) const;
  /// `kDefault` for a setting that does not exist.
  [[nodiscard]] SettingSource source(std::string_view name) const;
  /// The variable or file it came from.
  [[nodiscard]] std::string origin(std::string_view name) const;
  /// The name in messages: "--num_processes", "MASTER_PORT", "'num_processes' in FILE".
  [[nodiscard]] std::string label(std::string_view name) const;

  /// All settings, in the order of the flags.
  [[nodiscard]] std::vector<Setting> list() const;

 private:
  std::map<std::string, Setting, std::less<>> values_;
};

/// Looks up the flags for which `wanted` returns true in all four sources. Typed flags are always
/// taken.
void merge_settings(std::span<const Flag> flags, const Arguments& arguments,
                    const Environment& environment, const std::optional<ConfigFile>& config,
                    const std::function<bool(const Flag&)>& wanted, Settings& settings);

}  // namespace accelerate::detail::launch
