#include "launch/resolve.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "accelerate/enums.h"
#include "accelerate/errors.h"
#include "core/ports.h"
#include "core/text.h"
#include "launch/checks.h"

namespace accelerate::detail::launch {
namespace {

bool several(const Environment& environment, const char* variable) {
  return environment.integer({std::string(variable)}, -1) > 1;
}

bool in_mpi(const Environment& environment) {
  return several(environment, "PMI_SIZE") || several(environment, "OMPI_COMM_WORLD_SIZE") ||
         several(environment, "MV2_COMM_WORLD_SIZE");
}

// The place in a Slurm step, without the address, whose lookup is slow.
World slurm_world(const Environment& environment) {
  if (!environment.contains("SLURM_STEP_ID")) return {};
  auto variables = environment.variables();
  // Some clusters export torchrun's variables with other meanings.
  for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                           "GROUP_WORLD_SIZE", "MASTER_PORT"}) {
    variables.erase(name);
  }
  variables["MASTER_ADDR"] = "unknown";
  return detect_world(Environment(std::move(variables)), {});
}

// The job around this launcher. `kSlurmNodes` fills `world` as well.
OuterJob outer_job(const Environment& environment, World& world) {
  // WORLD_SIZE alone is not a job: some containers set it.
  if (several(environment, "WORLD_SIZE") && environment.contains("RANK")) {
    return OuterJob::kTorchrun;
  }
  world = slurm_world(environment);
  // srun with PMI sets MPI's variables as well, but only Slurm's name the node.
  const bool slurm = world.source != WorldSource::kAlone && world.node_rank && world.num_nodes;
  if (slurm && *world.num_nodes > 1 && world.size == *world.num_nodes) {
    return OuterJob::kSlurmNodes;
  }
  if (slurm) return OuterJob::kSlurmTasks;
  return in_mpi(environment) ? OuterJob::kMpi : OuterJob::kNone;
}

bool is_python_program(const Arguments& arguments) {
  if (arguments.on("no_python")) return false;
  return arguments.on("module") || arguments.operands.front().ends_with(".py");
}

class Resolver {
 public:
  Resolver(const Arguments& arguments, const std::optional<ConfigFile>& config,
           const Environment& environment, const MachineFacts& facts)
      : arguments_(arguments), config_(config), environment_(environment), facts_(facts) {}

  ResolvedLaunch run() {
    check_typed_flags(arguments_);
    run_.python = is_python_program(arguments_);
    if (config_) check_config_is_local(*config_);
    merge_settings(
        general_flags(), arguments_, environment_, config_, [](const Flag&) { return true; }, set_);
    choose_paradigm();
    check_reachable(arguments_, run_);
    merge_engines();
    place_in_outer_job();
    machines();
    devices_and_processes();
    choose_mode();
    if (run_.mode == LaunchMode::kAgent) check_processes_per_machine(run_);
    machine_rank();
    notice_missing_accelerators();
    precision();
    threads();
    endpoint();
    check_engines(run_, environment_);
    if (run_.mode == LaunchMode::kCommand && !run_.deepspeed) find_mpi();
    add_defaults();
    warn_about_idle_flags();
    warn_about_defaults();
    return std::move(run_);
  }

 private:
  const ClusterConfig* cluster() const {
    return config_ ? &std::get<ClusterConfig>(config_->config) : nullptr;
  }

  void from_file(std::string_view name) {
    set_.set(name, "true", SettingSource::kConfig, config_->path);
  }

  // The paradigm comes from a typed flag, else from the environment, else from the file.
  void choose_paradigm() {
    constexpr std::array<std::string_view, 6> kChoices{
        "multi_gpu", "tpu", "tpu_cluster", "use_deepspeed", "use_fsdp", "use_megatron_lm"};
    const bool typed =
        std::ranges::any_of(kChoices, [&](auto name) { return arguments_.on(name); });
    for (const auto* name : {"use_deepspeed", "use_fsdp", "use_megatron_lm"}) {
      if (typed && !arguments_.typed(name) && set_.has(name)) {
        set_.set(name, "false", SettingSource::kDefault);
      }
    }
    const bool from_environment =
        set_.truth("use_deepspeed") || set_.truth("use_fsdp") || set_.truth("use_megatron_lm");
    if (cluster() != nullptr && !typed && !from_environment) paradigm_of_file(*cluster());
    for (const auto name : kChoices) {  // --cpu beats the file and the environment
      const bool off = arguments_.on("cpu") && !arguments_.typed(name) && set_.has(name);
      if (off) set_.set(name, "false", SettingSource::kDefault);
    }
    run_.deepspeed = set_.truth("use_deepspeed");
    run_.fsdp = set_.truth("use_fsdp");
    run_.megatron = set_.truth("use_megatron_lm");
    run_.multi_gpu = set_.truth("multi_gpu");
    run_.parallelism = set_.truth("use_parallelism_config");
    run_.cpu = set_.truth("cpu");
    run_.accelerator = facts_.accelerator;
    if (run_.accelerator == AcceleratorKind::kNone && cluster() != nullptr) {
      run_.accelerator = accelerator_of(cluster()->distributed_type);
    }
  }

  void paradigm_of_file(const ClusterConfig& file) {
    using enum DistributedType;
    static const std::map<DistributedType, std::string_view> kFlags{
        {kMultiCpu, "cpu"},
        {kDeepspeed, "use_deepspeed"},
        {kFsdp, "use_fsdp"},
        {kMegatronLm, "use_megatron_lm"},
        {kXla, "tpu"}};
    const auto found = kFlags.find(file.distributed_type);
    const auto flag = found != kFlags.end() ? found->second : "multi_gpu";
    // An explicit setting wins: --no_use_fsdp, ACCELERATE_USE_CPU=0.
    if (file.distributed_type != kNo && !is_explicit(flag)) from_file(flag);
    if (!file.parallelism_config.empty() && !set_.has("use_parallelism_config")) {
      from_file("use_parallelism_config");
    }
  }

  void merge_engines() {
    if (!set_.has("mixed_precision")) set_.set("mixed_precision", "no", SettingSource::kDefault);
    merge_settings(
        engine_flags(), arguments_, environment_, config_,
        [&](const Flag& flag) { return engine_in_use(run_, flag); }, set_);
    if (run_.deepspeed && cluster() != nullptr) {
      std::vector<std::string> fields;
      for (const auto& [key, value] : cluster()->deepspeed_config) {
        fields.push_back(to_lower(key.to_string()));
      }
      if (set_.source("mixed_precision") == SettingSource::kConfig) {
        fields.emplace_back("mixed_precision");
      }
      run_.deepspeed_fields = join(fields, ",");
    }
  }

  // One Slurm task per node is a launcher per machine: Slurm's variables describe all machines.
  void place_in_outer_job() {
    World world;
    run_.outer = outer_job(environment_, world);
    if (run_.outer != OuterJob::kSlurmNodes) return;
    if (arguments_.typed("num_machines")) {
      const auto range = machine_range(*set_.text("num_machines"));
      if (range.max == 1) return;  // every node runs a job of its own
    } else {
      from_slurm("num_machines", str(*world.num_nodes), "SLURM_STEP_NUM_NODES");
    }
    if (!arguments_.typed("machine_rank")) {
      from_slurm("machine_rank", str(*world.node_rank), "SLURM_NODEID");
    }
    if (!is_explicit("main_process_ip")) {
      auto variables = environment_.variables();
      for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"}) {
        variables.erase(name);
      }
      const World found = detect_world(Environment(std::move(variables)), facts_.lookups);
      from_slurm("main_process_ip", found.master_addr, "SLURM_STEP_NODELIST");
    }
    if (!is_explicit("main_process_port")) {
      from_slurm("main_process_port", str(world.master_port), "SLURM_JOB_ID");
    }
  }

  // True if a flag or a variable sets it; these override Slurm's values.
  bool is_explicit(std::string_view name) const {
    const auto source = set_.source(name);
    return set_.has(name) &&
           (source == SettingSource::kFlag || source == SettingSource::kEnvironment);
  }

  void from_slurm(std::string_view name, std::string value, std::string variable) {
    set_.set(name, std::move(value), SettingSource::kEnvironment, std::move(variable));
  }

  void machines() {
    if (!set_.has("num_machines")) {
      set_.set("num_machines", "1", SettingSource::kDefault);
      if (!config_) assumed_.emplace_back("--num_machines 1");
    }
    const std::string text = *set_.text("num_machines");
    run_.machines = machine_range(text);
    run_.elastic = text.find(':') != std::string::npos;
    check_rendezvous(run_);
  }

  void machine_rank() {
    if (run_.needs_machine_rank() && !set_.has("machine_rank") && !config_) {
      throw ConfigError(str("--machine_rank is missing: with ", set_.label("num_machines"), " ",
                            *set_.text("num_machines"), " each machine needs its own, from 0 to ",
                            run_.machines.max - 1, "."));
    }
    if (!set_.has("machine_rank")) set_.set("machine_rank", "0", SettingSource::kDefault);
    if (run_.machines.max > 1) run_.machine_rank = check_machine_rank(run_);
  }

  // The number of accelerators that the run may use on this machine. Devices of other makers than
  // NVIDIA and AMD are not counted: their number is taken from --gpu_ids.
  int usable_devices() const {
    if (run_.accelerator == AcceleratorKind::kNone) return 0;
    const auto ids = set_.text("gpu_ids");
    if (ids && *ids != "all") return static_cast<int>(split(*ids, ',').size());
    return facts_.visible_count;
  }

  void devices_and_processes() {
    if (!set_.has("gpu_ids")) set_.set("gpu_ids", "all", SettingSource::kDefault);
    check_device_ids(run_, facts_);
    if (!set_.has("num_processes")) count_processes();
    run_.num_processes = check_process_count(run_);
    run_.processes_per_machine = run_.num_processes / run_.machines.max;
    const bool no_paradigm = !run_.deepspeed && !run_.fsdp && !run_.megatron && !run_.multi_gpu;
    const bool several = run_.num_processes > 1 && !set_.has("mpirun_hostfile");
    if (!config_ && no_paradigm && several && !run_.cpu && usable_devices() > 1) {
      run_.multi_gpu = true;
      set_.set("multi_gpu", "true", SettingSource::kDefault);
      if (run_.outer != OuterJob::kSlurmTasks) {
        assumed_.emplace_back(
            "--multi_gpu, since there is more than one GPU (--num_processes 1 for a single one)");
      }
    }
    check_enough_devices(run_);
  }

  void count_processes() {
    if (cluster() != nullptr) {
      if (cluster()->num_processes < 0) {
        throw ConfigError(str(config_->path, " does not say how many processes to start. Pass ",
                              "--num_processes, or add num_processes to it."));
      }
      set_.set("num_processes", str(cluster()->num_processes), SettingSource::kDefault);
      return;
    }
    // Assumes that every machine has as many accelerators as this one.
    const int here = run_.cpu ? 1 : std::max(usable_devices(), 1);
    set_.set("num_processes", str(here * run_.machines.max), SettingSource::kDefault);
    guessed_ = true;
    assumed_.push_back(str("--num_processes ", here * run_.machines.max));
  }

  void choose_mode() {
    const bool paradigm = run_.deepspeed || run_.fsdp || run_.megatron || run_.multi_gpu;
    if (one_worker_per_launcher()) {
      run_.mode = LaunchMode::kSimple;
      notice_job_size();
      if (arguments_.typed("num_processes") && run_.outer == OuterJob::kSlurmTasks) {
        run_.warnings.emplace_back(
            "Slurm has started this launcher once per task, so each starts one process and "
            "--num_processes does not count. For a launcher per machine: srun "
            "--ntasks-per-node=1.");
      }
    } else if (run_.uses_deepspeed_launcher()) {
      run_.mode = LaunchMode::kCommand;
    } else if (paradigm) {
      run_.mode = LaunchMode::kAgent;
    } else if (set_.has("mpirun_hostfile")) {
      run_.mode = LaunchMode::kCommand;
    } else if (!in_sized_job() && (run_.num_processes > 1 || asks_for_agent(arguments_))) {
      run_.mode = LaunchMode::kAgent;
    } else {
      run_.mode = LaunchMode::kSimple;
      notice_job_size();
    }
  }

  // Inside a job each launcher becomes one worker, regardless of --num_processes.
  void notice_job_size() {
    if (!in_sized_job() || !arguments_.typed("num_processes")) return;
    const bool mpi = run_.outer == OuterJob::kMpi;
    const auto size = mpi ? mpi_size(environment_, 1) : environment_.integer({"WORLD_SIZE"}, 1);
    if (size == run_.num_processes) return;
    run_.warnings.push_back(str("--num_processes ", run_.num_processes,
                                " starts no more processes here: this launcher is one of ", size,
                                " in ", mpi ? "an MPI" : "a torchrun", " job and becomes one ",
                                "worker of it."));
  }

  // Several launchers of one job on this machine: each becomes one worker.
  bool one_worker_per_launcher() const {
    if (run_.outer == OuterJob::kSlurmTasks) return true;
    return run_.outer == OuterJob::kMpi && mpi_local_size(environment_, 1) > 1;
  }

  bool in_sized_job() const {
    return run_.outer == OuterJob::kTorchrun || run_.outer == OuterJob::kMpi;
  }

  void notice_missing_accelerators() {
    if (run_.cpu || usable_devices() > 0) return;
    if (run_.mode != LaunchMode::kAgent) {
      if (!arguments_.typed("gpu_ids") || run_.accelerator > AcceleratorKind::kCuda) return;
      run_.warnings.push_back(str("There is no accelerator here: --gpu_ids ", *set_.text("gpu_ids"),
                                  " names none that the program could use."));
      return;
    }
    // Devices of other makers are not counted, so they may exist.
    if (run_.accelerator > AcceleratorKind::kCuda) return;
    run_.cpu = true;
    set_.set("cpu", "true", SettingSource::kDefault);
    run_.warnings.push_back(str("There is no accelerator here, so the ", run_.num_processes,
                                run_.num_processes == 1 ? " process trains" : " processes train",
                                " on the CPU. Pass --cpu if that is what you want."));
  }

  void precision() {
    const auto source = set_.source("mixed_precision");
    if (source == SettingSource::kDefault && !config_)
      assumed_.emplace_back("--mixed_precision no");
    if (source == SettingSource::kFlag && set_.text("mixed_precision") == "bf16" && !facts_.bf16 &&
        !run_.cpu) {
      throw ConfigError(
          "--mixed_precision is 'bf16', which the accelerators of this machine do not compute in. "
          "Choose fp16 or no.");
    }
    if (!set_.has("dynamo_backend")) {
      set_.set("dynamo_backend", "no", SettingSource::kDefault);
      if (!config_) assumed_.emplace_back("--dynamo_backend no");
    }
  }

  void threads() {
    const std::string name = "num_cpu_threads_per_process";
    if (!set_.has(name) && threads_are_chosen(environment_)) {
      set_.set(name, *environment_.get("OMP_NUM_THREADS"), SettingSource::kEnvironment,
               "OMP_NUM_THREADS");
    }
    if (!set_.has(name)) {
      int count = 1;
      if (run_.cpu) {
        const auto local = mpi_local_size(environment_, std::max(run_.processes_per_machine, 1));
        count = threads_per_process(facts_.physical_cores(), std::max<int>(1, int(local)));
        if (count > 1) assumed_.push_back(str("--", name, " ", count, " (cores shared out)"));
      }
      set_.set(name, str(count), SettingSource::kDefault);
    } else if (arguments_.typed(name) && *set_.integer(name) < 1) {
      throw ConfigError(str("--", name, " is ", *set_.text(name), ", expected at least 1."));
    }
    run_.threads = *set_.text(name);
  }

  void endpoint() {
    check_endpoint(run_);
    if (run_.mode == LaunchMode::kAgent && !set_.has("main_process_port")) {
      set_.set("main_process_port", str(kDefaultPort), SettingSource::kDefault);
    }
  }

  void find_mpi() {
    run_.mpi = facts_.find_mpi();
    if (run_.mpi) return;
    throw ConfigError(str(set_.label("mpirun_hostfile"), " is '", *set_.text("mpirun_hostfile"),
                          "', but PATH has neither mpirun nor mpiexec. Install Open MPI, Intel MPI "
                          "or MVAPICH."));
  }

  // Defaults that the plan shows.
  void add_defaults() {
    for (const auto* name : {"cpu", "debug", "enable_cpu_affinity"}) {
      if (!set_.has(name)) set_.set(name, "false", SettingSource::kDefault);
    }
  }

  void warn_about_idle_flags() {
    const auto idle = idle_flags(arguments_, run_);
    if (idle.empty()) return;
    const bool one = idle.size() == 1;
    run_.warnings.push_back(str(join(idle), one ? " has" : " have", " no effect here: this run ",
                                "does not use ", one ? "it." : "them."));
  }

  void warn_about_defaults() {
    if (!guessed_ || arguments_.on("quiet")) return;
    run_.warnings.push_back(
        str("defaults are used for settings that were not given: ", join(assumed_, "; "),
            ". Pass them or write them into a configuration file to avoid this message."));
  }

  const Arguments& arguments_;
  const std::optional<ConfigFile>& config_;
  const Environment& environment_;
  const MachineFacts& facts_;
  ResolvedLaunch run_;
  Settings& set_ = run_.settings;
  std::vector<std::string> assumed_;
  bool guessed_ = false;  // the number of processes
};

}  // namespace

bool ResolvedLaunch::uses_deepspeed_launcher() const {
  return deepspeed && machines.max > 1 &&
         settings.text("deepspeed_multinode_launcher").value_or("pdsh") != "standard";
}

bool ResolvedLaunch::needs_machine_rank() const {
  if (machines.max == 1) return false;
  if (mode == LaunchMode::kAgent) return settings.text("rdzv_backend") != "c10d";
  return mode == LaunchMode::kCommand && uses_deepspeed_launcher() &&
         settings.text("deepspeed_multinode_launcher") == "nossh";
}

std::int64_t mpi_size(const Environment& environment, std::int64_t fallback) {
  return environment.integer({"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}, fallback);
}

std::int64_t mpi_local_size(const Environment& environment, std::int64_t fallback) {
  return environment.integer(
      {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"}, fallback);
}

ResolvedLaunch resolve_launch(const Arguments& arguments, const std::optional<ConfigFile>& config,
                              const Environment& environment, const MachineFacts& facts) {
  return Resolver(arguments, config, environment, facts).run();
}

}  // namespace accelerate::detail::launch
