#include "launch/checks.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

int small_number(const Settings& settings, std::string_view name) {
  const std::int64_t value = settings.integer(name).value_or(0);
  if (value > std::numeric_limits<int>::max() || value < std::numeric_limits<int>::min()) {
    throw ConfigError(
        str(settings.label(name), " is ", value, ", which is more than any run has."));
  }
  return static_cast<int>(value);
}

std::string_view instead_of(std::string_view flag) {
  if (flag == "env") return "Put NAME=value in front of the command instead.";
  if (flag == "main_training_function") return "A native program starts at its main.";
  if (flag == "downcast_bf16") return "Use --mixed_precision bf16.";
  if (flag.starts_with("aws_")) return "Submit SageMaker jobs with Python's accelerate.";
  return "Start TPU pods with Python's accelerate.";
}

// True if the flag was typed with another value than the default.
bool differs_from_default(const Arguments& arguments, const Flag& flag) {
  const auto typed = arguments.values.find(flag.name);
  if (typed == arguments.values.end()) return false;
  if (flag.kind == FlagKind::kSwitch) return typed->second == "true";
  if (flag.name == "machine_rank") return typed->second != "0";
  if (flag.name == "dynamo_backend") return to_lower(typed->second) != "no";
  return typed->second != flag.fallback;
}

// True if the workers use the address and port of machine 0.
bool uses_address(const ResolvedLaunch& run) {
  if (run.mode == LaunchMode::kAgent) return run.machines.max > 1;
  if (run.deepspeed) return run.mode == LaunchMode::kCommand;
  return run.num_processes > 1 || run.machines.max > 1;
}

bool has_effect(const ResolvedLaunch& run, const Flag& flag) {
  const std::string_view name = flag.name;
  const bool agent = run.mode == LaunchMode::kAgent;
  if (!agent && flag.agent != AgentUse::kNone) return false;
  if (run.machines.max == 1 && flag.several_machines) return false;
  if (name == "machine_rank") return run.needs_machine_rank();
  if (name == "main_process_ip") return uses_address(run);
  if (name == "main_process_port") return agent || uses_address(run);
  if (name == "mpirun_hostfile") return run.mpi.has_value();
  if (name == "mpirun_bind_to") return run.mpi && run.mpi->open_mpi;
  if (name == "use_megatron_lm") return run.megatron;
  // DeepSpeed's workers get no compiler settings, and no thread count from its own launcher.
  if (name.starts_with("dynamo_")) return !run.deepspeed;
  if (name == "num_cpu_threads_per_process") return !run.uses_deepspeed_launcher();
  return true;
}

// "[::1]" -> "::1"
void normalise_address(Settings& settings) {
  const auto given = settings.text("main_process_ip");
  if (!given) return;
  std::string address(trim(*given));
  const auto who = settings.label("main_process_ip");
  if (address.empty()) throw ConfigError(str(who, " is empty. Give the address of machine 0."));
  const bool bracketed = address.front() == '[' && address.back() == ']';
  if (bracketed) address = address.substr(1, address.size() - 2);
  const bool has_port = !bracketed && (std::ranges::count(address, ':') == 1 ||
                                       address.find("]:") != std::string::npos);
  if (has_port) {
    throw ConfigError(str(who, " is '", address,
                          "', an address with a port. Give the port by --main_process_port."));
  }
  settings.set("main_process_ip", address, settings.source("main_process_ip"),
               settings.origin("main_process_ip"));
}

}  // namespace

void check_typed_flags(const Arguments& arguments) {
  // Where the processes compute, and who trains. Parity: --cpu goes with an engine here.
  static const std::vector<std::vector<std::string>> kExclusive{
      {"--cpu", "--multi_gpu", "--tpu"}, {"--multi_gpu", "--tpu", "--use_deepspeed", "--use_fsdp"}};
  for (const auto& flags : kExclusive) {
    std::vector<std::string> chosen;
    std::ranges::copy_if(flags, std::back_inserter(chosen),
                         [&](const auto& flag) { return arguments.on(flag.substr(2)); });
    if (chosen.size() > 1) {
      throw ConfigError(
          str(join(chosen, " and "), " exclude each other: pass one of ", join(flags), "."));
    }
  }
  if (arguments.on("multi_gpu") && arguments.typed("num_processes")) {
    const auto& count = arguments.values.find("num_processes")->second;
    if (count == "1" || count == "0" || count.starts_with('-')) {
      throw ConfigError(
          str("--multi_gpu needs at least 2 processes, but --num_processes is ", count, "."));
    }
  }
  if (arguments.on("cpu") && arguments.typed("gpu_ids")) {
    throw ConfigError("--gpu_ids has no effect with --cpu: pass one of them.");
  }
  if (arguments.on("module") && arguments.on("no_python")) {
    throw ConfigError("--module and --no_python exclude each other: only Python runs modules.");
  }
}

void check_config_is_local(const ConfigFile& file) {
  if (std::holds_alternative<ClusterConfig>(file.config)) return;
  throw UnsupportedError(str(file.path, " is for Amazon SageMaker. Jobs there are submitted by ",
                             "Python's accelerate only: run its `accelerate launch`, or pass the ",
                             "--config_file of a run on machines of your own."));
}

void check_reachable(const Arguments& arguments, ResolvedLaunch& run) {
  for (const auto* name : {"tpu", "tpu_cluster"}) {
    if (!run.settings.truth(name)) continue;
    const bool file = run.settings.source(name) == SettingSource::kConfig;
    throw UnsupportedError(
        str(file ? str("'distributed_type' XLA in ", run.settings.origin(name)) : str("--", name),
            " cannot be granted: TPUs are reached through XLA, which exists for Python only. Use ",
            "Python's accelerate for them, or --cpu, --multi_gpu or --use_fsdp here."));
  }
  for (const Flag& flag : general_flags()) {
    const bool foreign = flag.group == FlagGroup::kTpu || flag.group == FlagGroup::kAws;
    if (!foreign || !arguments.typed(flag.name) || flag.name == "tpu_cluster") continue;
    if (!run.python) {
      throw UnsupportedError(
          str("--", flag.name, " means nothing to a native program. ", instead_of(flag.name)));
    }
    run.warnings.push_back(str("--", flag.name, " has an effect on ",
                               flag.group == FlagGroup::kTpu ? "TPUs" : "SageMaker",
                               " only; none here."));
  }
}

void check_rendezvous(const ResolvedLaunch& run) {
  const Settings& settings = run.settings;
  const std::string backend = settings.text("rdzv_backend").value_or("static");
  if (backend != "static" && backend != "c10d") {
    const std::string message = str(settings.label("rdzv_backend"), " is '", backend, "'. ");
    if (backend.starts_with("etcd")) {
      throw UnsupportedError(message + "Machines meet by static or c10d here, without etcd.");
    }
    throw ConfigError(message + "Choose one of: static, c10d.");
  }
  if (run.elastic && backend != "c10d") {
    throw ConfigError(str(settings.label("num_machines"), " is ", *settings.text("num_machines"),
                          ": machines that come and go need --rdzv_backend c10d."));
  }
}

int check_machine_rank(const ResolvedLaunch& run) {
  const int rank = small_number(run.settings, "machine_rank");
  if (rank >= 0 && (rank < run.machines.max || run.settings.text("rdzv_backend") == "c10d")) {
    return rank;
  }
  throw ConfigError(str(run.settings.label("machine_rank"), " is ", rank, ", but there are ",
                        run.machines.max, " machines: ranks go from 0 to ", run.machines.max - 1,
                        "."));
}

void check_device_ids(const ResolvedLaunch& run, const MachineFacts& facts) {
  const Settings& settings = run.settings;
  const std::string ids = *settings.text("gpu_ids");
  if (ids == "all") return;
  std::set<std::string> seen;
  for (const auto& part : split(ids, ',')) {
    const std::string id(trim(part));
    const auto refuse = [&](const std::string& reason) {
      throw ConfigError(str(settings.label("gpu_ids"), " is '", ids, "', but ", reason,
                            " Write \"all\" or ids with commas between them: 0,1."));
    };
    if (id.empty()) refuse("an id is missing.");
    if (!seen.insert(id).second) refuse(str("device ", id, " comes twice."));
    if (run.accelerator > AcceleratorKind::kCuda) continue;  // other makers have other ids
    if (!is_digits(id)) {
      if (!id.starts_with("GPU-") && !id.starts_with("MIG-"))
        refuse(str("'", id, "' is not a device id."));
      continue;
    }
    if (run.accelerator == AcceleratorKind::kNone) continue;
    if (parse_number<int>(id).value_or(facts.device_count) >= facts.device_count) {
      refuse(str("this machine has ", facts.device_count,
                 facts.device_count == 1 ? " device." : " devices."));
    }
  }
}

int check_process_count(const ResolvedLaunch& run) {
  const Settings& settings = run.settings;
  const std::string who = settings.label("num_processes");
  const int count = small_number(settings, "num_processes");
  if (count == -1 && settings.source("num_processes") == SettingSource::kConfig) {
    throw ConfigError(
        str(who, " is -1: the number is left to the command line. Pass ", "--num_processes."));
  }
  if (count < 1) throw ConfigError(str(who, " is ", count, ". A run has at least one process."));
  if (count % run.machines.max != 0) {
    const int fitting = (count / run.machines.max + 1) * run.machines.max;
    throw ConfigError(str(who, " is ", count, ", which ", run.machines.max,
                          " machines cannot share evenly: it counts the processes of all machines ",
                          "together. Pass a multiple of ", run.machines.max, ", such as ", fitting,
                          "."));
  }
  return count;
}

void check_processes_per_machine(const ResolvedLaunch& run) {
  constexpr int kMost = 8192;
  if (run.processes_per_machine <= kMost) return;
  throw ConfigError(
      str(run.settings.label("num_processes"), " is ", run.num_processes, ", which are ",
          run.processes_per_machine, " for each machine. At most ", kMost,
          " are started on one: a run has a process per accelerator, or a few per ", "core."));
}

void check_enough_devices(const ResolvedLaunch& run) {
  const std::string ids = *run.settings.text("gpu_ids");
  if (ids == "all" || run.cpu || run.machines.max > 1) return;
  if (run.outer != OuterJob::kNone) return;
  if (split(ids, ',').size() >= 2 || (!run.multi_gpu && run.num_processes == 1)) return;
  throw ConfigError(
      str(run.settings.label("gpu_ids"), " is '", ids, "', a single device for ",
          run.num_processes == 1 ? "a multi-GPU run" : str(run.num_processes, " processes"),
          ". Name one for each, or \"all\"; for a single process pass ",
          "--num_processes 1 without --multi_gpu."));
}

void check_endpoint(ResolvedLaunch& run) {
  Settings& settings = run.settings;
  normalise_address(settings);
  const auto port = settings.integer("main_process_port");
  if (port && (*port < 0 || *port > 65535)) {
    throw ConfigError(str(settings.label("main_process_port"), " is ", *port,
                          ". Ports go from 0 to 65535; 0 takes a free one."));
  }
  if (run.machines.max == 1 || run.outer == OuterJob::kSlurmTasks) return;
  if (run.uses_deepspeed_launcher()) return;
  const std::string several =
      str("with ", settings.label("num_machines"), " ", *settings.text("num_machines"));
  if (!settings.has("main_process_ip")) {
    throw ConfigError(str("--main_process_ip is missing: ", several,
                          " all processes have to find machine 0. Give its address."));
  }
  if (run.mode != LaunchMode::kAgent && !port) {
    throw ConfigError(
        str("--main_process_port is missing: ", several, " all processes have to agree on one."));
  }
  if (port == 0) {
    throw ConfigError(str(settings.label("main_process_port"), " is 0, a free port, which ",
                          several, " the other machines cannot know. Give a number."));
  }
}

void check_engines(const ResolvedLaunch& run, const Environment& environment) {
  const Settings& settings = run.settings;
  if (run.fsdp && settings.truth("fsdp_cpu_ram_efficient_loading") &&
      !settings.truth("fsdp_sync_module_states")) {
    throw ConfigError(str(settings.label("fsdp_cpu_ram_efficient_loading"), " is true, but ",
                          settings.label("fsdp_sync_module_states"),
                          " is false: then only rank 0 would have weights. Set --",
                          "fsdp_sync_module_states true, or loading to false."));
  }
  if (!run.parallelism) return;
  const bool version_one = run.fsdp && settings.text("fsdp_version") != "2";
  const bool from_file = settings.source("use_parallelism_config") == SettingSource::kConfig;
  // Context parallelism also shards the model.
  const bool shards = settings.integer("parallelism_config_cp_size").value_or(1) > 1 &&
                      !environment.flag("ACCELERATE_ALLOW_CP_STANDALONE", false);
  if (version_one || (!run.fsdp && !from_file && !run.cpu && shards)) {
    throw ConfigError(
        str(from_file ? str("'parallelism_config' in ", settings.origin("use_parallelism_config"))
                      : settings.label("use_parallelism_config"),
            shards ? " with parallelism_config_cp_size above 1" : "",
            " needs --use_fsdp and --fsdp_version 2",
            version_one ? str(", but ", settings.label("fsdp_version"), " is 1.") : "."));
  }
}

bool engine_in_use(const ResolvedLaunch& run, const Flag& flag) {
  if (flag.group == FlagGroup::kDeepspeed) return run.deepspeed;
  if (flag.group == FlagGroup::kFsdp) return run.fsdp;
  if (flag.group == FlagGroup::kMegatron) return run.megatron;
  if (flag.group == FlagGroup::kFp8) return run.settings.text("mixed_precision") == "fp8";
  if (flag.group == FlagGroup::kParallelism) return run.parallelism;
  return true;
}

bool asks_for_agent(const Arguments& arguments) {
  return std::ranges::any_of(general_flags(), [&](const Flag& flag) {
    return flag.agent == AgentUse::kDemand && differs_from_default(arguments, flag);
  });
}

std::vector<std::string> idle_flags(const Arguments& arguments, const ResolvedLaunch& run) {
  std::vector<std::string> idle;
  for (const Flag& flag : launch_flags()) {
    const bool of_idle_engine = arguments.typed(flag.name) && !engine_in_use(run, flag);
    if (of_idle_engine || (differs_from_default(arguments, flag) && !has_effect(run, flag))) {
      idle.push_back(str("--", flag.name));
    }
  }
  return idle;
}

}  // namespace accelerate::detail::launch
