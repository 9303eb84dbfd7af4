#include "core/log_format.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

const std::vector<std::string> kTextFields = {"asctime",     "filename",  "funcName", "levelname",
                                              "message",     "module",    "name",     "pathname",
                                              "processName", "threadName"};
const std::vector<std::string> kIntegerFields = {"levelno", "lineno", "process", "thread"};
const std::vector<std::string> kFloatFields = {"created", "msecs", "relativeCreated"};

// relativeCreated counts from here, which is the loading of the library.
const auto kStart = std::chrono::system_clock::now();

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

[[noreturn]] void refuse(const std::string& format, const std::string& why) {
  throw ConfigError(str("The log format '", format, "' ", why));
}

void check_field(const std::string& format, const std::string& name, char conversion) {
  const bool number = contains(kIntegerFields, name) || contains(kFloatFields, name);
  if (!number && !contains(kTextFields, name)) {
    std::vector<std::string> all = kTextFields;
    all.insert(all.end(), kIntegerFields.begin(), kIntegerFields.end());
    all.insert(all.end(), kFloatFields.begin(), kFloatFields.end());
    const std::string meant = nearest(name, all);
    refuse(format,
           str("has a field '", name, "' that does not exist.",
               meant.empty() ? "" : " Did you mean '" + meant + "'?", " Fields: ", join(all), "."));
  }
  const bool fits = conversion == 's' || (number && (conversion == 'd' || conversion == 'f'));
  if (!fits) refuse(format, str("asks for '", name, "' as '", conversion, "', which it is not."));
}

// "-8", "03", "10.3": what printf takes, and no width beyond reason.
bool valid_flags(std::string_view flags) {
  const auto skip = [&](std::string_view set) {
    const auto count = std::min(flags.find_first_not_of(set), flags.size());
    flags.remove_prefix(count);
    return count;
  };
  constexpr std::string_view kDigits = "0123456789";
  skip("-+ #0");
  if (skip(kDigits) > 3) return false;
  if (flags.starts_with('.')) {
    flags.remove_prefix(1);
    if (skip(kDigits) > 3) return false;
  }
  return flags.empty();
}

template <class T>
std::string print(const std::string& directive, T value) {
  std::array<char, 512> buffer;
  const int length = std::snprintf(buffer.data(), buffer.size(), directive.c_str(), value);
  if (length < 0) return {};
  if (static_cast<std::size_t>(length) < buffer.size()) return buffer.data();
  std::string large(static_cast<std::size_t>(length) + 1, '\0');
  std::snprintf(large.data(), large.size(), directive.c_str(), value);
  large.pop_back();
  return large;
}

double seconds_since_epoch(const LogRecord& record) {
  return std::chrono::duration<double>(record.created.time_since_epoch()).count();
}

int milliseconds_of(const LogRecord& record) {
  using std::chrono::milliseconds;
  const auto since = std::chrono::floor<milliseconds>(record.created.time_since_epoch());
  return static_cast<int>(since.count() % 1000);
}

}  // namespace

LogFormat::LogFormat(const std::string& format, std::string datefmt)
    : datefmt_(std::move(datefmt)) {
  std::string text;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      text += format[i];
      continue;
    }
    if (i + 1 < format.size() && format[i + 1] == '%') {
      text += '%';
      ++i;
      continue;
    }
    const auto close = format.find(')', i);
    if (i + 1 >= format.size() || format[i + 1] != '(' || close == std::string::npos) {
      refuse(format, "has a '%' that begins no field. Write %% for the sign itself.");
    }
    Field field;
    field.name = format.substr(i + 2, close - i - 2);
    const auto end = format.find_first_not_of("-+ #0123456789.", close + 1);
    if (end == std::string::npos) {
      refuse(format, str("ends inside the field '", field.name, "'. Write %(", field.name, ")s."));
    }
    field.flags = format.substr(close + 1, end - close - 1);
    if (!valid_flags(field.flags)) {
      refuse(format, str("gives '", field.name, "' the width '", field.flags, "', which is none."));
    }
    field.conversion = format[end];
    check_field(format, field.name, field.conversion);
    if (!text.empty()) parts_.emplace_back(std::exchange(text, {}));
    parts_.emplace_back(std::move(field));
    i = end;
  }
  if (!text.empty()) parts_.emplace_back(std::move(text));
}

std::string LogFormat::asctime(const LogRecord& record) const {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(
      std::chrono::floor<std::chrono::seconds>(record.created));
  std::tm local{};
  ::localtime_r(&seconds, &local);
  std::array<char, 256> buffer{};
  const std::string& format = datefmt_.empty() ? "%Y-%m-%d %H:%M:%S" : datefmt_;
  std::strftime(buffer.data(), buffer.size(), format.c_str(), &local);
  if (!datefmt_.empty()) return buffer.data();
  return buffer.data() + print(",%03d", milliseconds_of(record));
}

std::variant<std::string, long long, double> LogFormat::value_of(const std::string& name,
                                                                 const LogRecord& record) const {
  const std::filesystem::path file = record.where.file_name();
  if (name == "message") return record.message;
  if (name == "name") return record.name;
  if (name == "levelname") return to_string(record.level);
  if (name == "levelno") return static_cast<long long>(record.level);
  if (name == "asctime") return asctime(record);
  if (name == "pathname") return file.string();
  if (name == "filename") return file.filename().string();
  if (name == "module") return file.stem().string();
  if (name == "funcName") return bare_function_name(record.where.function_name());
  if (name == "lineno") return static_cast<long long>(record.where.line());
  if (name == "process") return static_cast<long long>(::getpid());
  if (name == "processName") return std::string("MainProcess");
  if (name == "thread") return static_cast<long long>(::gettid());
  if (name == "threadName") {
    return ::gettid() == ::getpid() ? std::string("MainThread") : str("Thread-", ::gettid());
  }
  if (name == "created") return seconds_since_epoch(record);
  if (name == "msecs") return static_cast<double>(milliseconds_of(record));
  return std::chrono::duration<double, std::milli>(record.created - kStart).count();
}

std::string LogFormat::apply(const LogRecord& record) const {
  std::string line;
  for (const auto& part : parts_) {
    if (const auto* text = std::get_if<std::string>(&part)) {
      line += *text;
      continue;
    }
    const Field& field = std::get<Field>(part);
    const auto value = value_of(field.name, record);
    if (const auto* text = std::get_if<std::string>(&value)) {
      line += field.flags.empty() ? *text : print("%" + field.flags + "s", text->c_str());
      continue;
    }
    const double number = std::holds_alternative<double>(value)
                              ? std::get<double>(value)
                              : static_cast<double>(std::get<long long>(value));
    if (field.conversion == 'f') {
      line += print("%" + field.flags + "f", number);
    } else if (field.conversion == 'd' || std::holds_alternative<long long>(value)) {
      line += print("%" + field.flags + "lld", static_cast<long long>(number));
    } else {
      line += print("%" + field.flags + "s", str(number).c_str());
    }
  }
  return line;
}

std::string bare_function_name(std::string_view signature) {
  // "void f(int)::<lambda(auto:1)> [with auto:1 = int]": a lambda goes by the function around it.
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

}  // namespace accelerate::detail
