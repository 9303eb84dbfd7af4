// tests/launch/planning.h - plans for machines that are made up.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/yaml.h"
#include "launch/command.h"
#include "launch/machine_facts.h"
#include "launch/plan.h"
#include "launch/resolve.h"
#include "launch/settings.h"
#include "support/has.h"

namespace accelerate::detail::launch {

using Words = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

/// Around a command line.
struct Around {
  Variables environment = {};
  /// The content of a configuration file, named team.yaml.
  std::string config = {};
  MachineFacts facts = {};
};

/// A machine with GPUs.
inline MachineFacts gpus(int count) {
  MachineFacts facts;
  facts.accelerator = AcceleratorKind::kCuda;
  facts.device_count = count;
  facts.visible_count = count;
  facts.working_directory = "/home/user";
  return facts;
}

/// A machine without, with this many cores.
inline MachineFacts cores(int count) {
  MachineFacts facts;
  facts.physical_cores = [count] { return count; };
  facts.working_directory = "/home/user";
  return facts;
}

/// "a b  c" -> a, b, c
inline Words words_of(const std::string& line) {
  std::istringstream in(line);
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

inline Arguments parsed(const std::string& line) {
  return parse_arguments(launch_command(), words_of(line));
}

inline std::optional<ConfigFile> file_of(const Around& around) {
  if (around.config.empty()) return std::nullopt;
  return launch_config_from(yaml_loads(around.config).as_dict(), "team.yaml");
}

inline LaunchPlan plan_of(const std::string& line, const Around& around = {}) {
  return make_plan(parsed(line), file_of(around), Environment(around.environment), around.facts);
}

inline ResolvedLaunch resolved(const std::string& line, const Around& around = {}) {
  return resolve_launch(parsed(line), file_of(around), Environment(around.environment),
                        around.facts);
}

/// What a plan is refused with; the kind in front of what only Python can do.
inline std::string refusal_of(const std::string& line, const Around& around = {}) {
  try {
    (void)plan_of(line, around);
  } catch (const ConfigError& error) {
    return error.what();
  } catch (const UnsupportedError& error) {
    return std::string("unsupported: ") + error.what();
  }
  return "no error";
}

/// The value of a setting and where it is from: "2 (flag)", "29500 (default)", "bf16 (config
/// team.yaml)".
inline std::string setting(const LaunchPlan& plan, const std::string& name) {
  for (const auto& each : plan.settings) {
    if (each.name != name) continue;
    const std::vector<std::string> sources{"flag", "environment", "config", "default"};
    const auto& source = sources[static_cast<std::size_t>(each.source)];
    return each.value + " (" + source + (each.origin.empty() ? "" : " " + each.origin) + ")";
  }
  return "not there";
}

/// A variable of the plan, or "not set".
inline std::string variable(const LaunchPlan& plan, const std::string& name) {
  const auto found = plan.variables.find(name);
  return found == plan.variables.end() ? "not set" : found->second;
}

inline std::string warnings(const LaunchPlan& plan) {
  std::string text;
  for (const auto& warning : plan.warnings) text += warning + "\n";
  return text;
}

using test::has;
inline testing::AssertionResult starts(const std::string& text, const std::string& part) {
  return (text.starts_with(part) ? testing::AssertionSuccess() : testing::AssertionFailure())
         << "'" << part << "' in front of: " << text;
}

/// A cluster configuration with more lines.
inline std::string config(const std::string& type, const std::string& more = {}) {
  return "compute_environment: LOCAL_MACHINE\ndistributed_type: " + type + "\n" + more;
}

}  // namespace accelerate::detail::launch
