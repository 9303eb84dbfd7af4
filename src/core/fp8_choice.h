// src/core/fp8_choice.h - which recipe a run in 8 bits follows.
#pragma once

#include <optional>
#include <span>
#include <variant>

#include "accelerate/enums.h"
#include "accelerate/environment.h"
#include "accelerate/kwargs.h"

namespace accelerate::detail::inline core {

/// Resolved: scales of the current tensors, or delayed ones.
using Fp8Recipe = std::variant<AORecipeKwargs, TERecipeKwargs>;

/// The recipe among `handlers`, which `require_supported` has let pass; with `fp8`, which is
/// mixed_precision, else that of ACCELERATE_FP8_BACKEND, else AO. Throws `ConfigError` for two
/// recipes and for formats that no product takes, `UnsupportedError` for MSAMP and for block
/// scaling.
[[nodiscard]] std::optional<Fp8Recipe> choose_fp8_recipe(std::span<const KwargsHandler> handlers,
                                                         bool fp8, const Environment& environment);
[[nodiscard]] FP8BackendType backend_of(const std::optional<Fp8Recipe>& recipe);

}  // namespace accelerate::detail::inline core
