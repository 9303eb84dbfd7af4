#include "accelerate/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <mutex>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/process_variables.h"
#include "core/text.h"

extern char** environ;  // NOLINT: POSIX keeps the variables here and no header declares it

namespace accelerate {
namespace {

using detail::join;
using detail::str;

constexpr std::string_view kOurPrefix = "ACCELERATE_";

// `setenv` and `environ` are not thread-safe: hold this lock to change or read the environment.
std::mutex& environment_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<std::string, std::string> read_all() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=', 1);  // Linux allows a name to begin with '='
    if (equals == std::string_view::npos) continue;
    // The first of two entries with one name is the one that getenv() gives.
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

// Destructors use this: no throw. `setenv` fails only for want of memory or for a name that was
// checked when it came in.
void put(const std::string& name, const std::optional<std::string>& value) noexcept {
  if (value) {
    ::setenv(name.c_str(), value->c_str(), /*overwrite=*/1);
  } else {
    ::unsetenv(name.c_str());
  }
}

void check_variable(const std::string& name, const std::string& value) {
  if (name.empty() || name.find('=') != std::string::npos || name.find('\0') != std::string::npos) {
    throw ArgumentError(str("'", name, "' cannot be the name of an environment variable."));
  }
  if (value.find('\0') != std::string::npos) {
    throw ArgumentError(str("The value of ", name, " has a zero byte in it."));
  }
}

std::map<std::string, std::string> with_prefix(std::map<std::string, std::string> variables) {
  std::erase_if(variables, [](const auto& entry) { return !entry.first.starts_with(kOurPrefix); });
  return variables;
}

std::optional<bool> truth(std::string_view text) {
  static constexpr std::array<std::string_view, 6> kTrue{"y", "yes", "t", "true", "on", "1"};
  static constexpr std::array<std::string_view, 6> kFalse{"n", "no", "f", "false", "off", "0"};
  const auto word = detail::to_lower(text);
  if (std::ranges::find(kTrue, word) != kTrue.end()) return true;
  if (std::ranges::find(kFalse, word) != kFalse.end()) return false;
  return std::nullopt;
}

constexpr std::string_view kTruthWords = "y, yes, t, true, on, 1 or n, no, f, false, off, 0";

std::int64_t whole_number(const std::string& name, const std::string& text) {
  auto digits = detail::trim(text);
  if (digits.starts_with('+')) digits.remove_prefix(1);
  std::int64_t number = 0;
  const auto* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  if (error == std::errc::result_out_of_range) {
    throw ConfigError(str(name, " is '", text, "', which is beyond 64 bits."));
  }
  if (error != std::errc() || stop != end) {
    throw ConfigError(str(name, " is '", text, "', which is not a whole number."));
  }
  return number;
}

// The named variables only: a copy of all of them for one look would be waste.
Environment pick(std::span<const std::string> names) {
  const std::lock_guard lock(environment_mutex());
  std::map<std::string, std::string> variables;
  for (const auto& name : names) {
    if (const char* value = std::getenv(name.c_str())) variables.emplace(name, value);
  }
  return Environment(std::move(variables));
}

Environment pick(const std::string& name) { return pick(std::span(&name, 1)); }

bool can_stand_in_a_line(const std::string& text) {
  return !text.empty() && text.find_first_of(";\n<> ") == std::string::npos;
}

}  // namespace

Environment::Environment(std::initializer_list<std::pair<const std::string, std::string>> variables)
    : variables_(variables) {}

Environment::Environment(std::map<std::string, std::string> variables)
    : variables_(std::move(variables)) {}

Environment Environment::process() {
  const std::lock_guard lock(environment_mutex());
  return Environment(read_all());
}

std::optional<std::string> Environment::get(const std::string& name) const {
  const auto found = variables_.find(name);
  if (found == variables_.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

bool Environment::flag(const std::string& name, bool fallback) const {
  const auto text = get(name);
  if (!text) return fallback;
  if (const auto value = truth(*text)) return *value;
  throw ConfigError(
      str(name, " is '", *text, "', which is no truth value. Use ", kTruthWords, "."));
}

std::int64_t Environment::integer(std::span<const std::string> names, std::int64_t fallback) const {
  for (const auto& name : names) {
    const auto text = get(name);
    if (!text) continue;
    // A negative number means "not told": launchers write -1 for a rank they do not know.
    if (const auto number = whole_number(name, *text); number >= 0) return number;
  }
  return fallback;
}

std::int64_t Environment::integer(std::initializer_list<std::string> names,
                                  std::int64_t fallback) const {
  return integer(std::span<const std::string>(names.begin(), names.size()), fallback);
}

bool str_to_bool(std::string_view text) {
  if (const auto value = truth(text)) return *value;
  throw ArgumentError(str("invalid truth value '", text, "'. Use ", kTruthWords, "."));
}

bool parse_flag_from_env(const std::string& name, bool fallback) {
  return pick(name).flag(name, fallback);
}

std::string parse_choice_from_env(const std::string& name, const std::string& fallback) {
  return pick(name).get(name).value_or(fallback);
}

std::int64_t get_int_from_env(const std::vector<std::string>& names, std::int64_t fallback) {
  return pick(names).integer(names, fallback);
}

PatchedEnvironment::PatchedEnvironment(std::vector<std::pair<std::string, std::string>> variables) {
  for (auto& [name, value] : variables) {
    check_variable(name, value);
    name = detail::to_upper(name);
  }
  const std::lock_guard lock(environment_mutex());
  // All that can throw comes first; from then on everything set is also remembered.
  before_.reserve(variables.size());
  for (const auto& [name, value] : variables) {
    const char* before = std::getenv(name.c_str());
    before_.emplace_back(name, before ? std::optional<std::string>(before) : std::nullopt);
  }
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
}

PatchedEnvironment::~PatchedEnvironment() {
  const std::lock_guard lock(environment_mutex());
  for (const auto& [name, value] : before_) put(name, value);
}

ClearedEnvironment::ClearedEnvironment() {
  const std::lock_guard lock(environment_mutex());
  before_ = read_all();
  ::clearenv();
}

ClearedEnvironment::~ClearedEnvironment() {
  const std::lock_guard lock(environment_mutex());
  ::clearenv();
  for (const auto& [name, value] : before_) put(name, value);
}

PurgedEnvironment::PurgedEnvironment() {
  const std::lock_guard lock(environment_mutex());
  before_ = with_prefix(read_all());
}

PurgedEnvironment::~PurgedEnvironment() {
  const std::lock_guard lock(environment_mutex());
  for (const auto& [name, value] : with_prefix(read_all())) {
    if (!before_.contains(name)) put(name, std::nullopt);
  }
  for (const auto& [name, value] : before_) put(name, value);
}

std::vector<std::string> convert_dict_to_env_variables(
    const std::vector<std::pair<std::string, std::string>>& variables) {
  std::vector<std::string> lines;
  for (const auto& [name, value] : variables) {
    if (can_stand_in_a_line(name) && can_stand_in_a_line(value)) {
      lines.push_back(str(name, "=", value, "\n"));
    } else {
      detail::warn(str("The variable '", name, "' with the value '", value,
                       "' is left out: a part is empty or has a blank, a line end or one of ; < > "
                       "in it."));
    }
  }
  return lines;
}

void detail::set_process_variable(const std::string& name,
                                  const std::optional<std::string>& value) {
  const std::lock_guard lock(environment_mutex());
  put(name, value);
}

std::string env_var_path_add(const std::string& name, const std::string& path) {
  std::vector<std::string> parts;
  for (auto& part : detail::split(pick(name).get(name).value_or(""), ':')) {
    if (!part.empty()) parts.push_back(std::move(part));
  }
  parts.push_back(path);
  return join(parts, ":");
}

}  // namespace accelerate
