// src/launch/machine_facts.h - facts about this machine that the plan of a launch needs.
//
// Read from the kernel's files, without CUDA or threads. Slow facts are functions, called only when
// they are needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/enums.h"
#include "accelerate/environment.h"
#include "core/system.h"
#include "core/world.h"

namespace accelerate::detail::launch {

/// The maker of the devices, on which the variable for visible devices depends.
enum class AcceleratorKind : std::uint8_t {
  kNone,
  kCuda,  ///< NVIDIA, and AMD under ROCm
  kXpu,
  kMlu,
  kSdaa,
  kMusa,
  kNpu,
  kHpu,
  kNeuron,
};

/// The accelerator of MULTI_XPU and other types of one maker; kNone for all others, and for CUDA.
[[nodiscard]] AcceleratorKind accelerator_of(DistributedType type);
/// CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK, ...
[[nodiscard]] std::string_view visible_devices_variable(AcceleratorKind kind);

struct MpiProgram {
  std::string program;  ///< mpirun or mpiexec
  bool open_mpi = false;
};

struct MachineFacts {
  AcceleratorKind accelerator = AcceleratorKind::kNone;
  /// The number of devices, and how many of them a process of this environment sees.
  int device_count = 0;
  int visible_count = 0;
  /// True if the GPUs compute in bfloat16. CPUs always do.
  bool bf16 = true;
  /// NCCL must not connect these GPUs directly: RTX 40 with an old driver.
  bool needs_p2p_disabled = false;
  std::string host_name = {};
  std::string working_directory = {};

  /// The physical cores that this process may use.
  std::function<int()> physical_cores = [] { return 1; };
  /// The mpirun in PATH; nullopt if there is none. Runs `mpirun --version`.
  std::function<std::optional<MpiProgram>()> find_mpi = [] { return std::nullopt; };
  /// Host names and Slurm's controller.
  WorldLookups lookups = {};
};

/// The facts of this machine as seen from `environment`.
[[nodiscard]] MachineFacts gather_machine_facts(const Environment& environment);

/// How many of `device_count` devices a list such as "0,2" or "GPU-8932f937" makes visible. Like
/// the driver, stops at the first entry that is not a device.
[[nodiscard]] int count_visible_devices(std::string_view list, int device_count);

/// The NVIDIA GPUs that the kernel's files list.
struct NvidiaFacts {
  int device_count = 0;
  std::vector<std::string> names = {};
  std::string driver_version = {};
};
[[nodiscard]] NvidiaFacts nvidia_facts(const std::filesystem::path& dev, const SystemRoot& root);

/// True if this output of `mpirun --version` is from Open MPI.
[[nodiscard]] bool is_open_mpi(std::string_view version_text);

}  // namespace accelerate::detail::launch
