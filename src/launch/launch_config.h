// src/launch/launch_config.h - the settings of a machine's agent: number of workers, address
// of the rendezvous, restarts, output.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::detail::launch {

/// A selection of a worker's streams, with torchrun's numbers.
enum class Streams { kNone = 0, kOutput = 1, kError = 2, kBoth = 3 };

/// The streams of each worker: "3" for all, "0:3,1:1" by local rank (none for other ranks).
struct StreamChoice {
  Streams all = Streams::kNone;
  std::map<int, Streams> by_local_rank = {};

  [[nodiscard]] Streams of(int local_rank) const;
  [[nodiscard]] bool any() const noexcept {
    return all != Streams::kNone || !by_local_rank.empty();
  }
  /// Throws `ConfigError` with `flag` and the text if it is not valid.
  [[nodiscard]] static StreamChoice parse(const std::string& text, const std::string& flag);

  bool operator==(const StreamChoice&) const = default;
};

struct LogsSpecs {
  /// nullopt: a temporary folder, created when needed and removed at the end.
  std::optional<std::filesystem::path> log_dir = std::nullopt;
  StreamChoice redirects = {};  ///< into a file instead of the console
  StreamChoice tee = {};        ///< into a file as well
  /// Local ranks whose output the console shows; empty: all.
  std::vector<int> local_ranks_filter = {};
};

struct LaunchConfig {
  int min_nodes = 1;
  int max_nodes = 1;
  int nproc_per_node = 1;
  std::string run_id = "none";
  std::string role = "default";
  /// "static" or "c10d".
  std::string rdzv_backend = "static";
  /// The address of the rendezvous and of the workers' store. Port 0: a free one.
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  /// timeout, join_timeout, last_call_timeout (seconds), ...
  std::map<std::string, std::string> rdzv_configs = {};
  int node_rank = 0;
  int max_restarts = 0;
  double monitor_interval = 0.1;
  std::optional<std::string> log_line_prefix_template = std::nullopt;
  LogsSpecs logs = {};
  std::vector<int> signals_to_handle = {};
  std::chrono::seconds shutdown_timeout{30};
  /// The address under which others reach this machine; "": detected.
  std::string local_addr = {};

  [[nodiscard]] bool several_machines() const noexcept { return max_nodes > 1; }
  [[nodiscard]] bool elastic() const noexcept { return rdzv_backend == "c10d"; }
};

}  // namespace accelerate::detail::launch
