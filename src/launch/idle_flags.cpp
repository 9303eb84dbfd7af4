#include "launch/idle_flags.h"

#include <algorithm>
#include <string_view>

#include "core/text.h"

namespace accelerate::detail {
namespace {

// True if the flag was typed with another value than the default.
bool differs_from_default(const LaunchArguments& arguments, const Flag& flag) {
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
  return std::ranges::any_of(general_flags(), [&](const Flag& flag) {
    return flag.agent == AgentUse::kDemand && differs_from_default(arguments, flag);
  });
}

std::vector<std::string> idle_flags(const LaunchArguments& arguments, const ResolvedLaunch& run) {
  std::vector<std::string> idle;
  for_each_flag([&](const Flag& flag) {
    const bool of_idle_engine = arguments.typed(flag.name) && !engine_in_use(run, flag);
    if (of_idle_engine || (differs_from_default(arguments, flag) && !has_effect(run, flag))) {
      idle.push_back(str("--", flag.name));
    }
  });
  return idle;
}

}  // namespace accelerate::detail
