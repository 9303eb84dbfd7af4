#include "launch/idle_flags.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/text.h"

namespace accelerate::detail {
namespace {

template <std::size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// What an agent does for a single process, too.
constexpr std::array<std::string_view, 7> kAgentEvenForOne{
    "max_restarts",    "tee", "redirects", "log_dir", "local_ranks_filter", "signals_to_handle",
    "shutdown_timeout"};
constexpr std::array<std::string_view, 7> kAgentOnly{"rdzv_backend",
                                                     "rdzv_conf",
                                                     "rdzv_id",
                                                     "local_addr",
                                                     "monitor_interval",
                                                     "role",
                                                     "log_line_prefix_template"};
constexpr std::array<std::string_view, 3> kSeveralMachines{"rdzv_conf", "local_addr",
                                                           "same_network"};

// Typed, and not what a run has anyway.
bool says_something(const LaunchArguments& arguments, const Flag& flag) {
  const auto typed = arguments.values.find(flag.name);
  if (typed == arguments.values.end()) return false;
  if (flag.kind == FlagKind::kSwitch) return typed->second == "true";
  if (flag.name == "machine_rank") return typed->second != "0";
  if (flag.name == "dynamo_backend") return to_lower(typed->second) != "no";
  return typed->second != flag.fallback;
}

// Whether address and port of machine 0 reach anybody.
bool address_counts(const ResolvedLaunch& run) {
  if (run.mode == LaunchMode::kAgent) return run.machines.max > 1;
  if (run.deepspeed) return run.mode == LaunchMode::kCommand;
  return run.num_processes > 1 || run.machines.max > 1;
}

bool counts(const ResolvedLaunch& run, const Flag& flag) {
  const std::string_view name = flag.name;
  const bool agent = run.mode == LaunchMode::kAgent;
  if (!agent && (is_one_of(kAgentOnly, name) || is_one_of(kAgentEvenForOne, name))) return false;
  if (run.machines.max == 1 && is_one_of(kSeveralMachines, name)) return false;
  if (name == "machine_rank") return run.needs_machine_rank();
  if (name == "main_process_ip") return address_counts(run);
  if (name == "main_process_port") return agent || address_counts(run);
  if (name == "mpirun_hostfile") return run.mpi.has_value();
  if (name == "mpirun_bind_to") return run.mpi && run.mpi->open_mpi;
  if (name == "use_megatron_lm") return run.megatron;
  // DeepSpeed's workers are told neither of the compiler nor, by its own launcher, of threads.
  if (name.starts_with("dynamo_")) return !run.deepspeed;
  if (name == "num_cpu_threads_per_process") return !run.uses_deepspeed_launcher();
  return true;
}

}  // namespace

bool engine_in_use(const ResolvedLaunch& run, const Flag& flag) {
  switch (flag.group) {
    case FlagGroup::kDeepspeed:
      return run.deepspeed;
    case FlagGroup::kFsdp:
      return run.fsdp;
    case FlagGroup::kMegatron:
      return run.megatron;
    case FlagGroup::kFp8:
      return run.settings.text("mixed_precision") == "fp8";
    case FlagGroup::kParallelism:
      return run.parallelism;
    default:
      return true;
  }
}

bool asks_for_agent(const LaunchArguments& arguments) {
  return std::ranges::any_of(kAgentEvenForOne, [&](std::string_view name) {
    return says_something(arguments, *find_flag(name));
  });
}

std::vector<std::string> idle_flags(const LaunchArguments& arguments, const ResolvedLaunch& run) {
  std::vector<std::string> idle;
  for_each_flag([&](const Flag& flag) {
    const bool of_idle_engine = arguments.typed(flag.name) && !engine_in_use(run, flag);
    if (of_idle_engine || (says_something(arguments, flag) && !counts(run, flag))) {
      idle.push_back(str("--", flag.name));
    }
  });
  return idle;
}

}  // namespace accelerate::detail
