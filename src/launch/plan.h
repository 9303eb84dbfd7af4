// src/launch/plan.h - what a launch starts, from flags, configuration file, environment and
// machine.
//
// `make_plan` is a pure function and starts nothing. `accelerate launch --dry_run` prints its
// result, `accelerate launch` executes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/launch_config.h"

namespace accelerate::detail::launch {

/// How the command is executed.
enum class LaunchMode : std::uint8_t {
  kSimple,   ///< this process becomes the program; no ranks
  kAgent,    ///< an agent starts and watches workers with ranks
  kCommand,  ///< this process becomes another launcher: mpirun, deepspeed
};

/// Where a value comes from, in order of precedence.
enum class SettingSource : std::uint8_t { kFlag, kEnvironment, kConfig, kDefault };

/// One resolved setting, for `--dry_run`.
struct Setting {
  std::string name;
  std::string value;
  SettingSource source = SettingSource::kDefault;
  /// The variable or the file it came from; "" for flags and defaults.
  std::string origin = {};
};

struct LaunchPlan {
  LaunchMode mode = LaunchMode::kSimple;
  std::vector<Setting> settings = {};
  /// The whole command. For kAgent it still contains ${local_rank}.
  std::vector<std::string> argv = {};
  /// The program as typed; for Python the script or module, not the interpreter.
  std::string program = {};
  /// Variables of every process, in addition to the launcher's environment.
  std::map<std::string, std::string> variables = {};
  /// For kAgent.
  LaunchConfig agent = {};
  /// The program loads libaccelerate.so: its rank 0 serves the store on a socket that it inherits.
  /// For other programs `accelerate-torch` serves the store.
  bool takes_listen_fd = false;
  /// Printed once on stderr.
  std::vector<std::string> warnings = {};
  bool quiet = false;
  /// Index of the user's command in `argv`, after the words of mpirun or deepspeed.
  std::size_t program_at = 0;
  /// Lines for the file from which DeepSpeed's launcher sets variables on other machines.
  std::vector<std::string> deepspeed_environment = {};
};

struct Arguments;
struct ConfigFile;
struct MachineFacts;

/// The plan of a command line. Throws the same errors as `resolve_launch`.
[[nodiscard]] LaunchPlan make_plan(const Arguments& arguments,
                                   const std::optional<ConfigFile>& config,
                                   const Environment& environment, const MachineFacts& facts);

struct LaunchRound;
/// The variables that tell a worker of this machine its place in a round: RANK, WORLD_SIZE, ...,
/// TORCHELASTIC_*. `agent_store`: a helper process serves the store, not rank 0. `outer` is the
/// launcher's environment, whose TORCH_NCCL_ASYNC_ERROR_HANDLING is kept.
[[nodiscard]] std::map<std::string, std::string> worker_variables(const LaunchConfig& agent,
                                                                  const LaunchRound& round,
                                                                  int local_rank, bool agent_store,
                                                                  const Environment& outer);

/// The arguments of a worker, with ${local_rank} replaced.
[[nodiscard]] std::vector<std::string> worker_arguments(const std::vector<std::string>& argv,
                                                        int local_rank);

}  // namespace accelerate::detail::launch
