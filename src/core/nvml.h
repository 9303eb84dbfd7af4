// src/core/nvml.h - NVIDIA's management library: facts about GPUs without a CUDA context.
//
// It comes with the driver, so it is opened at run time and may be missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::detail::inline core {

/// The functions of libnvidia-ml that we call, with its signatures. 0 means success.
struct NvmlFunctions {
  using Device = void*;

  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*driver_version)(char* text, unsigned size) = nullptr;
  int (*device_count)(unsigned* count) = nullptr;
  int (*device_by_index)(unsigned index, Device* device) = nullptr;
  int (*device_by_pci)(const char* address, Device* device) = nullptr;
  int (*device_name)(Device device, char* text, unsigned size) = nullptr;
  int (*cpu_affinity)(Device device, unsigned words, unsigned long* set) = nullptr;
  /// Fill three and two numbers: total, free and used bytes; percent of time busy, and of memory.
  int (*memory)(Device device, unsigned long long* bytes) = nullptr;
  int (*utilization)(Device device, unsigned* percent) = nullptr;
};

/// How a GPU is used now, by all processes together.
struct GpuUsage {
  std::int64_t used_bytes = 0;
  std::int64_t total_bytes = 0;
  /// Percent of the last moments in which a kernel ran; nullopt if the driver does not tell.
  std::optional<int> busy_percent = std::nullopt;

  bool operator==(const GpuUsage&) const = default;
};

/// An initialised NVML. Every question may go unanswered: drivers refuse some of them in
/// containers.
class Nvml {
 public:
  /// The driver's, opened once per process; nullptr without a driver that works.
  [[nodiscard]] static const Nvml* system();

  /// Starts with these functions; nothing when `init` fails.
  [[nodiscard]] static std::optional<Nvml> start(const NvmlFunctions& functions);
  Nvml(Nvml&& other) noexcept : functions_(std::exchange(other.functions_, {})) {}
  Nvml& operator=(Nvml&&) = delete;
  ~Nvml();

  [[nodiscard]] std::optional<std::string> driver_version() const;
  /// The names of all GPUs, by index.
  [[nodiscard]] std::optional<std::vector<std::string>> device_names() const;
  /// The CPUs next to the GPU at a PCI address, out of `cpu_count`.
  [[nodiscard]] std::optional<std::vector<int>> cpus_near(const std::string& pci_address,
                                                          std::size_t cpu_count) const;
  [[nodiscard]] std::optional<GpuUsage> usage(const std::string& pci_address) const;

 private:
  explicit Nvml(const NvmlFunctions& functions) : functions_(functions) {}

  NvmlFunctions functions_;
};

}  // namespace accelerate::detail::inline core
