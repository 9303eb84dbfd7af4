#include "core/log_format.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

// relativeCreated counts from here, which is the loading of the library.
const auto kStart = std::chrono::system_clock::now();

using std::chrono::duration;
using std::chrono::floor;
using std::chrono::milliseconds;

template <class T>
std::string print(const std::string& directive, T value) {
  const int length = std::snprintf(nullptr, 0, directive.c_str(), value);
  std::string text(static_cast<std::size_t>(std::max(length, 0)) + 1, '\0');
  std::snprintf(text.data(), text.size(), directive.c_str(), value);
  text.pop_back();
  return text;
}

std::int64_t milliseconds_of(const LogEntry& entry) {
  return floor<milliseconds>(entry.created.time_since_epoch()).count() % 1000;
}

std::string asctime(const LogEntry& entry, const std::string& datefmt) {
  const auto seconds =
      std::chrono::system_clock::to_time_t(floor<std::chrono::seconds>(entry.created));
  std::tm local{};
  ::localtime_r(&seconds, &local);
  std::array<char, 256> buffer{};
  const std::string& format = datefmt.empty() ? "%Y-%m-%d %H:%M:%S" : datefmt;
  std::strftime(buffer.data(), buffer.size(), format.c_str(), &local);
  if (!datefmt.empty()) return buffer.data();
  return buffer.data() + print(",%03d", static_cast<int>(milliseconds_of(entry)));
}

std::filesystem::path file_of(const LogEntry& entry) { return entry.where.file_name(); }

/// A field of a format: a text, a whole number or a double.
struct LogField {
  std::string_view name;
  Value (*value)(const LogEntry& entry, const std::string& datefmt);
};

using Entry = LogEntry;
using Text = std::string;
// clang-format off
constexpr auto kFields = std::to_array<LogField>({
    {"asctime", [](const Entry& e, const Text& datefmt) { return Value(asctime(e, datefmt)); }},
    {"filename", [](const Entry& e, const Text&) { return Value(file_of(e).filename().string()); }},
    {"funcName", [](const Entry& e, const Text&) { return Value(bare_function_name(e.where.function_name())); }},
    {"levelname", [](const Entry& e, const Text&) { return Value(to_string(e.level)); }},
    {"message", [](const Entry& e, const Text&) { return Value(e.message); }},
    {"module", [](const Entry& e, const Text&) { return Value(file_of(e).stem().string()); }},
    {"name", [](const Entry& e, const Text&) { return Value(e.name); }},
    {"pathname", [](const Entry& e, const Text&) { return Value(file_of(e).string()); }},
    {"processName", [](const Entry&, const Text&) { return Value("MainProcess"); }},
    {"threadName", [](const Entry&, const Text&) {
       return Value(::gettid() == ::getpid() ? "MainThread" : str("Thread-", ::gettid()));
     }},
    {"levelno", [](const Entry& e, const Text&) { return Value(static_cast<int>(e.level)); }},
    {"lineno", [](const Entry& e, const Text&) { return Value(e.where.line()); }},
    {"process", [](const Entry&, const Text&) { return Value(::getpid()); }},
    {"thread", [](const Entry&, const Text&) { return Value(::gettid()); }},
    {"created", [](const Entry& e, const Text&) { return Value(duration<double>(e.created.time_since_epoch()).count()); }},
    {"msecs", [](const Entry& e, const Text&) { return Value(static_cast<double>(milliseconds_of(e))); }},
    {"relativeCreated", [](const Entry& e, const Text&) { return Value(duration<double, std::milli>(e.created - kStart).count()); }}});
// clang-format on

[[noreturn]] void refuse(const std::string& format, const std::string& why) {
  throw ConfigError(str("The log format '", format, "' ", why));
}

// "-8", "03", "10.3": what printf takes, with at most three digits each.
bool valid_flags(std::string_view flags) {
  flags.remove_prefix(std::min(flags.find_first_not_of("-+ #0"), flags.size()));
  const auto parts = split(flags, '.');
  return parts.size() <= 2 && std::ranges::all_of(parts, [](const std::string& part) {
           return part.size() <= 3 && part.find_first_not_of("0123456789") == std::string::npos;
         });
}

}  // namespace

LogFormat::LogFormat(const std::string& format, std::string datefmt)
    : datefmt_(std::move(datefmt)) {
  for (std::size_t i = 0; i < format.size();) {
    const auto percent = std::min(format.find('%', i), format.size());
    if (percent > i) parts_.push_back({format.substr(i, percent - i), ""});
    if (percent == format.size()) return;
    if (format.compare(percent, 2, "%%") == 0) {
      parts_.push_back({"%", ""});
      i = percent + 2;
      continue;
    }
    const auto close = format.find(')', percent);
    if (format.compare(percent, 2, "%(") != 0 || close == std::string::npos) {
      refuse(format, "has a '%' that begins no field. Write %% for the sign itself.");
    }
    auto name = format.substr(percent + 2, close - percent - 2);
    const auto end = format.find_first_not_of("-+ #0123456789.", close + 1);
    if (end == std::string::npos) {
      refuse(format, str("ends inside the field '", name, "'. Write %(", name, ")s."));
    }
    add_field(format, std::move(name), format.substr(close + 1, end - close - 1), format[end]);
    i = end + 1;
  }
}

void LogFormat::add_field(const std::string& format, std::string name, const std::string& flags,
                          char conversion) {
  if (!valid_flags(flags)) {
    refuse(format, str("gives '", name, "' the width '", flags, "', which is none."));
  }
  const auto found = std::ranges::find(kFields, name, &LogField::name);
  if (found == kFields.end()) {
    std::vector<std::string> all;
    for (const auto& field : kFields) all.emplace_back(field.name);
    refuse(format, str("has a field '", name, "' that does not exist.", did_you_mean(name, all),
                       " Fields: ", join(all), "."));
  }
  const auto example = found->value({}, datefmt_);
  const bool number = !example.is_string() && (conversion == 'd' || conversion == 'f');
  if (!number && conversion != 's') {
    refuse(format, str("asks for '", name, "' as '", conversion, "', which it is not."));
  }
  if (conversion == 's' && example.is_int()) conversion = 'd';
  parts_.push_back(
      {std::move(name), str("%", flags, conversion == 'd' ? "lld" : std::string(1, conversion))});
}

std::string LogFormat::apply(const LogEntry& entry) const {
  std::string line;
  for (const auto& [text, directive] : parts_) {
    if (directive.empty()) {
      line += text;
      continue;
    }
    const auto value = std::ranges::find(kFields, text, &LogField::name)->value(entry, datefmt_);
    if (value.is_string() && directive == "%s") {
      line += value.as_string();
    } else if (directive.ends_with('f')) {
      line += print(directive, value.as_double());
    } else if (directive.ends_with('d')) {
      line += print(directive, static_cast<long long>(value.as_double()));
    } else {
      line += print(directive,
                    value.is_string() ? value.as_string().c_str() : str(value.as_double()).c_str());
    }
  }
  return line;
}

std::string bare_function_name(std::string_view signature) {
  // "void f(int)::<lambda(auto:1)> [with auto:1 = int]": a lambda has the name of the function
  // around it.
  if (const auto lambda = signature.find("::<lambda"); lambda != std::string_view::npos) {
    signature = signature.substr(0, lambda);
  }
  if (const auto with = signature.find(" [with "); with != std::string_view::npos) {
    signature = signature.substr(0, with);
  }
  // The last '(' at depth 0 of <> and () begins the parameters.
  std::size_t parameters = std::string_view::npos;
  int depth = 0;
  for (std::size_t i = 0; i < signature.size(); ++i) {
    const char c = signature[i];
    if (c == '(' && depth == 0) parameters = i;
    if (c == '(' || c == '<') ++depth;
    if (c == ')' || c == '>') --depth;
  }
  std::string_view name = signature.substr(0, parameters);
  if (const auto start = name.find_last_of(" :*&"); start != std::string_view::npos) {
    name = name.substr(start + 1);
  }
  return std::string(name);
}

}  // namespace accelerate::detail::inline core
