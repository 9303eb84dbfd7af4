// src/launch/machine_facts.h - what the plan of a launch has to know about this machine.
//
// Found without CUDA, NVML or another thread: the kernel's files say enough. What takes longer is
// behind functions and asked for only where it counts.
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

namespace accelerate::detail {

/// Which variable chooses among the devices depends on their maker.
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
  /// The devices of the machine, and how many of them a process of this environment sees.
  int device_count = 0;
  int visible_count = 0;
  /// Whether GPUs compute in bfloat16; CPUs do.
  bool bf16 = true;
  /// GPUs that NCCL must not connect directly: RTX 40 with an old driver.
  bool needs_p2p_disabled = false;
  std::string host_name = {};
  std::string working_directory = {};

  /// Cores this process may use, hyper-threads counted once.
  std::function<int()> physical_cores = [] { return 1; };
  /// The mpirun of PATH; nothing without one. Starts it to learn whose it is.
  std::function<std::optional<MpiProgram>()> find_mpi = [] { return std::nullopt; };
  /// The resolver, and Slurm's controller.
  WorldLookups lookups = {};
};

/// The facts of this machine as seen from `environment`.
[[nodiscard]] MachineFacts gather_machine_facts(const Environment& environment);

/// How many of `device_count` devices a list such as "0,2" or "GPU-8932f937" lets through. As the
/// driver reads it: the first entry that names no device ends the list.
[[nodiscard]] int count_visible_devices(std::string_view list, int device_count);

/// The NVIDIA GPUs of the kernel's files.
struct NvidiaFacts {
  int device_count = 0;
  std::vector<std::string> names = {};
  std::string driver_version = {};
};
[[nodiscard]] NvidiaFacts nvidia_facts(const std::filesystem::path& dev, const SystemRoot& root);

/// Whether what `mpirun --version` prints is Open MPI's.
[[nodiscard]] bool is_open_mpi(std::string_view version_text);

}  // namespace accelerate::detail
