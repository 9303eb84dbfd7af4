// accelerate/checks.h - what this machine and this build can do.
//
//     if (accelerate::is_cuda_available()) ...            // asks the driver, creates no context
//     if (accelerate::is_available("wandb")) ...
//     if (accelerate::is_torch_version(">=", "2.12")) ...
//     accelerate::ReservedPort port;                      // free, and stays so until it is used
//
// Nothing here starts a child process or initialises an accelerator.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"

namespace accelerate {

// -- What can be used. ----------------------------------------------------------------------------
/// True if this process can use the thing of this name: a kind of device ("cuda", "rocm", "xpu",
/// "mps", "npu", "mlu", "sdaa", "musa", "neuron", "hpu"), a precision ("bf16", "fp16", "fp8"), or
/// what a Python package does ("deepspeed", "rich", "wandb", ...) if this build contains it. The
/// names are those of Python's `is_<name>_available`. Throws `ArgumentError` that lists them for
/// any other name.
///
/// Devices of vendors live behind LibTorch's PrivateUse1 device: true when a library that
/// registered it under that name is loaded. XLA, IPEX and TPUs exist for Python only: always false.
[[nodiscard]] ACCELERATE_API bool is_available(std::string_view name);

/// A CUDA device is visible and this library was built for it.
[[nodiscard]] ACCELERATE_API bool is_cuda_available();
[[nodiscard]] ACCELERATE_API bool is_xpu_available(bool check_device = false);
/// `min_version` is the least LibTorch version that counts.
[[nodiscard]] ACCELERATE_API bool is_mps_available(std::string_view min_version = "1.12");
/// With `check_device`, the library must count at least one device.
[[nodiscard]] ACCELERATE_API bool is_npu_available(bool check_device = false);
[[nodiscard]] ACCELERATE_API bool is_tpu_available(bool check_device = true);
[[nodiscard]] ACCELERATE_API bool is_ipex_available();
/// bfloat16 can be computed: on the CPU, and on CUDA devices of compute capability 8.0 (Ampere).
[[nodiscard]] ACCELERATE_API bool is_bf16_available(bool ignore_tpu = false);

/// The device word and the distributed type that a run on this machine's accelerator has, in
/// Python's order of preference. Without any accelerator the answer is CUDA's, as in Python.
[[nodiscard]] ACCELERATE_API std::pair<std::string, DistributedType> get_current_device_type();

/// Always false: only Habana's Python package tells the generation of a device.
[[nodiscard]] ACCELERATE_API bool is_habana_gaudi1();
/// The first visible GPU has compute capability 8.9 or more. False without a GPU.
[[nodiscard]] ACCELERATE_API bool check_cuda_fp8_capability();

/// The Python modules among `names` that are imported: always none. For programs ported from
/// Python.
[[nodiscard]] ACCELERATE_API std::vector<std::string> are_libraries_initialized(
    const std::vector<std::string>& names);

/// Throws `UnsupportedError`: torch_xla exists for Python only.
[[noreturn]] ACCELERATE_API void install_xla(bool upgrade = false);

// -- Versions. ------------------------------------------------------------------------------------
/// Compares by the rules of Python packages (PEP 440): 2.10 > 2.9, 2.11.0.dev1 < 2.11.0
/// < 2.11.0+cu130.
///
/// The left side is a version, or one of torch, accelerate, cuda, cudnn, nccl: the one this process
/// runs with. Throws `ArgumentError` for an operator that is not one of > >= == != <= < and for a
/// right side that is no version, `UnsupportedError` for a library that is not known or not loaded.
///
///     compare_versions("torch", ">=", "2.11");
[[nodiscard]] ACCELERATE_API bool compare_versions(std::string_view library_or_version,
                                                   std::string_view operation,
                                                   std::string_view requirement);
[[nodiscard]] ACCELERATE_API bool is_torch_version(std::string_view operation,
                                                   std::string_view version);

// -- The machine. ---------------------------------------------------------------------------------
struct GpuInfo {
  std::vector<std::string> names = {};
  int count = 0;
};
/// All NVIDIA GPUs of this machine, visible to CUDA or not. Throws `UnsupportedError` without
/// driver.
[[nodiscard]] ACCELERATE_API GpuInfo get_gpu_info();
/// "550.54.15". Throws `UnsupportedError` without driver.
[[nodiscard]] ACCELERATE_API std::string get_driver_version();
/// False on several GPUs of the RTX 40 family with a driver before 550.40.07, which cannot talk to
/// one another directly. True when in doubt.
[[nodiscard]] ACCELERATE_API bool check_cuda_p2p_ib_support();

/// Warns once when the kernel is older than 5.5.0, where multi-process runs have been seen to hang.
ACCELERATE_API void check_os_kernel();

/// Cores, not hyper-threads, that this process may use: its CPU mask, then the quota of its cgroup.
[[nodiscard]] ACCELERATE_API int physical_core_count();

/// The place of this process as launcher and MPI variables tell it.
struct CPUInformation {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;

  bool operator==(const CPUInformation&) const = default;
};
[[nodiscard]] ACCELERATE_API CPUInformation get_cpu_distributed_information();

/// Keeps this thread, and those it starts from now on, on the CPUs next to the GPU of the process;
/// without a GPU on one of several NUMA nodes, local processes taking turns. CPUs that are not
/// allowed stay forbidden. Does its work once per index. What cannot be pinned is left alone with a
/// warning. `verbose` logs the CPUs; unset: when ACCELERATE_DEBUG_MODE is on.
ACCELERATE_API void set_numa_affinity(int local_process_index,
                                      std::optional<bool> verbose = std::nullopt);
/// `set_numa_affinity` that does its work at every call.
ACCELERATE_API void override_numa_affinity(int local_process_index,
                                           std::optional<bool> verbose = std::nullopt);

// -- Ports. ---------------------------------------------------------------------------------------
/// Something on this host holds the port (unset: 29500), on IPv4 or IPv6.
[[nodiscard]] ACCELERATE_API bool is_port_in_use(std::optional<int> port = std::nullopt);
/// A port that was free a moment ago. Another process may take it: prefer `ReservedPort`.
[[nodiscard]] ACCELERATE_API int get_free_port();

/// A listening socket on a port of all interfaces, held until it is handed on or destroyed.
class ACCELERATE_API ReservedPort {
 public:
  /// `port` 0 lets the system choose. Throws `ConfigError` when the port is taken.
  explicit ReservedPort(int port = 0);
  ~ReservedPort();
  ReservedPort(ReservedPort&& other) noexcept;
  ReservedPort& operator=(ReservedPort&& other) noexcept;
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  [[nodiscard]] int port() const noexcept { return port_; }
  /// The socket, still ours; -1 after `release`.
  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// Hands the socket to the caller, who closes it: `TCPStoreOptions::masterListenFd` takes it.
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
  int port_ = 0;
};

}  // namespace accelerate
