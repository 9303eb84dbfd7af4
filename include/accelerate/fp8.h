// accelerate/fp8.h - linear layers that multiply in 8 bits.
//
// `mixed_precision = fp8` of an `Accelerator` does all of this in `prepare`, by a recipe
// (accelerate/kwargs/fp8_recipes.h). The functions here are for programs that convert models
// themselves. A converted model keeps its modules, parameters, names and state dict: what changes
// is how products with the weights are computed. docs/fp8.md tells more.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/fp8_recipes.h"

namespace accelerate {

/// Whether to convert a module, given its dotted name.
using Fp8ModuleFilter = Callback<bool(const torch::nn::Module&, const std::string&)>;

/// The names of the first and the last `Linear`, in the order of `named_modules`; "" is the model
/// itself, nullopt that there is none.
[[nodiscard]] ACCELERATE_API std::pair<std::optional<std::string>, std::optional<std::string>>
find_first_last_linear_layers(const torch::nn::Module& model);

/// True unless `module` is a `Linear` with a feature count that is no multiple of 16, or
/// `layers_to_filter` has its name.
[[nodiscard]] ACCELERATE_API bool filter_linear_layers(
    const torch::nn::Module& module, const std::string& fqn,
    const std::vector<std::string>& layers_to_filter);

/// As `filter_linear_layers` without the first and the last layer of the model that is being
/// converted; called outside of a conversion, of `module`. The default filter.
[[nodiscard]] ACCELERATE_API bool filter_first_and_last_linear_layers(
    const torch::nn::Module& module, const std::string& fqn);

/// Lets the `Linear` modules below `model` that pass the filter multiply in 8 bits, with scales of
/// the current tensors. Call it when the model has its device and dtype: `to(...)` to others takes
/// the conversion back. A weight that a `Linear` outside of the selection uses too stays as it is,
/// and so does one that tensor parallelism has cut, with a warning.
///
///     convert_model_to_fp8_ao(*net, Float8LinearConfig{.recipe = "rowwise"});
ACCELERATE_API void convert_model_to_fp8_ao(
    torch::nn::Module& model, const std::optional<Float8LinearConfig>& config = std::nullopt,
    const Fp8ModuleFilter& module_filter_func = {});

/// Takes the conversion back: layers multiply in their own dtype, or that of autocast.
ACCELERATE_API void to_high_precision(torch::nn::Module& model);

/// The dotted names of the converted layers below `model`.
[[nodiscard]] ACCELERATE_API std::vector<std::string> fp8_layers(const torch::nn::Module& model);
[[nodiscard]] ACCELERATE_API bool has_fp8_layers(const torch::nn::Module& model);
/// Whether there are layers with scales of the current tensors (AO), or with delayed scales (TE).
[[nodiscard]] ACCELERATE_API bool has_ao_layers(const torch::nn::Module& model);
[[nodiscard]] ACCELERATE_API bool has_transformer_engine_layers(const torch::nn::Module& model);

/// How many values each converted layer has clamped to the largest number of its format, since its
/// conversion. Only delayed scales clamp. On a GPU, without debug mode (ACCELERATE_DEBUG_MODE), it
/// is how many scales did not fit: of tensors, or of rows, with values that were clamped, infinite
/// or NaN. The call waits for the GPU; steps do not.
[[nodiscard]] ACCELERATE_API std::vector<std::pair<std::string, std::int64_t>> clamped_fp8_values(
    const torch::nn::Module& model);

}  // namespace accelerate
