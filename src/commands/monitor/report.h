// src/commands/monitor/report.h - what the page of `accelerate monitor` shows, as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "commands/monitor/runs.h"

namespace accelerate::detail::commands {

struct ReportOptions {
  /// Ids of the runs to compare; nullopt: the latest ones.
  std::optional<std::vector<int>> runs = std::nullopt;
  /// The run whose processes, checkpoints and settings are shown; nullopt: the first of `runs`.
  std::optional<int> focus = std::nullopt;
  CurveView view = {};
};

/// Equal for two moments between which nothing has changed.
[[nodiscard]] std::string report_version(RunSet& runs, double now);

/// All that is shown but logs.
[[nodiscard]] std::string write_report(RunSet& runs, const ReportOptions& options, double now);

}  // namespace accelerate::detail::commands
