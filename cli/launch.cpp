// accelerate launch: plans, then becomes the program or starts the workers.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "cli/commands.h"
#include "core/files.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "launch/agent.h"
#include "launch/command.h"
#include "launch/dry_run.h"
#include "launch/log_folder.h"
#include "launch/machine_facts.h"
#include "launch/plan.h"
#include "launch/program.h"
#include "launch/settings.h"

namespace accelerate::cli {
namespace {

using detail::str;
using detail::launch::LaunchMode;
using detail::launch::LaunchPlan;

// The environment of the program: that of this process with the variables of the plan.
Environment program_environment(const LaunchPlan& plan, const Environment& environment) {
  auto variables = environment.variables();
  for (const auto& [name, value] : plan.variables) variables[name] = value;
  return Environment(std::move(variables));
}

std::string setting(const LaunchPlan& plan, std::string_view name) {
  for (const auto& each : plan.settings) {
    if (each.name == name) return each.value;
  }
  return {};
}

// Checks the files that the run needs and the folders that it writes to.
void check_files(const LaunchPlan& plan) {
  if (plan.mode == LaunchMode::kAgent && plan.agent.logs.log_dir) {
    detail::launch::LogFolder::check_base(*plan.agent.logs.log_dir);
  }
  if (plan.mode != LaunchMode::kCommand) return;
  const bool deepspeed = !plan.deepspeed_environment.empty();
  const std::string flag = deepspeed ? "deepspeed_hostfile" : "mpirun_hostfile";
  const std::string hosts = setting(plan, flag);
  std::error_code ignored;
  if (hosts.empty() || std::filesystem::exists(hosts, ignored)) return;
  throw ConfigError(str("The file '", hosts, "' with the hosts (", flag, ") does not exist. Name ",
                        "one that has a host in each line."));
}

// Checks the program that is executed here, and the one that mpirun starts. DeepSpeed's launcher
// checks its own.
detail::launch::ProgramFacts inspect(const LaunchPlan& plan, const Environment& environment) {
  const auto variables = program_environment(plan, environment);
  if (!plan.deepspeed_environment.empty() &&
      detail::find_in_path(plan.argv[0], variables).empty()) {
    throw ConfigError(
        "--use_deepspeed on several machines goes through DeepSpeed's own launcher, but PATH has "
        "no deepspeed. Install it (pip install deepspeed), or pass --deepspeed_multinode_launcher "
        "standard and start accelerate on every machine.");
  }
  if (plan.program_at > 0 && plan.deepspeed_environment.empty()) {
    const auto own = plan.argv.begin() + static_cast<std::ptrdiff_t>(plan.program_at);
    (void)detail::launch::inspect_program({own, plan.argv.end()}, variables);
  }
  return detail::launch::inspect_program(plan.argv, variables);
}

void dry_run(LaunchPlan plan, const Environment& environment, bool json) {
  bool agent_store = true;
  try {
    const auto program = inspect(plan, environment);
    agent_store = !program.takes_listen_fd;
  } catch (const ConfigError& error) {
    plan.warnings.emplace_back(error.what());
  }
  try {
    check_files(plan);
  } catch (const ConfigError& error) {
    plan.warnings.emplace_back(error.what());
  }
  for (const auto& warning : plan.warnings) print_message(warning);
  const auto processes = detail::launch::planned_processes(plan, environment, agent_store);
  print(json ? dry_run_json(plan, processes) : dry_run_text(plan, processes));
}

// Adds the plan's lines to the file from which DeepSpeed's launcher sets variables on other
// machines. Existing lines are kept, none is added twice.
void write_deepspeed_environment(const LaunchPlan& plan, const Environment& environment) {
  if (plan.deepspeed_environment.empty()) return;
  const std::filesystem::path path = environment.get("DS_ENV_FILE").value_or(".deepspeed_env");
  std::error_code ignored;
  std::string content;
  if (std::filesystem::exists(path, ignored)) content = detail::read_whole_file(path);
  const auto lines = detail::split(content, '\n');
  const std::set<std::string> present(lines.begin(), lines.end());
  if (!content.empty() && content.back() != '\n') content += '\n';
  for (const auto& line : plan.deepspeed_environment) {
    if (!present.contains(std::string(detail::trim(line)))) content += line;
  }
  detail::write_file_atomically(path, content);
}

[[noreturn]] void become(const LaunchPlan& plan) {
  std::vector<std::pair<std::string, std::optional<std::string>>> changes(plan.variables.begin(),
                                                                          plan.variables.end());
  auto environment = detail::environment_with(changes);
  auto argv = plan.argv;
  std::vector<char*> words;
  for (auto& word : argv) words.push_back(word.data());
  words.push_back(nullptr);
  std::vector<char*> variables;
  for (auto& variable : environment) variables.push_back(variable.data());
  variables.push_back(nullptr);
  ::execve(argv[0].c_str(), words.data(), variables.data());
  throw ConfigError(str("'", argv[0], "' cannot be executed: ", std::strerror(errno), "."));
}

}  // namespace

int launch(const detail::launch::Arguments& arguments) {
  const auto environment = Environment::process();
  const auto config = detail::launch::read_launch_config(arguments, environment);
  const auto facts = detail::launch::gather_machine_facts(environment);
  auto plan = detail::launch::make_plan(arguments, config, environment, facts);
  if (const auto output = arguments.values.find("dry_run"); output != arguments.values.end()) {
    dry_run(std::move(plan), environment, output->second == "json");
    return 0;
  }
  const auto program = inspect(plan, environment);
  check_files(plan);
  plan.argv[0] = program.path;
  plan.takes_listen_fd = program.takes_listen_fd;
  if (!plan.quiet) {
    for (const auto& warning : plan.warnings) print_message(warning);
  }
  if (plan.mode == LaunchMode::kAgent) return detail::launch::run_agent(plan);
  write_deepspeed_environment(plan, environment);
  become(plan);
}

}  // namespace accelerate::cli
