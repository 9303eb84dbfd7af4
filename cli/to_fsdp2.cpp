// accelerate to-fsdp2
#include "commands/to_fsdp2.h"

#include <filesystem>

#include "accelerate/errors.h"
#include "cli/commands.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "core/yaml.h"

namespace accelerate::cli {
namespace {

namespace fs = std::filesystem;
using detail::str;

// Python's checks, in its order and words.
void check(const detail::launch::Arguments& arguments) {
  std::error_code ignored;
  const auto config_file = arguments.value("config_file");
  const auto output_file = arguments.value("output_file");
  if (config_file.empty()) throw ConfigError("Name the file to convert with --config_file.");
  if (!fs::exists(config_file, ignored)) {
    throw ConfigError(str("Config file ", config_file, " not found"));
  }
  if (arguments.on("overwrite")) return;
  if (output_file.empty()) {
    throw ConfigError("If --overwrite is not set, --output_file must be provided");
  }
  if (fs::exists(output_file, ignored)) {
    throw ConfigError(
        str("Output file ", output_file, " already exists and --overwrite is not set"));
  }
}

Value::Dict read(const std::string& file) {
  auto value = detail::yaml_loads_unique(detail::read_whole_file(file), str("Config file ", file));
  if (value.is_none() || (value.is_dict() && value.as_dict().empty())) {
    throw ConfigError(str("Config file ", file, " is empty"));
  }
  if (value.is_dict()) return std::move(value).as_dict();
  throw ConfigError(
      str("Config file ", file, " must hold keys and values, not a ", value.kind_name(), "."));
}

}  // namespace

int to_fsdp2(const detail::launch::Arguments& arguments) {
  check(arguments);
  const auto file = arguments.value("config_file");
  const auto output = arguments.typed("output_file") ? arguments.value("output_file") : file;
  const auto conversion = detail::commands::convert_to_fsdp2(read(file));
  for (const auto& notice : conversion.notices) print_message(notice);
  const bool json = output.ends_with(".json");
  detail::write_file_atomically(
      output, json ? detail::json_dumps(conversion.config, {.indent = 2, .sort_keys = true}) + "\n"
                   : detail::yaml_dumps(conversion.config));
  return 0;
}

}  // namespace accelerate::cli
