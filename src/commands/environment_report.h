// src/commands/environment_report.h - what `accelerate env` shows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/value.h"

namespace accelerate::detail::commands {

/// The LibTorch that the library runs with, as `accelerate-torch versions` reports it.
struct TorchVersions {
  std::string torch = {};
  std::string path = {};
  std::optional<std::string> cuda = std::nullopt;
  std::optional<std::string> nccl = std::nullopt;
};

struct EnvironmentReport {
  std::string accelerate_version = {};
  std::string platform = {};
  /// The `accelerate` in PATH; "" if there is none.
  std::string location = {};
  std::string compiler = {};
  std::optional<TorchVersions> libtorch = std::nullopt;
  bool cuda = false;
  std::string cpu = {};  ///< "AMD EPYC 9554"; "" where the kernel does not tell
  int cpu_cores = 0;
  int cpu_threads = 0;
  std::int64_t memory_bytes = 0;  ///< 0 where the kernel does not tell
  std::vector<std::string> gpus = {};
  std::string driver = {};
  /// Of the file passed, or the default one; nullopt if there is none.
  std::optional<Value::Dict> config = std::nullopt;
  bool config_passed = false;

  /// The lines to paste into an issue.
  [[nodiscard]] std::string text() const;
  [[nodiscard]] Value::Dict to_dict() const;
};

/// Looks at this machine, without its configuration file. `accelerate-torch` is run.
[[nodiscard]] EnvironmentReport report_environment(const Environment& environment);

}  // namespace accelerate::detail::commands
