#include "core/nvml.h"

#include <dlfcn.h>

#include <array>

#include "core/system.h"

namespace accelerate::detail::inline core {
namespace {

// The sizes that nvml.h promises to be enough.
constexpr std::size_t kVersionSize = 80;
constexpr std::size_t kNameSize = 96;

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

std::optional<NvmlFunctions> functions_of_driver() {
  void* library = ::dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  NvmlFunctions f;
  const bool complete = find(library, "nvmlInit_v2", f.init) &&
                        find(library, "nvmlShutdown", f.shutdown) &&
                        find(library, "nvmlSystemGetDriverVersion", f.driver_version) &&
                        find(library, "nvmlDeviceGetCount_v2", f.device_count) &&
                        find(library, "nvmlDeviceGetHandleByIndex_v2", f.device_by_index) &&
                        find(library, "nvmlDeviceGetHandleByPciBusId_v2", f.device_by_pci) &&
                        find(library, "nvmlDeviceGetName", f.device_name) &&
                        find(library, "nvmlDeviceGetCpuAffinity", f.cpu_affinity) &&
                        find(library, "nvmlDeviceGetMemoryInfo", f.memory) &&
                        find(library, "nvmlDeviceGetUtilizationRates", f.utilization);
  if (complete) return f;
  ::dlclose(library);
  return std::nullopt;
}

}  // namespace

const Nvml* Nvml::system() {
  // Never destroyed: at exit the driver's library may be gone before us.
  static const Nvml* const nvml = []() -> const Nvml* {
    const auto functions = functions_of_driver();
    if (!functions) return nullptr;
    auto started = start(*functions);
    return started ? new Nvml(std::move(*started)) : nullptr;
  }();
  return nvml;
}

std::optional<Nvml> Nvml::start(const NvmlFunctions& functions) {
  if (functions.init() != 0) return std::nullopt;
  return Nvml(functions);
}

Nvml::~Nvml() {
  if (functions_.shutdown != nullptr) functions_.shutdown();
}

std::optional<std::string> Nvml::driver_version() const {
  std::array<char, kVersionSize> text{};
  if (functions_.driver_version(text.data(), text.size()) != 0) return std::nullopt;
  return std::string(text.data());
}

std::optional<std::vector<std::string>> Nvml::device_names() const {
  unsigned count = 0;
  if (functions_.device_count(&count) != 0) return std::nullopt;
  std::vector<std::string> names;
  for (unsigned index = 0; index < count; ++index) {
    NvmlFunctions::Device device = nullptr;
    std::array<char, kNameSize> text{};
    if (functions_.device_by_index(index, &device) != 0) return std::nullopt;
    if (functions_.device_name(device, text.data(), text.size()) != 0) return std::nullopt;
    names.emplace_back(text.data());
  }
  return names;
}

std::optional<std::vector<int>> Nvml::cpus_near(const std::string& pci_address,
                                                std::size_t cpu_count) const {
  static_assert(sizeof(unsigned long) == sizeof(std::uint64_t),
                "NVML's words have 64 bits on Linux");
  NvmlFunctions::Device device = nullptr;
  if (functions_.device_by_pci(pci_address.c_str(), &device) != 0) return std::nullopt;
  std::vector<unsigned long> words((cpu_count + 63) / 64);
  if (functions_.cpu_affinity(device, static_cast<unsigned>(words.size()), words.data()) != 0) {
    return std::nullopt;
  }
  return cpus_of_words(std::vector<std::uint64_t>(words.begin(), words.end()));
}

std::optional<GpuUsage> Nvml::usage(const std::string& pci_address) const {
  NvmlFunctions::Device device = nullptr;
  std::array<unsigned long long, 3> bytes{};
  if (functions_.device_by_pci(pci_address.c_str(), &device) != 0) return std::nullopt;
  if (functions_.memory(device, bytes.data()) != 0) return std::nullopt;
  GpuUsage usage{.used_bytes = static_cast<std::int64_t>(bytes[2]),
                 .total_bytes = static_cast<std::int64_t>(bytes[0])};
  std::array<unsigned, 2> percent{};
  if (functions_.utilization(device, percent.data()) == 0) {
    usage.busy_percent = static_cast<int>(percent[0]);
  }
  return usage;
}

}  // namespace accelerate::detail::inline core
