// src/core/world.h - who started this process, as which of how many. No Torch, no side effects.
//
// Understands torchrun and `accelerate launch`, Open MPI, MPICH and Intel MPI, MVAPICH, and Slurm's
// srun. Variables of the first win over MPI's, and these over Slurm's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/environment.h"

namespace accelerate::detail::inline core {

enum class WorldSource : std::uint8_t { kAlone, kTorchrun, kOpenMpi, kMpich, kMvapich, kSlurm };

[[nodiscard]] std::string to_string(WorldSource source);

/// The place of this process among all. `kAlone`: no launcher started it.
struct World {
  WorldSource source = WorldSource::kAlone;
  int rank = 0;
  int size = 1;
  /// The index on this host, processes here and number of hosts, where the launcher tells.
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_size = std::nullopt;
  std::optional<int> num_nodes = std::nullopt;
  std::optional<int> node_rank = std::nullopt;
  /// The address of process 0.
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  /// torchrun's agent serves the store.
  bool agent_store = false;
  /// How often the launcher has started the whole group anew.
  int restarts = 0;

  bool operator==(const World&) const = default;
};

/// Lookups beyond the environment. Tests pass their own.
struct WorldLookups {
  /// Whether a host name leads to an address.
  std::function<bool(const std::string& host)> resolves = {};
  /// What the Slurm controller says is the address of a node.
  std::function<std::optional<std::string>(const std::string& node)> node_address = {};

  /// The resolver of this machine, and `scontrol show node`.
  [[nodiscard]] static WorldLookups system();
};

/// Finds out who started this process.
///
/// Throws `ConfigError` that names the variable that is missing, is no number, or the two that
/// contradict each other.
[[nodiscard]] World detect_world(const Environment& environment,
                                 const WorldLookups& lookups = WorldLookups::system());

/// The hosts of a Slurm list such as "n[1-3,07],gpu-a", in order. Throws `ConfigError`.
[[nodiscard]] std::vector<std::string> expand_hostlist(std::string_view hostlist);

/// Slurm's count per node, "2(x3),1": the tasks on node number `node`; nullopt if unknown.
[[nodiscard]] std::optional<int> tasks_on_node(std::string_view counts, int node);

/// A port for a Slurm step: the same on all its tasks, seldom the same for two steps, and below the
/// range from which the system takes ports for outgoing connections.
[[nodiscard]] int port_for_step(std::int64_t job_id, std::int64_t step_id);

/// The place of `rank` among the ranks with its host: given the host of each rank, in rank order.
struct Locality {
  int local_rank = 0;
  int local_size = 1;
  int num_nodes = 1;
  int node_rank = 0;

  bool operator==(const Locality&) const = default;
};
[[nodiscard]] Locality locality_of(int rank, const std::vector<std::string>& host_of_rank);

/// The addresses of this host's network interfaces that are up, without loopback and link-local.
[[nodiscard]] std::vector<std::string> interface_addresses();

/// The name of this host.
[[nodiscard]] std::string this_host_name();

/// Whether an address never leaves this host.
[[nodiscard]] bool is_loopback(std::string_view address);

/// "NodeAddr=" of what `scontrol show node` prints.
[[nodiscard]] std::optional<std::string> node_addr_from(std::string_view scontrol_output);

/// Whether OMP_NUM_THREADS says how many threads to use: 1 or more. "4,2", a number per level, is
/// legal too. Throws `ConfigError` for what is no number.
[[nodiscard]] bool threads_are_chosen(const Environment& environment);

/// How many threads each process of a host takes: the cores shared out, at least one.
[[nodiscard]] int threads_per_process(int cores, int local_size);

}  // namespace accelerate::detail::inline core
