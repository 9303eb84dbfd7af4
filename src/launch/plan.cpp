#include "launch/plan.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/files.h"
#include "core/numbers.h"
#include "core/ports.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "launch/command.h"
#include "launch/machine_facts.h"
#include "launch/messages.h"
#include "launch/mode_variables.h"
#include "launch/rendezvous_conf.h"
#include "launch/resolve.h"
#include "launch/settings.h"

namespace accelerate::detail::launch {
namespace {

std::map<std::string, std::string> rendezvous_settings(const Settings& settings,
                                                       std::vector<std::string>& warnings) {
  std::map<std::string, std::string> result;
  const std::string text = settings.text("rdzv_conf").value_or("");
  if (trim(text).empty()) return result;
  for (const auto& part : split(text, ',')) {
    const auto cut = part.find('=');
    const std::string key(trim(std::string_view(part).substr(0, cut)));
    const std::string value(
        cut == std::string::npos ? "" : trim(std::string_view(part).substr(cut + 1)));
    if (key.empty() || value.empty()) {
      throw ConfigError(str("--rdzv_conf is '", text, "', but '", part, "' has no ",
                            key.empty() ? "key" : "value",
                            ". Write keys with values: timeout=900,join_timeout=600."));
    }
    if (RendezvousConf::is_torchrun_only(key)) {
      warnings.push_back(
          str("--rdzv_conf ", key, " has no effect here: only torchrun's rendezvous uses it."));
      continue;
    }
    result[key] = value;
  }
  (void)RendezvousConf::parse(result);
  return result;
}

std::vector<int> signals(const Settings& settings) {
  std::vector<int> result;
  const std::string text = settings.text("signals_to_handle").value_or("");
  for (const auto& part : split(text, ',')) {
    const std::string name(trim(part));
    if (name.empty()) continue;
    int number = 0;
    for (int candidate = 1; candidate < NSIG && number == 0; ++candidate) {
      if (signal_name(candidate) == name) number = candidate;
    }
    if (number == 0 || number == SIGKILL || number == SIGSTOP) {
      throw ConfigError(str(settings.label("signals_to_handle"), " is '", text, "', but '", name,
                            number == 0 ? "' is not a signal" : "' cannot be caught",
                            ". Write names with commas between them: SIGTERM,SIGUSR1."));
    }
    if (std::ranges::find(result, number) == result.end()) result.push_back(number);
  }
  // The workers have sessions of their own: Ctrl-C reaches them only if signals are passed on.
  if (result.empty()) {
    throw ConfigError(str(settings.label("signals_to_handle"), " is '", text,
                          "', which names none. ",
                          "Write names with commas between them: SIGTERM,SIGUSR1."));
  }
  return result;
}

std::vector<int> local_ranks(const Settings& settings, int processes) {
  std::vector<int> ranks;
  const std::string text = settings.text("local_ranks_filter").value_or("");
  if (trim(text).empty()) return ranks;
  for (const auto& part : split(text, ',')) {
    const auto rank = parse_number<int>(trim(part));
    if (!rank || *rank < 0) {
      throw ConfigError(str(settings.label("local_ranks_filter"), " is '", text,
                            "', expected local ranks with commas between them: 0,1."));
    }
    if (*rank >= processes) {
      throw ConfigError(str(
          settings.label("local_ranks_filter"), " is '", text, "', but there is no local rank ",
          *rank, ": ",
          processes == 1 ? "the only one is 0." : str("they go from 0 to ", processes - 1, ".")));
    }
    ranks.push_back(*rank);
  }
  return ranks;
}

int at_least(const Settings& settings, std::string_view name, int least) {
  const auto value = settings.integer(name).value_or(least);
  if (value >= least && value <= 1'000'000'000) return static_cast<int>(value);
  throw ConfigError(str(settings.label(name), " is ", value, ", expected at least ", least, "."));
}

// Refuses a template with a ${name} that nothing replaces.
std::optional<std::string> prefix_template(const Settings& settings) {
  const auto text = settings.text("log_line_prefix_template");
  if (!text) return text;
  for (auto at = text->find("${"); at != text->npos; at = text->find("${", at + 2)) {
    const auto end = text->find('}', at);
    const auto name = text->substr(at, end == text->npos ? end : end - at + 1);
    if (name == "${role_name}" || name == "${rank}" || name == "${local_rank}") continue;
    throw ConfigError(str(settings.label("log_line_prefix_template"), " is '", *text,
                          "', but nothing replaces ", name,
                          ". Known are ${role_name}, ${rank} and ${local_rank}."));
  }
  return text;
}

LogsSpecs logs(const Settings& settings, const Environment& environment, int processes) {
  LogsSpecs specs;
  if (const auto folder = settings.text("log_dir")) {
    specs.log_dir = expand_user(*folder, environment);
  }
  specs.redirects =
      StreamChoice::parse(settings.text("redirects").value_or("0"), settings.label("redirects"));
  specs.tee = StreamChoice::parse(settings.text("tee").value_or("0"), settings.label("tee"));
  specs.local_ranks_filter = local_ranks(settings, processes);
  return specs;
}

LaunchConfig agent_config(const ResolvedLaunch& run, const Environment& environment,
                          std::vector<std::string>& warnings) {
  const Settings& settings = run.settings;
  LaunchConfig config;
  config.min_nodes = run.machines.min;
  config.max_nodes = run.machines.max;
  config.nproc_per_node = run.processes_per_machine;
  config.run_id = settings.text("rdzv_id").value_or("none");
  config.role = settings.text("role").value_or("default");
  config.rdzv_backend = settings.text("rdzv_backend").value_or("static");
  // With one machine the address of another one, such as the cluster's MASTER_ADDR, is ignored.
  if (run.machines.max > 1) config.master_addr = settings.text("main_process_ip").value_or("");
  config.master_port =
      static_cast<int>(settings.integer("main_process_port").value_or(kDefaultPort));
  config.rdzv_configs = rendezvous_settings(settings, warnings);
  config.node_rank = run.machine_rank;
  config.max_restarts = at_least(settings, "max_restarts", 0);
  config.monitor_interval = settings.number("monitor_interval").value_or(0.1);
  if (config.monitor_interval <= 0) {
    throw ConfigError(str("--monitor_interval is ", *settings.text("monitor_interval"),
                          ", expected more than 0 seconds."));
  }
  config.log_line_prefix_template = prefix_template(settings);
  config.logs = logs(settings, environment, config.nproc_per_node);
  config.signals_to_handle = signals(settings);
  config.shutdown_timeout = std::chrono::seconds(at_least(settings, "shutdown_timeout", 0));
  config.local_addr = settings.text("local_addr").value_or("");
  return config;
}

std::vector<std::string> program_command(const Arguments& arguments, const ResolvedLaunch& run,
                                         const Environment& environment) {
  std::vector<std::string> argv;
  if (run.python) {
    argv.push_back(environment.get("PYTHON_EXEC").value_or("python3"));
    // Python must not buffer the output of several processes.
    if (run.mode == LaunchMode::kAgent) argv.emplace_back("-u");
    if (arguments.on("module")) argv.emplace_back("-m");
  }
  argv.insert(argv.end(), arguments.operands.begin(), arguments.operands.end());
  return argv;
}

std::vector<std::string> mpirun_command(const ResolvedLaunch& run,
                                        const std::map<std::string, std::string>& variables,
                                        const std::vector<std::string>& program) {
  const bool open_mpi = run.mpi->open_mpi;
  std::vector<std::string> argv{run.mpi->program,
                                open_mpi ? "--hostfile" : "-f",
                                *run.settings.text("mpirun_hostfile"),
                                open_mpi ? "--npernode" : "-ppn",
                                str(run.processes_per_machine),
                                "-n",
                                str(run.num_processes)};
  if (open_mpi) {
    argv.insert(argv.end(), {"--bind-to", run.settings.text("mpirun_bind_to").value_or("socket")});
    // By default Open MPI copies no variables to other hosts.
    for (const auto& [name, value] : variables) argv.insert(argv.end(), {"-x", name});
  }
  argv.insert(argv.end(), program.begin(), program.end());
  return argv;
}

std::vector<std::string> deepspeed_command(const Arguments& arguments, const ResolvedLaunch& run) {
  const Settings& settings = run.settings;
  const std::string launcher = settings.text("deepspeed_multinode_launcher").value_or("pdsh");
  std::vector<std::string> argv{"deepspeed"};
  const auto add = [&](std::initializer_list<std::string> words) {
    argv.insert(argv.end(), words);
  };
  if (const auto hosts = settings.text("deepspeed_hostfile")) add({"--hostfile", *hosts});
  if (launcher == "nossh") {
    add({"--node_rank", str(run.machine_rank), "--no_ssh"});
  } else {
    add({"--no_local_rank", "--launcher", launcher});
  }
  if (const auto excluded = settings.text("deepspeed_exclusion_filter")) {
    add({"--exclude", *excluded});
  } else if (const auto included = settings.text("deepspeed_inclusion_filter")) {
    add({"--include", *included});
  } else {
    add({"--num_gpus", str(run.processes_per_machine)});
  }
  if (const auto address = settings.text("main_process_ip")) add({"--master_addr", *address});
  add({"--master_port", settings.text("main_process_port").value_or(str(kDefaultPort))});
  if (arguments.on("module")) {
    add({"--module"});
  } else if (!run.python) {
    add({"--no_python"});
  }
  argv.insert(argv.end(), arguments.operands.begin(), arguments.operands.end());
  return argv;
}

// The local rank of a launcher that becomes a worker, as set by the program that started it.
int local_rank_here(OuterJob outer, const Environment& environment) {
  if (outer == OuterJob::kNone || outer == OuterJob::kSlurmNodes) return 0;
  if (outer == OuterJob::kSlurmTasks) {
    return static_cast<int>(environment.integer({"SLURM_LOCALID"}, 0));
  }
  return static_cast<int>(environment.integer(
      {"LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"},
      0));
}

}  // namespace

LaunchPlan make_plan(const Arguments& arguments, const std::optional<ConfigFile>& config,
                     const Environment& environment, const MachineFacts& facts) {
  ResolvedLaunch run = resolve_launch(arguments, config, environment, facts);
  LaunchPlan plan;
  plan.mode = run.mode;
  plan.quiet = arguments.on("quiet");
  plan.warnings = std::move(run.warnings);
  plan.variables = mode_variables(run, environment, facts, plan.warnings);
  plan.program = arguments.operands.front();
  plan.argv = program_command(arguments, run, environment);
  // Checked in every mode: a typing error is reported before the first large run.
  plan.agent = agent_config(run, environment, plan.warnings);
  if (run.mode == LaunchMode::kSimple) {
    plan.argv = worker_arguments(plan.argv, local_rank_here(run.outer, environment));
  }
  if (run.mode == LaunchMode::kCommand && run.deepspeed) {
    plan.argv = deepspeed_command(arguments, run);
    plan.program_at = plan.argv.size() - arguments.operands.size();
    std::vector<std::pair<std::string, std::string>> pairs(plan.variables.begin(),
                                                           plan.variables.end());
    std::erase_if(pairs, [](const auto& pair) { return pair.second.empty(); });
    plan.deepspeed_environment = convert_dict_to_env_variables(pairs);
  } else if (run.mode == LaunchMode::kCommand) {
    const std::size_t own = plan.argv.size();
    plan.argv = mpirun_command(run, plan.variables, plan.argv);
    plan.program_at = plan.argv.size() - own;
  }
  for (auto& setting : run.settings.list()) {
    // Without mpirun only explicit settings of it are shown.
    const bool of_mpi = setting.name.starts_with("mpirun_");
    const bool said = setting.source != SettingSource::kDefault;
    if (setting.name == "dry_run" || (of_mpi && !run.mpi && !said)) continue;
    plan.settings.push_back(setting);
  }
  return plan;
}

std::map<std::string, std::string> worker_variables(const LaunchConfig& agent,
                                                    const LaunchRound& round, int local_rank,
                                                    bool agent_store, const Environment& outer) {
  const auto rank = str(round.first_rank + local_rank);
  return {
      {"LOCAL_RANK", str(local_rank)},
      {"RANK", rank},
      {"GROUP_RANK", str(round.node_rank)},
      {"ROLE_RANK", rank},
      {"ROLE_NAME", agent.role},
      {"LOCAL_WORLD_SIZE", str(agent.nproc_per_node)},
      {"WORLD_SIZE", str(round.world_size)},
      {"GROUP_WORLD_SIZE", str(round.nodes)},
      {"ROLE_WORLD_SIZE", str(round.world_size)},
      {"MASTER_ADDR", agent.master_addr},
      {"MASTER_PORT", str(agent.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", str(round.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", str(agent.max_restarts)},
      {"TORCHELASTIC_RUN_ID", agent.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", agent_store ? "True" : "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING",
       outer.get("TORCH_NCCL_ASYNC_ERROR_HANDLING").value_or("1")},
  };
}

std::vector<std::string> worker_arguments(const std::vector<std::string>& argv, int local_rank) {
  constexpr std::string_view kPlaceholder = "${local_rank}";
  std::vector<std::string> result = argv;
  for (auto& word : result) {
    for (auto at = word.find(kPlaceholder); at != std::string::npos; at = word.find(kPlaceholder)) {
      word.replace(at, kPlaceholder.size(), str(local_rank));
    }
  }
  return result;
}

}  // namespace accelerate::detail::launch
