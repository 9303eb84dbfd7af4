// src/launch/checks.h - flags that contradict each other, numbers that do not fit this run, flags
// without effect. Used by resolve.cpp, in this order.
#pragma once

#include <string>
#include <vector>

#include "launch/command.h"
#include "launch/machine_facts.h"
#include "launch/resolve.h"
#include "launch/settings.h"

namespace accelerate::detail::launch {

// Each check throws `ConfigError` or `UnsupportedError`.

/// No two flags that exclude each other.
void check_typed_flags(const Arguments& arguments);
/// The file is not for SageMaker.
void check_config_is_local(const ConfigFile& file);
/// Nothing needs XLA or SageMaker. For Python programs such flags get a warning only.
void check_reachable(const Arguments& arguments, ResolvedLaunch& run);
/// The backend, and the range of machines it allows.
void check_rendezvous(const ResolvedLaunch& run);
[[nodiscard]] int check_machine_rank(const ResolvedLaunch& run);
/// --gpu_ids names existing devices, each of them once.
void check_device_ids(const ResolvedLaunch& run, const MachineFacts& facts);
/// Returns the number of processes: at least one, and the same number on every machine.
[[nodiscard]] int check_process_count(const ResolvedLaunch& run);
/// At most 8192 processes on one machine: a typing error must not use up its memory.
void check_processes_per_machine(const ResolvedLaunch& run);
/// --gpu_ids names more than one device for several processes of one machine.
void check_enough_devices(const ResolvedLaunch& run);
/// Several machines have an address and a port. Removes the brackets around an IPv6 address.
void check_endpoint(ResolvedLaunch& run);
void check_engines(const ResolvedLaunch& run, const Environment& environment);

/// True if the run uses the engine of this flag, and for flags of no engine.
[[nodiscard]] bool engine_in_use(const ResolvedLaunch& run, const Flag& flag);
/// True if a flag that only an agent obeys, such as --max_restarts, was typed with another value
/// than its default: then a single process gets an agent, too.
[[nodiscard]] bool asks_for_agent(const Arguments& arguments);
/// The typed flags without effect on this run, e.g. "--fsdp_version", in the order of the help. A
/// flag with its default value is not among them, unless its engine is not in use. To be called
/// after the mode is chosen.
[[nodiscard]] std::vector<std::string> idle_flags(const Arguments& arguments,
                                                  const ResolvedLaunch& run);

}  // namespace accelerate::detail::launch
