// src/launch/checks.h - what must not be: flags that contradict each other, numbers that do not fit
// this run. Used by resolve.cpp, in this order. Each throws `ConfigError` or `UnsupportedError`.
#pragma once

#include "launch/arguments.h"
#include "launch/machine_facts.h"
#include "launch/resolve.h"
#include "launch/settings.h"

namespace accelerate::detail {

/// Flags that exclude each other.
void check_typed_flags(const LaunchArguments& arguments);
/// Not a file for SageMaker.
void check_config_is_local(const ConfigFile& file);
/// Nothing that needs XLA or SageMaker. For Python programs, flags of theirs only get a warning.
void check_reachable(const LaunchArguments& arguments, ResolvedLaunch& run);
/// The backend, and the range of machines it allows.
void check_rendezvous(const ResolvedLaunch& run);
[[nodiscard]] int check_machine_rank(const ResolvedLaunch& run);
/// --gpu_ids names devices, each once, that exist.
void check_device_ids(const ResolvedLaunch& run, const MachineFacts& facts);
/// At least one, and as many on every machine.
[[nodiscard]] int check_process_count(const ResolvedLaunch& run);
/// Not more for one machine than anybody can mean: a slip of the hand would use up its memory.
void check_processes_per_machine(const ResolvedLaunch& run);
/// Several processes of one machine have more than one device.
void check_enough_devices(const ResolvedLaunch& run);
/// Address and port are there where several machines need them. Brackets around IPv6 are removed.
void check_endpoint(ResolvedLaunch& run);
void check_engines(const LaunchArguments& arguments, const ResolvedLaunch& run);

}  // namespace accelerate::detail
