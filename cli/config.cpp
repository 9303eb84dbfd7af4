// accelerate config: the questionnaire, `config default` and `config update`.
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "accelerate/errors.h"
#include "cli/commands.h"
#include "commands/questionnaire.h"
#include "core/config.h"
#include "core/text.h"
#include "launch/machine_facts.h"

namespace accelerate::cli {
namespace {

namespace fs = std::filesystem;
using detail::str;

fs::path file_of(const detail::launch::Arguments& arguments) {
  if (!arguments.typed("config_file")) return default_config_file();
  return arguments.value("config_file");
}

void save(const Config& config, const fs::path& path) {
  const bool json = path.extension() == ".json";
  std::visit([&](const auto& each) { json ? each.to_json_file(path) : each.to_yaml_file(path); },
             config);
}

// Before the questions, so that no answer is lost.
void check_writable(const fs::path& path) {
  std::error_code ignored;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (fs::is_directory(path, ignored)) {
    throw ConfigError(str("--config_file is '", path.string(), "', a folder. Name a file."));
  }
  if (!fs::is_directory(folder, ignored)) {
    throw ConfigError(str("--config_file is '", path.string(), "', but there is no folder '",
                          folder.string(), "'. Make it first, or name another file."));
  }
  if (::access(folder.c_str(), W_OK) != 0) {
    throw ConfigError(str("The folder '", folder.string(), "' cannot be written to. Name another ",
                          "file with --config_file."));
  }
}

[[noreturn]] void end_by(int signal) {
  print_message("interrupted; nothing was written.");
  ::signal(signal, SIG_DFL);
  ::raise(signal);
  ::_exit(128 + signal);
}

int ask(const detail::launch::Arguments& arguments) {
  const fs::path path = file_of(arguments);
  if (!arguments.typed("config_file")) {
    std::error_code ignored;  // the check reports what could not be made
    fs::create_directories(path.parent_path(), ignored);
  }
  check_writable(path);
  const auto environment = Environment::process();
  try {
    const auto prompter = detail::commands::make_prompter(environment);
    save(detail::commands::ask_for_config(*prompter, environment), path);
  } catch (const detail::commands::Interrupted& interrupted) {
    end_by(interrupted.signal);
  }
  print(str("accelerate configuration saved at ", path.string(), "\n"));
  return 0;
}

int write_default(const detail::launch::Arguments& arguments) {
  const fs::path path = file_of(arguments);
  const auto precision =
      arguments.typed("mixed_precision") ? arguments.value("mixed_precision") : "no";
  const auto facts = detail::launch::gather_machine_facts(Environment::process());
  const auto written =
      detail::write_basic_config(precision, path, DistributedType::kMultiGpu, facts.visible_count);
  if (written) print(str("accelerate configuration saved at ", written->string(), "\n"));
  return 0;
}

int update(const detail::launch::Arguments& arguments) {
  const fs::path path = file_of(arguments);
  save(load_config_from_file(path), path);
  print(str("Successfully updated the configuration file at ", path.string(), ".\n"));
  return 0;
}

}  // namespace

int config(const detail::launch::Arguments& arguments) {
  const std::string action = arguments.operands.empty() ? "" : arguments.operands.front();
  if (arguments.typed("mixed_precision") && action != "default") {
    throw ConfigError(
        "--mixed_precision is for `accelerate config default`; the questionnaire asks for it, and "
        "`accelerate config update` keeps what the file has.");
  }
  if (action == "default") return write_default(arguments);
  if (action == "update") return update(arguments);
  return ask(arguments);
}

}  // namespace accelerate::cli
