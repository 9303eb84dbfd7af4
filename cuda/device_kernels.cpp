#include "device_kernels.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "kernel_cache.h"

namespace accelerate::detail::cuda {
namespace {

// -- NVRTC and the driver -------------------------------------------------------------------------

/// nvrtc.h is not in every wheel: its functions return 0 or an error.
struct Nvrtc {
  int (*version)(int* major, int* minor) = nullptr;
  int (*create)(void** program, const char* source, const char* name, int headers,
                const char* const* header_sources, const char* const* header_names) = nullptr;
  int (*destroy)(void** program) = nullptr;
  int (*compile)(void* program, int count, const char* const* options) = nullptr;
  int (*log_size)(void* program, std::size_t* size) = nullptr;
  int (*log)(void* program, char* text) = nullptr;
  int (*binary_size)(void* program, std::size_t* size) = nullptr;
  int (*binary)(void* program, char* bytes) = nullptr;
};

struct Driver {
  decltype(&cuCtxGetCurrent) current_context = nullptr;
  decltype(&cuGetErrorString) error_text = nullptr;
  decltype(&cuModuleLoadData) load = nullptr;
  decltype(&cuModuleGetFunction) get_function = nullptr;
  decltype(&cuFuncGetAttribute) get_attribute = nullptr;
  decltype(&cuFuncSetAttribute) set_attribute = nullptr;
  decltype(&cuOccupancyMaxActiveBlocksPerMultiprocessor) blocks_at_once = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;
  decltype(&cuFuncLoad) load_function = nullptr;  // nullptr in drivers before CUDA 12.4
};

struct Libraries {
  Nvrtc nvrtc;
  Driver driver;
  bool are_there = false;
};

template <class Function>
bool look_up(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

/// LibTorch's own way to NVRTC and the driver: a library that needs both, and finds NVRTC where it
/// was installed.
void* open_nvrtc() {
  constexpr const char* kName = "libcaffe2_nvrtc.so";
  if (void* library = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL)) return library;
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&c10::cuda::current_device), &info) == 0) {
    return nullptr;
  }
  const auto beside = std::filesystem::path(info.dli_fname).parent_path() / kName;
  return ::dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
}

Libraries open_libraries() {
  Libraries found;
  void* const library = open_nvrtc();
  if (library == nullptr) return found;
  auto& [nvrtc, driver, are_there] = found;
  look_up(library, "cuFuncLoad", driver.load_function);
  are_there =
      look_up(library, "nvrtcVersion", nvrtc.version) &&
      look_up(library, "nvrtcCreateProgram", nvrtc.create) &&
      look_up(library, "nvrtcDestroyProgram", nvrtc.destroy) &&
      look_up(library, "nvrtcCompileProgram", nvrtc.compile) &&
      look_up(library, "nvrtcGetProgramLogSize", nvrtc.log_size) &&
      look_up(library, "nvrtcGetProgramLog", nvrtc.log) &&
      look_up(library, "nvrtcGetCUBINSize", nvrtc.binary_size) &&
      look_up(library, "nvrtcGetCUBIN", nvrtc.binary) &&
      look_up(library, "cuCtxGetCurrent", driver.current_context) &&
      look_up(library, "cuGetErrorString", driver.error_text) &&
      look_up(library, "cuModuleLoadData", driver.load) &&
      look_up(library, "cuModuleGetFunction", driver.get_function) &&
      look_up(library, "cuFuncGetAttribute", driver.get_attribute) &&
      look_up(library, "cuFuncSetAttribute", driver.set_attribute) &&
      look_up(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.blocks_at_once) &&
      look_up(library, "cuLaunchKernel", driver.launch);
  return found;
}

const Libraries& libraries() {
  static const Libraries opened = open_libraries();
  return opened;
}

const Driver& driver() { return libraries().driver; }

void check(CUresult result, const char* doing, const std::string& kernel) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_text(result, &text);
  throw UnsupportedError(str("The GPU kernel '", kernel, "' could not be ", doing, ": ",
                             text != nullptr ? text : "unknown error", "."));
}

/// A thread that has made no call of CUDA has no context.
void ensure_context() {
  CUcontext context = nullptr;
  if (driver().current_context(&context) == CUDA_SUCCESS && context != nullptr) return;
  c10::cuda::set_device(c10::cuda::current_device(), /*force=*/true);
}

// -- compilation ----------------------------------------------------------------------------------

class NvrtcProgram {
 public:
  explicit NvrtcProgram(const std::string& source) {
    if (nvrtc_.create(&program_, source.c_str(), "kernels.cu", 0, nullptr, nullptr) != 0) {
      throw UnsupportedError("NVRTC could not be started: it takes no source.");
    }
  }
  ~NvrtcProgram() { nvrtc_.destroy(&program_); }
  NvrtcProgram(const NvrtcProgram&) = delete;
  NvrtcProgram& operator=(const NvrtcProgram&) = delete;

  std::string compile(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const auto& option : options) pointers.push_back(option.c_str());
    if (nvrtc_.compile(program_, static_cast<int>(pointers.size()), pointers.data()) != 0) {
      throw UnsupportedError(str("A GPU kernel could not be compiled with ", join(options, " "),
                                 ". NVRTC reports:\n", read(nvrtc_.log_size, nvrtc_.log).c_str()));
    }
    return read(nvrtc_.binary_size, nvrtc_.binary);
  }

 private:
  template <class Size, class Read>
  std::string read(Size size_of, Read read_into) {
    std::size_t size = 0;
    if (size_of(program_, &size) != 0) return {};
    std::string text(size, '\0');
    return read_into(program_, text.data()) == 0 ? text : std::string();
  }

  const Nvrtc& nvrtc_ = libraries().nvrtc;
  void* program_ = nullptr;
};

std::string binary_of(const std::string& source, const cudaDeviceProp& device) {
  const std::vector<std::string> options{str("--gpu-architecture=sm_", device.major, device.minor),
                                         "--std=c++17"};
  int major = 0;
  int minor = 0;
  libraries().nvrtc.version(&major, &minor);
  const auto key = str("NVRTC ", major, ".", minor, "\n", join(options, "\n"), "\n", source);
  if (auto binary = find_cached_kernel(key)) return *std::move(binary);
  auto binary = NvrtcProgram(source).compile(options);
  cache_kernel(key, binary);
  return binary;
}

// -- modules --------------------------------------------------------------------------------------

/// Lets this thread load a module while one of its streams is recorded.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// A source with its modules, which stay loaded as long as the process runs.
class Source {
 public:
  explicit Source(std::string text) : text_(std::move(text)) {}

  CUmodule module_on_current_device(const std::string& kernel) {
    const std::lock_guard lock(mutex_);
    auto& module = modules_[c10::cuda::current_device()];
    if (module == nullptr) {
      const auto binary = binary_of(text_, *at::cuda::getCurrentDeviceProperties());
      check(driver().load(&module, binary.data()), "loaded", kernel);
    }
    return module;
  }

 private:
  std::string text_;
  std::mutex mutex_;
  std::map<int, CUmodule> modules_;
};

std::shared_ptr<Source> shared_source(std::string text) {
  static std::mutex mutex;
  static auto& sources = *new std::map<std::string, std::shared_ptr<Source>>;
  const std::lock_guard lock(mutex);
  auto& source = sources[text];
  if (!source) source = std::make_shared<Source>(std::move(text));
  return source;
}

constexpr std::size_t kMostDevices = 64;

class CudaKernel final : public state::DeviceKernel {
 public:
  CudaKernel(std::shared_ptr<Source> source, std::string name)
      : source_(std::move(source)), name_(std::move(name)) {}

 private:
  struct OnDevice {
    std::atomic<CUfunction> function = nullptr;
    // Threads and bytes of shared memory of a block, and how many blocks run at once then.
    std::atomic<std::uint64_t> residency = 0;
  };

  void launch_with(const state::KernelGrid& grid, void** arguments) const override {
    if (grid.blocks <= 0 || grid.blocks_y <= 0) return;
    ensure_context();
    const auto device = static_cast<std::size_t>(c10::cuda::current_device());
    if (device >= kMostDevices) {
      throw UnsupportedError(str("GPU ", device, " cannot run the kernel '", name_, "': only ",
                                 kMostDevices, " devices are supported."));
    }
    auto& here = devices_[device];
    auto function = here.function.load(std::memory_order_acquire);
    if (function == nullptr) {
      function = load();
      here.function.store(function, std::memory_order_release);
    }
    auto blocks = grid.blocks;
    if (grid.is_persistent) blocks = std::min(blocks, resident_blocks(here, function, grid));
    check(driver().launch(
              function, static_cast<unsigned>(blocks), static_cast<unsigned>(grid.blocks_y), 1,
              static_cast<unsigned>(grid.threads), 1, 1, static_cast<unsigned>(grid.shared_bytes),
              c10::cuda::getCurrentCUDAStream().stream(), arguments, nullptr),
          "launched", name_);
  }

  /// Two threads may do this at once: they get the same function.
  CUfunction load() const {
    const RelaxedCapture relaxed;
    CUfunction function = nullptr;
    check(driver().get_function(&function, source_->module_on_current_device(name_), name_.c_str()),
          "found", name_);
    // Otherwise its first launch might load it, perhaps while a graph is recorded.
    if (driver().load_function != nullptr) {
      check(driver().load_function(function), "loaded", name_);
    }
    // More than 48 KB of shared memory are an option.
    int fixed = 0;
    check(driver().get_attribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), "examined",
          name_);
    const auto most = at::cuda::getCurrentDeviceProperties()->sharedMemPerBlockOptin;
    check(driver().set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                 static_cast<int>(most) - fixed),
          "prepared", name_);
    return function;
  }

  std::int64_t resident_blocks(OnDevice& here, CUfunction function,
                               const state::KernelGrid& grid) const {
    const auto shape = static_cast<std::uint64_t>(grid.threads) << 48 |
                       static_cast<std::uint64_t>(grid.shared_bytes) << 16;
    constexpr std::uint64_t kBlocks = 0xFFFF;
    auto known = here.residency.load(std::memory_order_relaxed);
    if ((known & ~kBlocks) != shape) {
      int blocks = 0;
      check(driver().blocks_at_once(&blocks, function, grid.threads,
                                    static_cast<std::size_t>(grid.shared_bytes)),
            "examined", name_);
      known = shape | static_cast<std::uint64_t>(std::max(blocks, 1));
      here.residency.store(known, std::memory_order_relaxed);
    }
    return static_cast<std::int64_t>(known & kBlocks) *
           at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  }

  std::shared_ptr<Source> source_;
  std::string name_;
  mutable std::array<OnDevice, kMostDevices> devices_;
};

}  // namespace

bool can_compile_kernels() noexcept {
  try {
    return libraries().are_there;
  } catch (const std::exception&) {
    return false;
  }
}

std::shared_ptr<const state::DeviceKernel> make_device_kernel(std::string source,
                                                              const std::string& name) {
  return std::make_shared<CudaKernel>(shared_source(std::move(source)), name);
}

}  // namespace accelerate::detail::cuda
