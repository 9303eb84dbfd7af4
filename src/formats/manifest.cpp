#include "formats/manifest.h"

#include <algorithm>
#include <charconv>
#include <mutex>
#include <system_error>
#include <tuple>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "core/folders.h"
#include "core/json.h"
#include "core/numbers.h"
#include "core/python_text.h"
#include "core/run_in_parallel.h"
#include "core/text.h"
#include "formats/format_error.h"
#include "formats/mapped_file.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFormat = "accelerate-checkpoint";
constexpr std::int64_t kVersionWritten = 1;

[[noreturn]] void refuse(const fs::path& path, std::string_view problem) {
  throw FormatError(str("'", path.string(), "' is no manifest of a checkpoint: ", problem, "."),
                    path);
}

/// Reads the fields of an object of the manifest; `owner` names the object in messages.
class Fields {
 public:
  Fields(const Value& object, std::string owner, const fs::path& path)
      : owner_(std::move(owner)), path_(path), dict_(dict_of(object)) {}

  [[nodiscard]] const Value& get(std::string_view key) const {
    const auto* const value = dict_.get(key);
    if (value == nullptr) refuse(path_, str(owner_, " has no ", key));
    return *value;
  }
  [[nodiscard]] const std::string& text(std::string_view key) const {
    const auto& value = get(key);
    if (!value.is_string()) wrong(key, value, "a text");
    return value.as_string();
  }
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t least) const {
    const auto& value = get(key);
    if (!value.is_int() || value.as_int() < least) {
      wrong(key, value, str("an integer of at least ", least));
    }
    return value.as_int();
  }
  [[nodiscard]] double seconds(std::string_view key) const {
    const auto& value = get(key);
    const bool is_number = value.is_int() || value.is_double();
    // Beyond the year 9999 nothing can show it.
    if (!is_number || !(value.as_double() >= 0 && value.as_double() < 253402300800.0)) {
      wrong(key, value, "a number of seconds since 1970");
    }
    return value.as_double();
  }
  [[nodiscard]] std::uint64_t sum(std::string_view key) const {
    const auto& value = text(key);
    std::uint64_t sum = 0;
    std::from_chars(value.data(), value.data() + value.size(), sum, 16);
    if (xxh3_text(sum) != value) wrong(key, get(key), "16 hexadecimal digits");
    return sum;
  }

  [[noreturn]] void wrong(std::string_view key, const Value& value, std::string_view wanted) const {
    refuse(path_,
           str(key, " of ", owner_, " is ", value.repr().substr(0, 200), " instead of ", wanted));
  }

 private:
  [[nodiscard]] const Value::Dict& dict_of(const Value& object) const {
    if (!object.is_dict()) {
      refuse(path_, str(owner_, " is of kind ", object.kind_name(), " and no object"));
    }
    return object.as_dict();
  }

  std::string owner_;
  const fs::path& path_;
  const Value::Dict& dict_;
};

void check_format(const Fields& fields, const fs::path& path) {
  const auto& format = fields.text("format");
  if (format != kFormat) {
    refuse(path, str("its format is ", python_repr(format).substr(0, 200), " instead of '", kFormat,
                     "'"));
  }
  const auto version = fields.integer("format_version", 1);
  if (version > kVersionWritten) {
    throw FormatError(str("'", path.string(), "' has format_version ", version,
                          ", and this version of accelerate reads up to ", kVersionWritten,
                          ". Update accelerate."),
                      path);
  }
}

ManifestFile read_file_entry(const Value& entry, std::size_t index, const fs::path& path) {
  const Fields fields(entry, str("entry ", index, " of files"), path);
  const auto& name = fields.text("name");
  if (const auto problem = problem_with_inner_path(name); !problem.empty()) {
    refuse(path,
           str("the file name ", python_repr(std::string_view(name).substr(0, 200)), " ", problem));
  }
  return {.name = name, .size = fields.integer("size", 0), .xxh3 = fields.sum("xxh3")};
}

/// What is wrong with a file, or "".
std::string difference(const fs::path& folder, const ManifestFile& expected, VerifyDepth depth,
                       const HashProgress& progress) {
  const auto name = python_repr(expected.name);
  const auto file = folder / expected.name;
  std::error_code error;
  const auto status = fs::status(file, error);
  if (status.type() == fs::file_type::not_found) return str(name, " is missing");
  if (error) return str(name, " cannot be read: ", error.message());
  if (!fs::is_regular_file(status)) return str(name, " is no regular file");
  const auto size = static_cast<std::int64_t>(fs::file_size(file, error));
  if (error) return str(name, " cannot be read: ", error.message());
  if (size != expected.size) {
    return str(name, " has ", size, " bytes, its manifest says ", expected.size);
  }
  if (depth == VerifyDepth::kSizes) return {};
  try {
    const auto found = sum_of_file(folder, expected.name, progress);
    if (found.xxh3 == expected.xxh3) return {};
    return str(name, " has the checksum ", xxh3_text(found.xxh3), ", its manifest says ",
               xxh3_text(expected.xxh3));
  } catch (const CheckpointError& failure) {
    return str(name, " cannot be read: ", failure.what());
  }
}

}  // namespace

std::string write_manifest(const Manifest& manifest) {
  Value::List files;
  for (const auto& file : manifest.files) {
    files.emplace_back(
        Value::Dict{{"name", file.name}, {"size", file.size}, {"xxh3", xxh3_text(file.xxh3)}});
  }
  const Value json = Value::Dict{{"format", kFormat},
                                 {"format_version", kVersionWritten},
                                 {"accelerate_version", manifest.accelerate_version},
                                 {"torch_version", manifest.torch_version},
                                 {"saved_at", manifest.saved_at},
                                 {"num_processes", manifest.num_processes},
                                 {"iteration", manifest.iteration},
                                 {"step", manifest.step},
                                 {"files", std::move(files)}};
  return json_dumps(json, {.indent = 2}) + "\n";
}

Manifest parse_manifest(std::string_view json, const fs::path& path) {
  Value value;
  try {
    value = json_loads_unique(json, str("'", path.string(), "'"));
  } catch (const ConfigError& error) {
    throw FormatError(error.what(), path);
  }
  const Fields fields(value, "the manifest", path);
  check_format(fields, path);
  Manifest manifest{.accelerate_version = fields.text("accelerate_version"),
                    .torch_version = fields.text("torch_version"),
                    .saved_at = fields.seconds("saved_at"),
                    .num_processes = fields.integer("num_processes", 1),
                    .iteration = fields.integer("iteration", 0),
                    .step = fields.integer("step", 0)};
  const auto& files = fields.get("files");
  if (!files.is_list()) fields.wrong("files", files, "a list");
  std::int64_t total = 0;
  for (const auto& entry : files.as_list()) {
    manifest.files.push_back(read_file_entry(entry, manifest.files.size(), path));
    if (__builtin_add_overflow(total, manifest.files.back().size, &total)) {
      refuse(path, "its files have more bytes than 64 bits count");
    }
  }
  std::ranges::sort(manifest.files, {}, &ManifestFile::name);
  const auto twice = std::ranges::adjacent_find(manifest.files, {}, &ManifestFile::name);
  if (twice != manifest.files.end()) {
    refuse(path, str("the file ", python_repr(twice->name), " is there twice"));
  }
  return manifest;
}

std::optional<Manifest> read_manifest(const fs::path& folder) {
  const auto path = folder / kManifestName;
  std::error_code error;
  if (!fs::exists(path, error) && !error) return std::nullopt;
  const auto file = MappedFile::open(path);
  if (file->size() > static_cast<std::int64_t>(kMaxManifestBytes)) {
    refuse(path, str("it has ", file->size(), " bytes, and ", kMaxManifestBytes, " are the limit"));
  }
  return parse_manifest(file->read(0, file->size()), path);
}

ManifestFile sum_of_file(const fs::path& folder, const std::string& name,
                         const HashProgress& progress) {
  const auto file = MappedFile::open(folder / name);
  return {.name = name, .size = file->size(), .xxh3 = xxh3_of(*file, 0, file->size(), progress)};
}

std::vector<std::string> verify_manifest(const fs::path& folder, const Manifest& manifest,
                                         VerifyDepth depth, const HashProgress& progress) {
  // Several threads read one large file; small ones are read side by side.
  constexpr std::int64_t kLargeBytes = 16 << 20;
  const auto& files = manifest.files;
  std::vector<std::string> found(files.size());
  std::mutex mutex;  // of `progress` and `total`
  std::int64_t total = 0;
  const auto look_at = [&](std::size_t i) {
    const auto add = [&, before = std::int64_t{0}](std::int64_t bytes) mutable {
      const std::lock_guard lock(mutex);
      total += bytes - std::exchange(before, bytes);
      progress(total);
    };
    found[i] = difference(folder, files[i], depth, progress ? HashProgress(add) : progress);
  };
  std::vector<std::size_t> small;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (depth == VerifyDepth::kSums && files[i].size < kLargeBytes) {
      small.push_back(i);
    } else {
      look_at(i);
    }
  }
  run_in_parallel(small.size(), transfer_threads(), [&](std::size_t i) { look_at(small[i]); });
  std::erase(found, "");
  return found;
}

std::vector<NumberedCheckpoint> numbered_checkpoints(const fs::path& folder) {
  constexpr std::string_view kPrefix = "checkpoint_";
  std::vector<NumberedCheckpoint> found;
  std::error_code error;
  if (!fs::is_directory(folder, error) && (!error || error == std::errc::not_a_directory ||
                                           error == std::errc::no_such_file_or_directory)) {
    return found;
  }
  for (const auto& entry : entries_in(folder)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const auto digits = std::string_view(name).substr(kPrefix.size());
    const auto number = is_digits(digits) ? parse_number<std::int64_t>(digits) : std::nullopt;
    std::error_code unreadable;
    if (number && entry.is_directory(unreadable)) found.push_back({*number, entry.path()});
  }
  std::ranges::sort(found, {}, [](const auto& c) { return std::tie(c.number, c.path); });
  return found;
}

}  // namespace accelerate::detail::formats
