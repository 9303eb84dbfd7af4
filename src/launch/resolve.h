// src/launch/resolve.h - all decisions of a launch: the settings, what follows from them, and
// every check that is possible before anything starts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/command.h"
#include "launch/machine_facts.h"
#include "launch/settings.h"

namespace accelerate::detail::launch {

/// The kind of job that started this launcher as one of several processes.
enum class OuterJob : std::uint8_t {
  kNone,
  kTorchrun,
  kMpi,
  kSlurmNodes,  ///< one task per node: a launcher on every machine
  kSlurmTasks,  ///< several tasks per node: each of them is one worker
};

struct ResolvedLaunch {
  Settings settings = {};
  LaunchMode mode = LaunchMode::kSimple;
  OuterJob outer = OuterJob::kNone;

  bool deepspeed = false;
  bool fsdp = false;
  bool megatron = false;
  bool multi_gpu = false;
  bool parallelism = false;
  /// Runs on the CPU.
  bool cpu = false;
  /// The program is a Python script or module.
  bool python = false;
  /// --num_machines MIN:MAX.
  bool elastic = false;

  int num_processes = 1;
  MachineRange machines = {};
  int processes_per_machine = 1;
  int machine_rank = 0;
  std::string threads = "1";
  AcceleratorKind accelerator = AcceleratorKind::kNone;
  /// Keys of `deepspeed_config`, for ACCELERATE_CONFIG_DS_FIELDS.
  std::string deepspeed_fields = {};
  /// For kCommand through mpirun.
  std::optional<MpiProgram> mpi = std::nullopt;

  std::vector<std::string> warnings = {};

  /// DeepSpeed's own launcher starts the other machines.
  [[nodiscard]] bool uses_deepspeed_launcher() const;
  /// True if each machine needs --machine_rank. mpirun, most of DeepSpeed's launchers and c10d
  /// number the machines themselves.
  [[nodiscard]] bool needs_machine_rank() const;
};

/// A pure function of its arguments (and of the functions in `facts`); starts nothing.
///
/// Throws `ConfigError` with the names of flags, variables or file that do not fit together, and
/// `UnsupportedError` for features that only Python Accelerate has.
[[nodiscard]] ResolvedLaunch resolve_launch(const Arguments& arguments,
                                            const std::optional<ConfigFile>& config,
                                            const Environment& environment,
                                            const MachineFacts& facts);

/// The processes of the MPI job around this launcher: all of them, and those of this machine.
[[nodiscard]] std::int64_t mpi_size(const Environment& environment, std::int64_t fallback);
[[nodiscard]] std::int64_t mpi_local_size(const Environment& environment, std::int64_t fallback);

}  // namespace accelerate::detail::launch
