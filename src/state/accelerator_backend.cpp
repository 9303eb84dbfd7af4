// Runs when the library is loaded: oneDNN is kept from tiles that the processor announces but does
// not have, and libaccelerate_cuda.so is opened if a GPU driver is present.
//
// The latter must happen before the first question about CUDA: `torch::cuda::is_available()` caches
// a "no", and the next CUDA tensor would abort the program. So the driver is looked up without
// LibTorch.
#include "state/accelerator_backend.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>

#include "accelerate/environment.h"
#include "core/cpu_features.h"
#include "core/text.h"
#include "state/device_kernel.h"

namespace accelerate::detail::state {
namespace {

constexpr const char* kCompanion = "libaccelerate_cuda.so";

struct Companion {
  void* library = nullptr;
  std::string why_not;
};

bool exists(const char* path) {
  struct stat info = {};
  return ::stat(path, &info) == 0;
}

/// Why no GPU can be used; nullopt if one may be present.
std::optional<std::string> no_driver() {
  if (const char* visible = ::getenv("CUDA_VISIBLE_DEVICES")) {
    const auto text = trim(visible);
    if (text.empty() || text == "-1") {
      return str("CUDA_VISIBLE_DEVICES is '", visible, "', which hides every GPU");
    }
  }
  if (!exists("/dev/nvidiactl") && !exists("/dev/nvidia0") && !exists("/dev/dxg")) {
    return "no NVIDIA device is present (no /dev/nvidiactl)";
  }
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return "the NVIDIA driver library libcuda.so.1 was not found";
  ::dlclose(driver);
  return std::nullopt;
}

/// The companion is beside libaccelerate.so, in a build tree and in an installed prefix.
std::string companion_path() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&why_no_accelerator), &info) != 0 &&
      info.dli_fname != nullptr) {
    const auto beside = std::filesystem::path(info.dli_fname).parent_path() / kCompanion;
    std::error_code ignored;
    if (std::filesystem::exists(beside, ignored)) return beside.string();
  }
  return kCompanion;
}

bool cpu_is_wanted() {
  const char* text = ::getenv("ACCELERATE_USE_CPU");
  if (text == nullptr || *text == '\0') return false;
  try {
    return str_to_bool(text);
  } catch (const std::exception&) {
    return false;  // PartialState reports the value by an exception
  }
}

Companion open_companion() {
  if (cpu_is_wanted()) return {nullptr, "ACCELERATE_USE_CPU is set"};
  if (auto reason = no_driver()) return {nullptr, *std::move(reason)};
  // Global, so that LibTorch's registries see the CUDA kernels as if they had been linked.
  void* library = ::dlopen(companion_path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    return {nullptr, str("a GPU driver is present, but ", kCompanion,
                         " could not be opened: ", reason != nullptr ? reason : "unknown reason")};
  }
  return {library, ""};
}

const Companion& companion() {
  static const Companion opened = open_companion();
  return opened;
}

__attribute__((constructor)) void prepare_at_load() {
  avoid_amx_without_palettes();
  companion();
}

std::atomic<AcceleratorBackend*> replacement = nullptr;

struct Found {
  AcceleratorBackend* backend = nullptr;
  std::string why_not;
};

const Found& found() {
  static const Found result = []() -> Found {
    const auto& opened = companion();
    if (opened.library == nullptr) return {nullptr, opened.why_not};
    auto* make = reinterpret_cast<decltype(&accelerate_cuda_backend)>(
        ::dlsym(opened.library, "accelerate_cuda_backend"));
    if (make == nullptr) return {nullptr, str(kCompanion, " is of another version")};
    if (AcceleratorBackend* backend = make()) return {backend, ""};
    return {nullptr, "the NVIDIA driver is present, but offers this process no device"};
  }();
  return result;
}

}  // namespace

AcceleratorBackend* accelerator_backend() noexcept {
  if (auto* backend = replacement.load()) return backend;
  try {
    return found().backend;
  } catch (...) {
    return nullptr;
  }
}

int gpu_index(c10::Device device) {
  return device.has_index() ? device.index() : accelerator_backend()->current_device();
}

void replace_accelerator_backend(AcceleratorBackend* backend) noexcept { replacement = backend; }

std::string why_no_accelerator() { return found().why_not; }

DeviceKernelMaker* device_kernel_maker() noexcept {
  auto* const maker = dynamic_cast<DeviceKernelMaker*>(accelerator_backend());
  return maker != nullptr && maker->can_compile() ? maker : nullptr;
}

}  // namespace accelerate::detail::state
