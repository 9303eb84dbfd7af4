// src/core/log.h - how the library itself speaks: through the loggers of accelerate/logging.h.
//
// Nothing in the library writes to stdout or stderr by any other way.
#pragma once

#include <optional>
#include <source_location>
#include <string>
#include <string_view>

#include "accelerate/logging.h"

namespace accelerate::detail::inline core {

/// A warning, by the main process only (by every process while no state is up).
void warn(const std::string& text, std::source_location where = std::source_location::current());

/// A warning by this process, whatever its rank: about a fault that only it can see.
void warn_from_any_rank(const std::string& text,
                        std::source_location where = std::source_location::current());

/// `warn`, at most once per process for one text.
void warn_once(const std::string& text,
               std::source_location where = std::source_location::current());

void info(const std::string& text, std::source_location where = std::source_location::current());

/// Which process this is, as far as messages and progress bars are concerned.
struct LogProcess {
  int rank = 0;
  bool is_main = true;
  int local_rank = 0;
};

/// Told by the state layer: how to ask for the process.
using LogProcessLookup = std::optional<LogProcess> (*)();
void set_log_process_lookup(LogProcessLookup lookup) noexcept;
/// Nothing while no state is up.
[[nodiscard]] std::optional<LogProcess> log_process();

/// Levels by logger name. "" is the root.
void set_log_level(std::string_view name, LogLevel level);
[[nodiscard]] LogLevel effective_log_level(std::string_view name);

/// Formats and hands to the sink, whatever the level. `message` is final.
void write_log(std::string_view name, LogLevel level, std::string message,
               std::source_location where);

}  // namespace accelerate::detail::inline core
