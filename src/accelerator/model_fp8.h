// src/accelerator/model_fp8.h - prepared models that multiply in 8 bits, and their state.
#pragma once

#include <filesystem>
#include <vector>

#include "accelerate/state/stateful.h"
#include "accelerator/accelerator_core.h"
#include "fp8/converted.h"

namespace accelerate::detail::accelerator {

/// Converts a model, which is on its device and has its engine, as the recipe of the run says.
/// `converted` are the layers that the program has converted before.
void multiply_in_8_bits(AcceleratorCore& core, ModelCore& model,
                        const std::vector<fp8::LinearLayer>& converted);

/// Delayed scales and their maxima, in fp8_scaling_{rank}.bin; no file if there are none.
[[nodiscard]] StateEntry fp8_entry(const ObjectRegistry& registry);
/// Reads the file of this process, else that of process 0: all have the same scales, unless inputs
/// were uneven. Without a file scales stay as they are.
void load_fp8_state(const ObjectRegistry& registry, const std::filesystem::path& folder, int rank);

}  // namespace accelerate::detail::accelerator
