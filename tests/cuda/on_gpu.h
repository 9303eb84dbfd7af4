// tests/cuda/on_gpu.h - processes of a test that use the GPU.
#pragma once

#include <optional>

#include "support/on_processes.h"

namespace accelerate::test {

/// Without these options the harness keeps processes on the CPU.
inline OnProcessesOptions on_gpu() {
  return {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}}};
}

}  // namespace accelerate::test
