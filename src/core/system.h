// src/core/system.h - CPUs, NUMA nodes, cgroup quota and kernel of this machine, without Torch.
//
// What reads the kernel's files takes the folder they are in, so that tests can show it another
// machine. The public side is accelerate/checks.h.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::inline core {

/// The folders of the kernel's files.
struct SystemRoot {
  std::filesystem::path sys = "/sys";
  std::filesystem::path proc = "/proc";
};

/// "0-3,8,10-11" -> 0 1 2 3 8 10 11, sorted, each once. Nothing when the text is no such list.
[[nodiscard]] std::optional<std::vector<int>> parse_cpulist(std::string_view text);
/// The reverse of `parse_cpulist`: the shortest list of ranges.
[[nodiscard]] std::string format_cpulist(std::span<const int> cpus,
                                         std::string_view separator = ",");
/// Bit b of word w stands for CPU 64 * w + b, as NVML tells affinities.
[[nodiscard]] std::vector<int> cpus_of_words(std::span<const std::uint64_t> words);
/// Both sides sorted.
[[nodiscard]] std::vector<int> intersection(std::span<const int> a, std::span<const int> b);

/// The CPUs this process may run on.
[[nodiscard]] std::vector<int> allowed_cpus();
/// Keeps this process, and the threads it will start, on these CPUs. Returns the reason if
/// that fails.
[[nodiscard]] std::optional<std::string> restrict_to_cpus(std::span<const int> cpus);

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;
};
/// Nodes that have CPUs, by number. Empty where the kernel does not tell.
[[nodiscard]] std::vector<NumaNode> numa_nodes(const SystemRoot& root = {});
/// The CPUs of the node for a local process without a GPU: processes take the nodes in turn, those
/// without an allowed CPU left out. Nothing where fewer than two nodes are left.
[[nodiscard]] std::optional<std::vector<int>> cpus_of_turn(int local_process_index,
                                                           std::span<const NumaNode> nodes,
                                                           std::span<const int> allowed);

/// The kernel's spelling of a PCI address: "00000000:3B:00.0" -> "0000:3b:00.0". Nothing when it is
/// none: the text becomes part of a path.
[[nodiscard]] std::optional<std::string> pci_address(std::string_view text);
/// The CPUs next to a PCI device; empty where the kernel does not tell.
[[nodiscard]] std::vector<int> cpus_near_pci_device(std::string_view address,
                                                    const SystemRoot& root = {});

/// How many CPUs' worth of time the cgroups of this process allow (version 1 or 2, the tightest on
/// the way to the root). Nothing without a limit.
[[nodiscard]] std::optional<double> cgroup_cpu_quota(const SystemRoot& root = {});
/// Bytes of memory that this process can still take without swapping: what the machine has
/// available, within the limits of its cgroups (version 1 or 2).
[[nodiscard]] std::int64_t available_memory(const SystemRoot& root = {});
/// Cores among these CPUs, hyper-threads counted once; their number where the kernel does not tell.
/// At most the quota, rounded up, and at least one.
[[nodiscard]] int count_physical_cores(std::span<const int> cpus, std::optional<double> quota,
                                       const SystemRoot& root = {});

/// "5.15.0-91-generic" -> 5 15 0; parts that are missing are 0. Nothing without a number.
[[nodiscard]] std::optional<std::array<int, 3>> kernel_version(std::string_view release);
/// What `check_os_kernel` says about a release, if it says anything.
[[nodiscard]] std::optional<std::string> kernel_warning(std::string_view release);

/// The rule behind `check_cuda_p2p_ib_support`.
[[nodiscard]] bool p2p_ib_supported(std::span<const std::string> gpu_names,
                                    std::string_view driver_version);

}  // namespace accelerate::detail::inline core
