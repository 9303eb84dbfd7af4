// src/core/backend_choice.h - type of parallelism, backend and device index of a process. No Torch.
#pragma once

#include <optional>
#include <string>

#include "accelerate/enums.h"

namespace accelerate::detail::inline core {

/// All that the choice depends on.
struct BackendFacts {
  /// A launcher, MPI, Slurm or the program itself has said which of how many processes this is.
  bool launched = false;
  int num_processes = 1;
  int local_rank = 0;
  /// Processes on this host, where known.
  std::optional<int> local_size = std::nullopt;
  /// Stay on the CPU.
  bool cpu = false;
  /// Python's word for the accelerator of this machine: "cuda", "xpu", "npu", ...; "" for none.
  std::string accelerator = {};
  int device_count = 0;
  /// What the caller asked for.
  std::optional<std::string> backend = std::nullopt;
  /// Parameters are offloaded or gathered to the CPU: NCCL needs Gloo beside it.
  bool collectives_on_cpu_too = false;
};

struct BackendChoice {
  DistributedType type = DistributedType::kNo;
  std::optional<std::string> backend = std::nullopt;
  /// Whether the process computes on the CPU.
  bool cpu = false;
  /// The index of the device; meaningless when the type is `kNo`.
  int device_index = 0;
  /// What the user should know, or "".
  std::string warning = {};

  bool operator==(const BackendChoice&) const = default;
};

/// Decides. Throws `ConfigError` for a backend that does not fit the device, naming both, and
/// `CommError` when NCCL is asked for and a host has more processes than devices.
[[nodiscard]] BackendChoice choose_backend(const BackendFacts& facts);

/// Whether `backend` ("nccl", "cuda:nccl,cpu:gloo") uses NCCL.
[[nodiscard]] bool uses_nccl(const std::string& backend);

}  // namespace accelerate::detail::inline core
