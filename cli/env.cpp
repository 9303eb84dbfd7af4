// accelerate env
#include <filesystem>

#include "accelerate/config.h"
#include "cli/commands.h"
#include "commands/environment_report.h"
#include "core/json.h"

namespace accelerate::cli {

int env(const detail::launch::Arguments& arguments) {
  std::optional<std::filesystem::path> file;
  if (arguments.typed("config_file")) file = arguments.value("config_file");
  std::optional<Value::Dict> config;
  std::error_code ignored;
  if (file || std::filesystem::is_regular_file(default_config_file(), ignored)) {
    config =
        std::visit([](const auto& each) { return each.to_dict(); }, load_config_from_file(file));
  }
  auto report = detail::commands::report_environment(Environment::process());
  report.config = std::move(config);
  report.config_passed = file.has_value();
  print(arguments.on("json") ? detail::json_dumps(report.to_dict(), {.indent = 2}) + "\n"
                             : report.text());
  return 0;
}

}  // namespace accelerate::cli
