// src/launch/plan.h - from flags, configuration file, environment and machine to what is started.
//
// A pure function: it looks at nothing but its arguments and starts nothing. `accelerate launch
// --dry_run` prints its result, `accelerate launch` carries it out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "launch/launch_config.h"

namespace accelerate::detail {

/// What happens to the command.
enum class LaunchMode : std::uint8_t {
  kSimple,   ///< this process becomes the program; no ranks
  kAgent,    ///< workers with ranks, started and watched by us
  kCommand,  ///< this process becomes another launcher: mpirun, deepspeed
};

/// Who said it. In order of precedence.
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
  /// The whole command, argv[0] found and checked. For kAgent ${local_rank} is still there.
  std::vector<std::string> argv = {};
  /// What the user wants to run, as typed: with Python the script or module, not the interpreter.
  std::string program = {};
  /// Set for every process on top of the launcher's environment; nothing else changes in it.
  std::map<std::string, std::string> variables = {};
  /// For kAgent.
  LaunchConfig agent = {};
  /// The program loads libaccelerate.so: its rank 0 serves the store, on a socket that it is
  /// handed. For all others `accelerate-torch` does.
  bool takes_listen_fd = false;
  /// What the user should know, once, on stderr.
  std::vector<std::string> warnings = {};
  bool quiet = false;
  /// Where the user's own command begins in `argv`: behind the words of mpirun or deepspeed.
  std::size_t program_at = 0;
  /// Lines that DeepSpeed's launcher finds in a file and sets on the other machines.
  std::vector<std::string> deepspeed_environment = {};
};

struct LaunchArguments;
struct ConfigFile;
struct MachineFacts;

/// The plan of a command line. Throws `ConfigError` and `UnsupportedError` as `resolve_launch`
/// does.
[[nodiscard]] LaunchPlan make_plan(const LaunchArguments& arguments,
                                   const std::optional<ConfigFile>& config,
                                   const Environment& environment, const MachineFacts& facts);

/// The place of a worker, once the machines have met.
struct WorkerPlace {
  int local_rank = 0;
  int local_world_size = 1;
  int rank = 0;
  int world_size = 1;
  int group_rank = 0;  ///< of the machine
  int group_world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  int restart_count = 0;
  int max_restarts = 0;
  std::string run_id = "none";
  std::string role = "default";
  /// Somebody other than rank 0 serves the store.
  bool agent_store = false;
  std::string error_file = {};
};

struct LaunchRound;
/// The place of one worker of this machine in a round; the agent's address and port.
[[nodiscard]] WorkerPlace worker_place(const LaunchConfig& agent, const LaunchRound& round,
                                       int local_rank);

/// RANK, WORLD_SIZE, ... TORCHELASTIC_*: the variables by which a worker knows its place. `outer`
/// is the launcher's environment: TORCH_NCCL_ASYNC_ERROR_HANDLING stays as it is there.
[[nodiscard]] std::map<std::string, std::string> worker_variables(const WorkerPlace& place,
                                                                  const Environment& outer);

/// The arguments of a worker: ${local_rank} replaced.
[[nodiscard]] std::vector<std::string> worker_arguments(const std::vector<std::string>& argv,
                                                        int local_rank);

}  // namespace accelerate::detail
