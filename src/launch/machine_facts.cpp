#include "launch/machine_facts.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "core/files.h"
#include "core/numbers.h"
#include "core/nvml.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

namespace fs = std::filesystem;

struct Maker {
  AcceleratorKind kind;
  DistributedType type;
  std::string_view variable;
};
constexpr std::array<Maker, 7> kMakers{{
    {AcceleratorKind::kXpu, DistributedType::kMultiXpu, "ZE_AFFINITY_MASK"},
    {AcceleratorKind::kMlu, DistributedType::kMultiMlu, "MLU_VISIBLE_DEVICES"},
    {AcceleratorKind::kSdaa, DistributedType::kMultiSdaa, "SDAA_VISIBLE_DEVICES"},
    {AcceleratorKind::kMusa, DistributedType::kMultiMusa, "MUSA_VISIBLE_DEVICES"},
    {AcceleratorKind::kNpu, DistributedType::kMultiNpu, "ASCEND_RT_VISIBLE_DEVICES"},
    {AcceleratorKind::kHpu, DistributedType::kMultiHpu, "HABANA_VISIBLE_MODULES"},
    {AcceleratorKind::kNeuron, DistributedType::kMultiNeuron, "NEURON_RT_VISIBLE_CORES"},
}};

// Calls `f(path)` for the entries of a folder, which may be missing or not readable.
template <class F>
void for_each_entry(const fs::path& folder, F&& f) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    f(it->path());
  }
}

std::string read_or_nothing(const fs::path& path) {
  try {
    return read_whole_file(path, std::size_t{64} << 10);
  } catch (const Error&) {
    return {};
  }
}

// AMD's kernel driver shows CPUs and GPUs as nodes; CPUs have no gpu_id.
int amd_gpu_count(const SystemRoot& root) {
  int count = 0;
  for_each_entry(root.sys / "class/kfd/kfd/topology/nodes", [&](const fs::path& node) {
    const std::string id = read_or_nothing(node / "gpu_id");
    if (const auto text = trim(id); !text.empty() && text != "0") ++count;
  });
  return count;
}

int visible_devices(const Environment& environment, int device_count, bool amd) {
  // An empty variable hides all devices; `get` would treat it as unset.
  std::vector<std::string> names{"CUDA_VISIBLE_DEVICES"};
  if (amd) names.insert(names.begin(), {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"});
  for (const auto& name : names) {
    const auto found = environment.variables().find(name);
    if (found != environment.variables().end()) {
      return count_visible_devices(found->second, device_count);
    }
  }
  return device_count;
}

std::optional<MpiProgram> find_mpi(const Environment& environment) {
  for (const auto* name : {"mpirun", "mpiexec"}) {
    const std::string path = find_in_path(name, environment);
    if (path.empty()) continue;
    const auto version =
        output_of({path, "--version"}, StreamTarget::kWithOutput, std::chrono::seconds(30));
    if (version) return MpiProgram{.program = name, .open_mpi = is_open_mpi(*version)};
  }
  return std::nullopt;
}

// Under WSL the GPUs have no device files.
NvidiaFacts ask_nvml() {
  NvidiaFacts facts;
  const Nvml* nvml = Nvml::system();
  if (nvml == nullptr) return facts;
  facts.names = nvml->device_names().value_or(std::vector<std::string>{});
  facts.device_count = static_cast<int>(facts.names.size());
  facts.driver_version = nvml->driver_version().value_or("");
  return facts;
}

void gather_accelerators(const Environment& environment, MachineFacts& facts) {
  auto nvidia = nvidia_facts("/dev", {});
  std::error_code ignored;
  if (nvidia.device_count == 0 && fs::exists("/dev/dxg", ignored)) nvidia = ask_nvml();
  facts.device_count = nvidia.device_count;
  const bool amd = facts.device_count == 0;
  if (amd) facts.device_count = amd_gpu_count({});
  if (facts.device_count == 0) return;
  facts.accelerator = AcceleratorKind::kCuda;
  facts.visible_count = visible_devices(environment, facts.device_count, amd);
  facts.needs_p2p_disabled = facts.visible_count > 1 && !nvidia.driver_version.empty() &&
                             !p2p_ib_supported(nvidia.names, nvidia.driver_version);
  // Torch computes in bfloat16 on every GPU it supports, on old ones through float32.
  facts.bf16 = true;
}

}  // namespace

AcceleratorKind accelerator_of(DistributedType type) {
  const auto* found = std::ranges::find(kMakers, type, &Maker::type);
  return found == kMakers.end() ? AcceleratorKind::kNone : found->kind;
}

std::string_view visible_devices_variable(AcceleratorKind kind) {
  const auto* found = std::ranges::find(kMakers, kind, &Maker::kind);
  return found == kMakers.end() ? "CUDA_VISIBLE_DEVICES" : found->variable;
}

int count_visible_devices(std::string_view list, int device_count) {
  if (trim(list).empty()) return 0;
  std::set<std::string> seen;
  for (const auto& part : split(list, ',')) {
    const std::string entry(trim(part));
    if (is_digits(entry)) {
      if (parse_number<int>(entry).value_or(device_count) >= device_count) break;
    } else if (!entry.starts_with("GPU-") && !entry.starts_with("MIG-")) {
      break;
    }
    if (!seen.insert(entry).second) return 0;  // the driver refuses a list with repeats
  }
  return static_cast<int>(seen.size());
}

NvidiaFacts nvidia_facts(const fs::path& dev, const SystemRoot& root) {
  NvidiaFacts facts;
  for_each_entry(dev, [&](const fs::path& path) {
    const std::string name = path.filename().string();
    if (name.starts_with("nvidia") && is_digits(std::string_view(name).substr(6))) {
      ++facts.device_count;
    }
  });
  if (facts.device_count == 0) return facts;
  for_each_entry(root.proc / "driver/nvidia/gpus", [&](const fs::path& gpu) {
    for (const auto& line : split(read_or_nothing(gpu / "information"), '\n')) {
      if (line.starts_with("Model:")) facts.names.emplace_back(trim(line.substr(6)));
    }
  });
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.40.07  ..."
  for (const auto& word : split(read_or_nothing(root.proc / "driver/nvidia/version"), ' ')) {
    const auto parts = split(word, '.');
    if (parts.size() < 2 || !std::ranges::all_of(parts, [](auto& p) { return is_digits(p); })) {
      continue;
    }
    facts.driver_version = word;
    break;
  }
  return facts;
}

bool is_open_mpi(std::string_view version_text) {
  return version_text.find("Open MPI") != std::string_view::npos;
}

MachineFacts gather_machine_facts(const Environment& environment) {
  MachineFacts facts;
  gather_accelerators(environment, facts);
  facts.host_name = this_host_name();
  std::error_code ignored;
  facts.working_directory = fs::current_path(ignored).string();
  facts.physical_cores = physical_core_count;
  facts.find_mpi = [environment] { return find_mpi(environment); };
  facts.lookups = WorldLookups::system();
  return facts;
}

}  // namespace accelerate::detail::launch
