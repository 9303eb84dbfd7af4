#include "core/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "accelerate/errors.h"
#include "core/log_format.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate {
namespace detail::inline core {
namespace {

constexpr std::string_view kLibrary = "accelerate";

// The name that `to_string` gives stands before other names of its level.
using LevelName = std::pair<std::string_view, LogLevel>;
constexpr auto kLevelNames = std::to_array<LevelName>({{"NOTSET", LogLevel::kNotset},
                                                       {"DEBUG", LogLevel::kDebug},
                                                       {"INFO", LogLevel::kInfo},
                                                       {"WARNING", LogLevel::kWarning},
                                                       {"WARN", LogLevel::kWarning},
                                                       {"ERROR", LogLevel::kError},
                                                       {"CRITICAL", LogLevel::kCritical},
                                                       {"FATAL", LogLevel::kCritical}});

// The variable counts for the library's own messages before any logger is made. A wrong value is
// reported by `get_logger`, where a caller can catch it.
LogLevel level_of_root() {
  const char* text = std::getenv("ACCELERATE_LOG_LEVEL");
  if (text == nullptr || *text == '\0') return LogLevel::kWarning;
  try {
    return parse_log_level(text, {});
  } catch (const ConfigError&) {
    return LogLevel::kWarning;
  }
}

struct Logging {
  std::mutex mutex;
  std::map<std::string, LogLevel, std::less<>> levels = {{"", level_of_root()}};
  std::shared_ptr<const LogFormat> format =
      std::make_shared<const LogFormat>(LogConfig{}.format, std::string{});
  LogSink sink = {};
  // Sinks are called one at a time, and not under `mutex`: they may ask for a level.
  std::mutex sink_mutex;
  std::set<std::string> warned;
};

// Never destroyed: destructors of other statics may still log.
Logging& logging() {
  static auto* const instance = new Logging;
  return *instance;
}

std::atomic<LogProcessLookup> process_lookup = nullptr;

enum class Speaker : std::uint8_t { kMainProcess, kAnyProcess };

void speak(LogLevel level, const std::string& text, std::source_location where,
           Speaker speaker = Speaker::kMainProcess) {
  if (level < effective_log_level(kLibrary)) return;
  const auto process = log_process();
  if (speaker == Speaker::kMainProcess && process && !process->is_main) return;
  write_log(kLibrary, level, process ? str("[RANK ", process->rank, "] ", text) : text, where);
}

}  // namespace

void set_log_process_lookup(LogProcessLookup lookup) noexcept { process_lookup.store(lookup); }

std::optional<LogProcess> log_process() {
  const LogProcessLookup lookup = process_lookup.load();
  return lookup != nullptr ? lookup() : std::nullopt;
}

void set_log_level(std::string_view name, LogLevel level) {
  const std::scoped_lock lock(logging().mutex);
  logging().levels.insert_or_assign(std::string(name), level);
}

LogLevel effective_log_level(std::string_view name) {
  const std::scoped_lock lock(logging().mutex);
  const auto& levels = logging().levels;
  for (;;) {
    const auto found = levels.find(name);
    if (found != levels.end() && found->second != LogLevel::kNotset) return found->second;
    if (name.empty()) return LogLevel::kNotset;
    const auto dot = name.rfind('.');
    name = dot == std::string_view::npos ? std::string_view{} : name.substr(0, dot);
  }
}

void write_log(std::string_view name, LogLevel level, std::string message,
               std::source_location where) {
  auto& state = logging();
  LogSink sink;
  std::shared_ptr<const LogFormat> format;
  {
    const std::scoped_lock lock(state.mutex);
    sink = state.sink;
    format = state.format;
  }
  LogEntry entry{.name = std::string(name),
                 .level = level,
                 .message = std::move(message),
                 .where = where,
                 .created = std::chrono::system_clock::now(),
                 .line = {}};
  entry.line = format->apply(entry);
  const std::scoped_lock lock(state.sink_mutex);
  if (sink) {
    sink(entry);
  } else {
    // One write: lines of processes that share a terminal do not mix.
    write_fully(STDERR_FILENO, entry.line + "\n");
  }
}

void warn(const std::string& text, std::source_location where) {
  speak(LogLevel::kWarning, text, where);
}

void warn_from_any_rank(const std::string& text, std::source_location where) {
  speak(LogLevel::kWarning, text, where, Speaker::kAnyProcess);
}

void warn_once(const std::string& text, std::source_location where) {
  {
    const std::scoped_lock lock(logging().mutex);
    if (!logging().warned.insert(text).second) return;
  }
  warn(text, where);
}

void info(const std::string& text, std::source_location where) {
  speak(LogLevel::kInfo, text, where);
}

LogLevel parse_log_level(std::string_view text, std::string_view source) {
  const auto found = std::ranges::find(kLevelNames, to_upper(text), &LevelName::first);
  if (found != kLevelNames.end()) return found->second;
  throw ConfigError(str(source.empty() ? "The log level" : source, " is '", text,
                        "', which is not a log level. Choose one of: DEBUG, INFO, WARNING, ERROR, "
                        "CRITICAL."));
}

}  // namespace detail::inline core

std::string to_string(LogLevel level) {
  using detail::kLevelNames;
  const auto found = std::ranges::find(kLevelNames, level, &detail::LevelName::second);
  if (found != kLevelNames.end()) return std::string(found->first);
  return detail::str("Level ", static_cast<int>(level));
}

void basic_config(const LogConfig& config) {
  auto format = std::make_shared<const detail::LogFormat>(config.format, config.datefmt);
  auto& state = detail::logging();
  const std::scoped_lock lock(state.mutex);
  state.format = std::move(format);
  state.sink = config.sink;
  if (config.level) state.levels.insert_or_assign("", *config.level);
}

}  // namespace accelerate
