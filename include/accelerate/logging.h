// accelerate/logging.h - loggers that know which process they are in.
//
//     auto logger = accelerate::get_logger("trainer", "INFO");
//     logger.info("once, by the main process");
//     logger.info(batch_sizes, {.main_process_only = false});  // by every process
//     logger.info(my_part, {.in_order = true});                // Collective: rank 0, then 1, ...
//
// Lines go to stderr as "INFO:trainer:[RANK 0] once, ..." unless `basic_config` says otherwise. The
// library's own warnings take the same way, under the name "accelerate".
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>

#include "accelerate/api.h"
#include "accelerate/enums.h"

namespace accelerate {

/// Python's levels with Python's numbers. `kNotset`: the level of the logger above counts.
enum class LogLevel : int {
  kNotset = 0,
  kDebug = 10,
  kInfo = 20,
  kWarning = 30,
  kError = 40,
  kCritical = 50,
};

/// "WARNING"; "Level 35" for numbers between.
[[nodiscard]] ACCELERATE_API std::string to_string(LogLevel level);
namespace detail::inline core {
[[nodiscard]] ACCELERATE_API LogLevel parse_log_level(std::string_view text,
                                                      std::string_view source);
}
/// Reads DEBUG, INFO, WARNING, ERROR, CRITICAL, and Python's WARN, FATAL, NOTSET, in any case.
/// Anything else throws `ConfigError` that lists the levels; `source` says where the text is from.
template <class E>
  requires std::is_same_v<E, LogLevel>
[[nodiscard]] LogLevel from_string(std::string_view text, std::string_view source = {}) {
  return detail::parse_log_level(text, source);
}

/// One message on its way to the sink.
struct LogEntry {
  std::string name;
  LogLevel level = LogLevel::kInfo;
  std::string message;         ///< with the "[RANK n] " in front
  std::source_location where;  ///< the caller
  std::chrono::system_clock::time_point created;
  std::string line;  ///< formatted, without a line end
};

/// Called with one entry at a time: calls never overlap. Must not log itself.
using LogSink = std::function<void(const LogEntry& entry)>;

struct LogConfig {
  /// The level of the root, which all loggers without one of their own follow. Unset: unchanged.
  std::optional<LogLevel> level = std::nullopt;
  /// Python's fields with Python's flags: `%(asctime)s %(levelname)-8s %(filename)s:%(lineno)d`.
  std::string format = "%(levelname)s:%(name)s:%(message)s";
  /// The format of asctime, as strftime takes it. Empty: "2026-01-31 13:05:00,123".
  std::string datefmt = {};
  /// Where entries go. Unset: stderr, each line in one write.
  LogSink sink = {};
};

/// Sets how and where all loggers of this process write. May be called again. Throws `ConfigError`
/// for a field in `format` that does not exist.
ACCELERATE_API void basic_config(const LogConfig& config = {});

struct LogOptions {
  /// Speak on the main process only.
  bool main_process_only = true;
  /// Collective. All processes speak, one after the other in rank order, whatever
  /// `main_process_only` says. Every process must make the call.
  bool in_order = false;
  /// What the entry names as its origin. A wrapper hands on the location of its own caller.
  std::source_location where = std::source_location::current();
};

/// A named logger. Copies share one state.
///
/// Every call throws `StateError` while there is no `PartialState` (or `Accelerator`) yet: which
/// process this is would not be known.
class ACCELERATE_API MultiProcessAdapter {
 public:
  void log(LogLevel level, std::string_view message, const LogOptions& options = {}) const;

  void debug(std::string_view message, const LogOptions& options = {}) const {
    log(LogLevel::kDebug, message, options);
  }
  void info(std::string_view message, const LogOptions& options = {}) const {
    log(LogLevel::kInfo, message, options);
  }
  void warning(std::string_view message, const LogOptions& options = {}) const {
    log(LogLevel::kWarning, message, options);
  }
  void error(std::string_view message, const LogOptions& options = {}) const {
    log(LogLevel::kError, message, options);
  }
  void critical(std::string_view message, const LogOptions& options = {}) const {
    log(LogLevel::kCritical, message, options);
  }

  /// A warning that this logger gives once for one text and one choice of processes.
  void warning_once(std::string_view message, const LogOptions& options = {}) const;

  [[nodiscard]] const std::string& name() const;
  /// Whether a message of this level would be written by a process that speaks.
  [[nodiscard]] bool is_enabled_for(LogLevel level) const;
  /// Sets the level of loggers of this name; `kNotset` makes them follow the one above.
  void set_level(LogLevel level) const;

 private:
  struct State;
  explicit MultiProcessAdapter(std::shared_ptr<State> state);
  friend ACCELERATE_API MultiProcessAdapter get_logger(std::string name,
                                                       std::optional<std::string> log_level);

  std::shared_ptr<State> state_;
};

/// The logger of this name. Dots make a hierarchy, as in Python: "trainer.data" follows "trainer",
/// which follows the root, which starts at WARNING.
///
/// `log_level`, or else the variable ACCELERATE_LOG_LEVEL, becomes the level of this logger and of
/// the root. Throws `ConfigError` for a level that does not exist.
[[nodiscard]] ACCELERATE_API MultiProcessAdapter
get_logger(std::string name, std::optional<std::string> log_level = std::nullopt);

}  // namespace accelerate
