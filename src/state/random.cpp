#include "accelerate/random.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <mutex>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/log.h"
#include "core/process_variables.h"
#include "core/python_random.h"
#include "core/text.h"
#include "state/accelerator_backend.h"

namespace accelerate {
namespace {

using detail::str;

std::uint64_t rank_of_this_process() {
  if (!PartialState::initialized()) {
    throw StateError(
        "set_seed with device_specific adds the rank of this process, which is not known yet. Make "
        "a "
        "PartialState or an Accelerator first.");
  }
  return static_cast<std::uint64_t>(PartialState().process_index());
}

/// cuBLAS is deterministic only with a workspace of a fixed size, which it reads from the
/// environment when its first handle is made.
void fix_cublas_workspace() {
  constexpr const char* kVariable = "CUBLAS_WORKSPACE_CONFIG";
  const auto* backend = detail::state::accelerator_backend();
  if (backend == nullptr || Environment::process().contains(kVariable)) return;
  detail::set_process_variable(kVariable, ":4096:8");
  if (backend->context_exists()) {
    detail::warn(
        str("set_seed has set ", kVariable,
            " to :4096:8, but CUDA is already in use: matrix products may not be "
            "deterministic. Call set_seed earlier or set the variable before the program."));
  }
}

/// The default generator of a device of LibTorch's own or of a vendor's library.
at::Generator generator_of(c10::DeviceType type) {
  return at::globalContext().defaultGenerator(c10::Device(type, -1));
}

at::Generator generator_of_vendor(RNGType type, bool available,
                                  c10::DeviceType device = c10::DeviceType::PrivateUse1) {
  if (available) return generator_of(device);
  throw UnsupportedError(
      str("There is no ", detail::to_upper(to_string(type)),
          " in this process, so it has no random state: no library that brings one "
          "is loaded."));
}

at::Generator find_generator(RNGType type, const std::optional<at::Generator>& generator) {
  switch (type) {
    case RNGType::kTorch:
      return generator_of(c10::DeviceType::CPU);
    case RNGType::kGenerator:
      if (!generator || !generator->defined()) {
        throw ArgumentError(
            "RNGType 'generator' needs a generator: pass the one whose state is meant.");
      }
      return *generator;
    case RNGType::kCuda:
      if (auto* backend = detail::state::accelerator_backend()) {
        return at::globalContext().defaultGenerator(
            c10::Device(backend->type(), static_cast<c10::DeviceIndex>(backend->current_device())));
      }
      throw UnsupportedError(
          str("There is no CUDA device in this process, so it has no random state: ",
              detail::state::why_no_accelerator()));
    case RNGType::kXpu:
      return generator_of_vendor(type, is_xpu_available(), c10::DeviceType::XPU);
    case RNGType::kXla:
      throw UnsupportedError("XLA exists for Python only: there is no random state of it in C++.");
    case RNGType::kNpu:
      return generator_of_vendor(type, is_npu_available());
    case RNGType::kMlu:
      return generator_of_vendor(type, is_available("mlu"));
    case RNGType::kSdaa:
      return generator_of_vendor(type, is_available("sdaa"));
    case RNGType::kMusa:
      return generator_of_vendor(type, is_available("musa"));
    case RNGType::kHpu:
      return generator_of_vendor(
          type, is_available("hpu"),
          at::hasHPU() ? c10::DeviceType::HPU : c10::DeviceType::PrivateUse1);
    case RNGType::kNeuron:
      return generator_of_vendor(type, is_available("neuron"));
  }
  throw ArgumentError("This is not a value of RNGType.");
}

}  // namespace

void set_seed(std::uint64_t seed, const SeedOptions& options) {
  if (options.device_specific) seed += rank_of_this_process();
  host_rng() = detail::python_random_engine(seed);
  numpy_rng().seed(static_cast<std::uint32_t>(seed));
  at::manual_seed(seed);  // the CPU and every device of the accelerator
  if (options.deterministic) {
    fix_cublas_workspace();
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
}

std::mt19937& host_rng() {
  static std::mt19937 engine = detail::python_random_engine(std::random_device{}());
  return engine;
}

std::mt19937& numpy_rng() {
  static std::mt19937 engine(std::random_device{}());
  return engine;
}

at::Tensor get_rng_state(RNGType type, const std::optional<at::Generator>& generator) {
  auto found = find_generator(type, generator);
  const std::lock_guard lock(found.mutex());
  return found.get_state();
}

void set_rng_state(RNGType type, const at::Tensor& state,
                   const std::optional<at::Generator>& generator) {
  auto found = find_generator(type, generator);
  const std::lock_guard lock(found.mutex());
  found.set_state(state);
}

}  // namespace accelerate
