#include "tracking/tracker_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <ctime>
#include <random>
#include <system_error>
#include <vector>

#include "accelerate/errors.h"
#include "core/descriptor.h"
#include "core/json.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "tracking/encodings.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, int error) {
  constexpr std::array kOfThePath{ENOTDIR, EISDIR, ENAMETOOLONG, ELOOP, EINVAL};
  const auto message =
      str("Cannot write '", path.string(), "': ", std::generic_category().message(error), ".");
  if (std::ranges::find(kOfThePath, error) != kOfThePath.end()) throw ArgumentError(message);
  throw ConfigError(message);
}

/// Opens the file, and makes its folder if that is what is missing.
Descriptor open_to_write(const fs::path& path, int flags) {
  const auto open = [&] {
    return ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666);
  };
  int fd = open();
  if (fd < 0 && errno == ENOENT && path.has_parent_path()) {
    make_folder(path.parent_path());
    fd = open();
  }
  if (fd < 0) refuse(path, errno);
  return Descriptor(fd);
}

}  // namespace

void append_to_file(const fs::path& path, std::string_view bytes) {
  auto fd = open_to_write(path, O_APPEND);
  struct stat before{};
  if (::fstat(fd.get(), &before) != 0) refuse(path, errno);
  if (!write_fully(fd.get(), bytes)) {
    const int failed = errno;
    static_cast<void>(::ftruncate(fd.get(), before.st_size));
    refuse(path, failed);
  }
  if (const int failed = fd.reset(); failed != 0) refuse(path, failed);
}

// Without a flush to the disk, unlike `OutputFile`: this runs at every step.
void replace_file(const fs::path& path, std::string_view bytes) {
  fs::path temporary = path;
  temporary += str(".", ::getpid(), ".tmp");
  auto fd = open_to_write(temporary, O_TRUNC);
  int failed = write_fully(fd.get(), bytes) ? 0 : errno;
  if (const int closed = fd.reset(); failed == 0) failed = closed;
  if (failed == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) failed = errno;
  if (failed == 0) return;
  ::unlink(temporary.c_str());
  refuse(path, failed);
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse(folder, error.value());
}

bool is_file_name(const std::string& key) {
  return std::ranges::all_of(split(key, '/'), [](const std::string& part) {
    return !part.empty() && part != "." && part != ".." && part.find('\0') == std::string::npos;
  });
}

fs::path inside(const fs::path& folder, const std::string& key) {
  if (is_file_name(key)) return folder / key;
  throw ArgumentError(str("'", key,
                          "' cannot be the name of a file: the parts between '/' must "
                          "not be empty, '.' or '..'. Rename the value."));
}

std::optional<double> number_of(const Value& value) {
  if (value.is_bool()) return value.as_bool() ? 1.0 : 0.0;
  if (value.is_int() || value.is_double()) return value.as_double();
  return std::nullopt;
}

Value json_value(const Value& value, NotFinite numbers) {
  if (value.is_bytes() || value.leaf() != nullptr) return value.repr();
  if (value.is_double() && !std::isfinite(value.as_double()) && numbers != NotFinite::kBare) {
    const bool words = numbers == NotFinite::kWords;
    if (std::isnan(value.as_double())) return words ? "NaN" : "nan";
    return str(value.as_double() < 0 ? "-" : "", words ? "Infinity" : "inf");
  }
  if (value.is_dict()) {
    Value::Dict copy;
    for (const auto& [key, item] : value.as_dict()) copy.set(key, json_value(item, numbers));
    return copy;
  }
  if (!value.is_list() && !value.is_tuple()) return value;
  Value::List copy;
  for (const auto& item : value.items()) copy.push_back(json_value(item, numbers));
  return Value::list(std::move(copy));
}

std::string json_line(const Value& value, NotFinite numbers) {
  return json_dumps(json_value(value, numbers), {.replace_invalid = true});
}

std::string python_str(const Value& value) {
  return value.is_string() ? value.as_string() : value.repr();
}

Value with_valid_text(const Value& value) {
  if (value.is_string()) return valid_utf8(value.as_string());
  if (value.is_list() || value.is_tuple()) {
    Value::List items;
    for (const auto& item : value.items()) items.push_back(with_valid_text(item));
    return value.is_list() ? Value(std::move(items)) : Value::tuple(std::move(items));
  }
  if (!value.is_dict()) return value;
  Value::Dict entries;
  for (const auto& [key, item] : value.as_dict()) {
    entries.set(key.is_string() ? ValueKey(valid_utf8(key.as_string())) : key,
                with_valid_text(item));
  }
  return entries;
}

std::string csv_field(const std::string& text, char delimiter) {
  auto valid = valid_utf8(text);
  if (valid.find_first_of(str(delimiter, "\"\r\n")) == std::string::npos) return valid;
  std::string quoted = "\"";
  for (const char c : valid) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + '"';
}

void refuse_value(const Value& value, std::string_view takes) {
  throw ArgumentError(str("The value is a ", value.kind_name(), ". Expected ", takes, "."));
}

void check_kwargs(std::string_view tracker, const Value::Dict& kwargs,
                  std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : kwargs) {
    const std::vector<std::string> names(known.begin(), known.end());
    if (std::ranges::find(names, key.to_string()) != names.end()) continue;
    throw ArgumentError(str("The tracker ", tracker, " has no setting '", key.to_string(), "'.",
                            did_you_mean(key.to_string(), names),
                            names.empty() ? "" : " It has: ", join(names), "."));
  }
}

std::optional<std::string> text_in(const Value::Dict& kwargs, std::string_view key) {
  const Value* value = kwargs.get(key);
  if (value == nullptr || value->is_none()) return std::nullopt;
  return value->as_string();
}

std::int64_t now_milliseconds() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

double now_seconds() {
  using namespace std::chrono;
  return duration<double>(system_clock::now().time_since_epoch()).count();
}

std::string formatted_time(const char* format, bool universal) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  static_cast<void>(universal ? ::gmtime_r(&now, &parts) : ::localtime_r(&now, &parts));
  std::array<char, 64> text{};
  return {text.data(), std::strftime(text.data(), text.size(), format, &parts)};
}

std::string random_text(std::size_t count, std::string_view alphabet) {
  std::random_device random;
  std::uniform_int_distribution<std::size_t> choice(0, alphabet.size() - 1);
  std::string text;
  while (text.size() < count) text += alphabet[choice(random)];
  return text;
}

}  // namespace accelerate::detail::tracking
