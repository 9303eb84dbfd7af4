#include "accelerate/checks.h"

#include <ATen/Context.h>
#include <c10/core/DeviceType.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/version.h"
#include "core/log.h"
#include "core/nvml.h"
#include "core/system.h"
#include "core/text.h"
#include "core/version.h"
#include "state/accelerator_backend.h"
#include "state/library_versions.h"

namespace accelerate {
namespace {

using detail::str;

/// LibTorch has one device type for libraries of vendors, which register it under their own name.
bool is_private_use_named(std::string_view name, bool check_device) {
  if (!c10::is_privateuse1_backend_registered() || c10::get_privateuse1_backend() != name)
    return false;
  if (!check_device) return true;
  return at::isPrivateUse1HooksRegistered() && at::detail::getPrivateUse1Hooks().deviceCount() > 0;
}

bool is_hpu_available() { return is_private_use_named("hpu", false) || at::hasHPU(); }

bool is_rocm_available() {
#ifdef USE_ROCM
  return is_cuda_available();  // ROCm builds of LibTorch present their devices as CUDA
#else
  return false;
#endif
}

bool is_torch_distributed_available() {
#ifdef USE_DISTRIBUTED
  return true;
#else
  return false;
#endif
}

bool is_xccl_available() {
#ifdef USE_C10D_XCCL
  return true;
#else
  return false;
#endif
}

struct Check {
  std::string_view name;
  bool (*available)();
};

/// Accelerators, and Python packages whose work this build does itself.
constexpr auto kChecks = std::to_array<Check>({
    {"bf16", [] { return is_bf16_available(); }},
    {"cuda", is_cuda_available},
    {"deepspeed", [] { return true; }},
    {"dvclive", [] { return true; }},
    {"fp16", [] { return !is_habana_gaudi1(); }},
    {"fp8", [] { return true; }},
    {"hpu", is_hpu_available},
    {"megatron_lm", [] { return true; }},
    {"mlflow", [] { return true; }},
    {"mlu", [] { return is_private_use_named("mlu", false); }},
    {"mps", [] { return is_mps_available(); }},
    {"musa", [] { return is_private_use_named("musa", false); }},
    {"neuron", [] { return is_private_use_named("neuron", false); }},
    {"npu", [] { return is_npu_available(); }},
    {"pippy", [] { return true; }},
    {"pynvml", [] { return detail::Nvml::system() != nullptr; }},
    {"rich", [] { return parse_flag_from_env("ACCELERATE_ENABLE_RICH"); }},
    {"rocm", is_rocm_available},
    {"sdaa", [] { return is_private_use_named("sdaa", false); }},
    {"tensorboard", [] { return true; }},
    {"torch_distributed", is_torch_distributed_available},
    {"torchao", [] { return true; }},
    {"tqdm", [] { return true; }},
    {"trackio", [] { return true; }},
    {"transformer_engine", [] { return true; }},
    {"wandb", [] { return true; }},
    {"weights_only", [] { return is_torch_version(">=", "2.4.0"); }},
    {"xccl", is_xccl_available},
    {"xpu", [] { return is_xpu_available(); }},
});

/// What exists for Python only, or is not in this build.
constexpr std::string_view kAbsent =
    "4bit_bnb 8bit_bnb aim bitsandbytes_multi_backend bnb boto3 clearml comet_ml datasets "
    "import_timer ipex lomo matplotlib msamp numpy pandas peft "
    "pytest sagemaker schedulefree swanlab timm torch_xla torchdata "
    "torchdata_stateful_dataloader torchvision tpu transformer_engine_mxfp8 "
    "transformers triton";

}  // namespace

// -- What can be used. ----------------------------------------------------------------------------

bool is_available(std::string_view name) {
  const auto found = std::ranges::find(kChecks, name, &Check::name);
  if (found != kChecks.end()) return found->available();
  auto names = detail::split(kAbsent, ' ');
  if (std::ranges::find(names, name) != names.end()) return false;
  for (const auto& check : kChecks) names.emplace_back(check.name);
  std::ranges::sort(names);
  throw ArgumentError(str("is_available does not know '", name, "'.",
                          detail::did_you_mean(name, names),
                          " Choose one of: ", detail::join(names), "."));
}

// Asks our own backend and not torch::cuda::is_available(), which would remember "no" in a program
// that loads torch_cuda later.
bool is_cuda_available() {
  const auto* backend = detail::state::accelerator_backend();
  return backend != nullptr && backend->type() == c10::DeviceType::CUDA;
}

// LibTorch's own answer counts devices: `check_device` adds nothing.
bool is_xpu_available(bool /*check_device*/) { return at::hasXPU(); }

bool is_mps_available(std::string_view min_version) {
  return is_torch_version(">=", min_version) && at::hasMPS();
}

bool is_npu_available(bool check_device) { return is_private_use_named("npu", check_device); }
bool is_habana_gaudi1() { return false; }
bool is_tpu_available(bool /*check_device*/) { return false; }
bool is_ipex_available() { return false; }

// CPUs, XPU, and MPS since macOS 14, the oldest system LibTorch still supports, compute bfloat16.
// Parity: Python counts the emulation on CUDA devices before Ampere too.
bool is_bf16_available(bool /*ignore_tpu*/) {
  constexpr int kAmpere = 8;
  const auto* backend = detail::state::accelerator_backend();
  if (backend == nullptr || backend->type() != c10::DeviceType::CUDA || is_rocm_available()) {
    return true;
  }
  return backend->capability(backend->current_device()).major >= kAmpere;
}

std::pair<std::string, DistributedType> get_current_device_type() {
  using Type = DistributedType;
  constexpr std::pair<const char*, Type> kPreferences[] = {
      {"mlu", Type::kMultiMlu}, {"sdaa", Type::kMultiSdaa},    {"musa", Type::kMultiMusa},
      {"npu", Type::kMultiNpu}, {"hpu", Type::kMultiHpu},      {"cuda", Type::kMultiGpu},
      {"xpu", Type::kMultiXpu}, {"neuron", Type::kMultiNeuron}};
  for (const auto& [device, type] : kPreferences) {
    if (is_available(device)) return {device, type};
  }
  return {"cuda", Type::kMultiGpu};
}

bool check_cuda_fp8_capability() {
  static const bool capable = [] {
    const auto* backend = detail::state::accelerator_backend();
    if (backend == nullptr || backend->type() != c10::DeviceType::CUDA) return false;
    const auto [major, minor] = backend->capability(0);
    return std::pair(major, minor) >= std::pair(8, 9);
  }();
  return capable;
}

std::vector<std::string> are_libraries_initialized(const std::vector<std::string>& /*names*/) {
  return {};
}

void install_xla(bool /*upgrade*/) {
  throw UnsupportedError(
      "install_xla: torch_xla is a Python package and cannot be used from C++. Run on CPU or CUDA "
      "devices instead.");
}

// -- Versions. ------------------------------------------------------------------------------------

namespace {

using detail::Version;

/// Of the LibTorch that this process has loaded, which may be newer than the headers we saw.
std::string torch_version() {
  const auto packed = aoti_torch_abi_version();
  return str(packed >> 56 & 0xff, ".", packed >> 48 & 0xff, ".", packed >> 40 & 0xff);
}

/// A function of a CUDA library, if that is loaded: we link none of them.
template <class Function>
Function* loaded(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

std::optional<std::string> cuda_version() {
  auto* get = loaded<int(int*)>("cudaRuntimeGetVersion");
  int version = 0;  // 13000 is 13.0
  if (get == nullptr || get(&version) != 0) return std::nullopt;
  return str(version / 1000, ".", version % 1000 / 10);
}

std::optional<std::string> cudnn_version() {
  auto* get = loaded<std::size_t()>("cudnnGetVersion");
  if (get == nullptr) return std::nullopt;
  const auto version = get();  // 91900 is 9.19.0
  return str(version / 10000, ".", version % 10000 / 100, ".", version % 100);
}

std::optional<std::string> nccl_version() {
  auto* get = loaded<int(int*)>("ncclGetVersion");
  int version = 0;  // 22807 is 2.28.7
  if (get == nullptr || get(&version) != 0) return std::nullopt;
  return str(version / 10000, ".", version % 10000 / 100, ".", version % 100);
}

}  // namespace

namespace detail::state {

std::optional<std::string> library_version(std::string_view library) {
  if (library == "torch") return torch_version();
  if (library == "accelerate") return std::string(kVersion);
  if (library == "cuda") return cuda_version();
  if (library == "cudnn") return cudnn_version();
  if (library == "nccl") return nccl_version();
  throw UnsupportedError(
      str("compare_versions knows no library '", library,
          "'. Give a version, or one of: torch, accelerate, cuda, cudnn, nccl."));
}

std::string libtorch_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&aoti_torch_abi_version), &info) == 0) return {};
  const std::string file = info.dli_fname;
  return file.substr(0, file.rfind('/'));
}

}  // namespace detail::state

bool compare_versions(std::string_view library_or_version, std::string_view operation,
                      std::string_view requirement) {
  auto left = Version::try_parse(library_or_version);
  if (!left) {
    const auto version = detail::state::library_version(library_or_version);
    if (!version) {
      throw UnsupportedError(
          str("compare_versions: ", library_or_version, " is not loaded in this process."));
    }
    left = Version::parse(*version);
  }
  return detail::compare(*left, operation, Version::parse(requirement));
}

bool is_torch_version(std::string_view operation, std::string_view version) {
  return compare_versions("torch", operation, version);
}

// -- CPU affinity. --------------------------------------------------------------------------------

namespace {

/// The CPUs next to the GPU that CUDA, after its own numbering and CUDA_VISIBLE_DEVICES, calls by
/// this index. The driver's word first, then the kernel's.
std::vector<int> cpus_near_gpu(detail::state::AcceleratorBackend& backend, int index) {
  const auto address = backend.pci_bus_id(index);
  if (const auto* nvml = detail::Nvml::system()) {
    const auto cpu_count = static_cast<std::size_t>(detail::allowed_cpus().back()) + 1;
    if (auto cpus = nvml->cpus_near(address, cpu_count); cpus && !cpus->empty()) return *cpus;
  }
  return detail::cpus_near_pci_device(address);
}

/// The CPUs to pin to; nothing when there is no choice to make.
std::optional<std::vector<int>> cpus_to_use(int local_process_index) {
  const auto allowed = detail::allowed_cpus();
  if (allowed.empty()) {
    detail::warn("The CPUs of this process cannot be asked for: its affinity stays as it is.");
    return std::nullopt;
  }
  auto* backend = detail::state::accelerator_backend();
  if (backend == nullptr) {
    return detail::cpus_of_turn(local_process_index, detail::numa_nodes(), allowed);
  }
  const int device = local_process_index % backend->device_count();
  auto near = detail::intersection(cpus_near_gpu(*backend, device), allowed);
  if (near.empty()) {
    detail::warn(str("None of the CPUs this process may use (", detail::format_cpulist(allowed),
                     ") is known to be next to its GPU ", device,
                     ": its affinity stays as it is."));
    return std::nullopt;
  }
  return near;
}

}  // namespace

void override_numa_affinity(int local_process_index, std::optional<bool> verbose) {
  if (local_process_index < 0) {
    throw ArgumentError(
        str("The local index of a process is 0 or more, not ", local_process_index, "."));
  }
  const bool tell = verbose ? *verbose : parse_flag_from_env("ACCELERATE_DEBUG_MODE");
  const auto cpus = cpus_to_use(local_process_index);
  if (!cpus) {
    if (tell) {
      detail::info(str("Process ", local_process_index, " stays on all CPUs it may use: ",
                       detail::format_cpulist(detail::allowed_cpus())));
    }
    return;
  }
  if (const auto reason = detail::restrict_to_cpus(*cpus)) {
    detail::warn(str("Process ", local_process_index, " cannot be kept on CPUs ",
                     detail::format_cpulist(*cpus), ": ", *reason, "."));
  } else if (tell) {
    detail::info(str("Assigning ", cpus->size(), " cpu cores to process ", local_process_index,
                     ": ", detail::format_cpulist(*cpus)));
  }
}

void set_numa_affinity(int local_process_index, std::optional<bool> verbose) {
  static std::mutex mutex;
  static std::set<int> done;
  const std::lock_guard lock(mutex);
  if (!done.insert(local_process_index).second) return;
  override_numa_affinity(local_process_index, verbose);
}

}  // namespace accelerate
