// accelerate/kwargs/fp8_recipes.h - how layers compute in 8 bits.
//
// Part of accelerate/kwargs.h. Variables begin with ACCELERATE_FP8_; accelerate/kwargs/options.h
// says how fields that are left out get their values.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs/options.h"

// Templates of the library take these structs: with GCC that needs visible arguments.
#pragma GCC visibility push(default)

namespace accelerate {

/// The configuration of one 8-bit linear layer, after torchao's class of this name.
struct Float8LinearConfig {
  /// tensorwise, rowwise or rowwise_with_gw_hp.
  std::string recipe = "tensorwise";
  bool enable_fsdp_float8_all_gather = false;
  /// Pad inner dimensions to multiples of 16, which the kernels demand.
  bool pad_inner_dim = false;
  /// Compute the same numbers without 8-bit hardware.
  bool emulate = false;
  bool force_recompute_fp8_weight_in_bwd = false;
  bool round_scales_to_power_of_2 = false;

  bool operator==(const Float8LinearConfig&) const = default;
};

/// 8-bit training with scales computed from the current tensor.
struct AORecipeKwargs {
  static constexpr std::string_view kOptionsName = "AORecipeKwargs";

  /// Unset: made of the last two fields.
  std::optional<Float8LinearConfig> config = std::nullopt;
  /// Whether to convert a module, given its name. Unset: linears with both feature counts divisible
  /// by 16, except the first and the last of the model.
  Callback<bool(const torch::nn::Module&, const std::string&)> module_filter_func = {};
  /// PAD_INNER_DIM, true. Read only without `config`, as the next.
  std::optional<bool> pad_inner_dim = std::nullopt;
  /// ENABLE_FSDP_FLOAT8_ALL_GATHER, true.
  std::optional<bool> enable_fsdp_float8_all_gather = std::nullopt;

  bool operator==(const AORecipeKwargs&) const = default;
};

/// 8-bit training with scales from a history of maxima.
struct TERecipeKwargs {
  static constexpr std::string_view kOptionsName = "TERecipeKwargs";

  /// USE_AUTOCAST_DURING_EVAL, false.
  std::optional<bool> use_autocast_during_eval = std::nullopt;
  /// MARGIN, 0: scales leave this many binary digits of room.
  std::optional<std::int64_t> margin = std::nullopt;
  /// INTERVAL, 1: steps between two computations of the scales.
  std::optional<std::int64_t> interval = std::nullopt;
  /// FORMAT, HYBRID.
  std::optional<FP8Format> fp8_format = std::nullopt;
  /// AMAX_HISTORY_LEN, 1024.
  std::optional<std::int64_t> amax_history_len = std::nullopt;
  /// AMAX_COMPUTE_ALGO, most_recent.
  std::optional<AmaxComputeAlgorithm> amax_compute_algo = std::nullopt;
  /// OVERRIDE_FPROP, OVERRIDE_DGRAD and OVERRIDE_WGRAD, false: these products in high precision.
  std::optional<std::array<bool, 3>> override_linear_precision = std::nullopt;
  /// USE_MXFP8_BLOCK_SCALING, false. Excludes other values of the amax fields than the defaults.
  std::optional<bool> use_mxfp8_block_scaling = std::nullopt;

  bool operator==(const TERecipeKwargs&) const = default;
};

/// 8-bit training with MS-AMP.
struct MSAMPRecipeKwargs {
  static constexpr std::string_view kOptionsName = "MSAMPRecipeKwargs";

  /// OPT_LEVEL, O2.
  std::optional<OptLevel> opt_level = std::nullopt;

  bool operator==(const MSAMPRecipeKwargs&) const = default;
};

/// Deprecated: use `TERecipeKwargs` or `MSAMPRecipeKwargs`. Only the fields of the backend count.
struct FP8RecipeKwargs {
  static constexpr std::string_view kOptionsName = "FP8RecipeKwargs";

  std::optional<OptLevel> opt_level = std::nullopt;
  std::optional<bool> use_autocast_during_eval = std::nullopt;
  std::optional<std::int64_t> margin = std::nullopt;
  std::optional<std::int64_t> interval = std::nullopt;
  std::optional<FP8Format> fp8_format = std::nullopt;
  std::optional<std::int64_t> amax_history_len = std::nullopt;
  std::optional<AmaxComputeAlgorithm> amax_compute_algo = std::nullopt;
  std::optional<std::array<bool, 3>> override_linear_precision = std::nullopt;
  std::optional<bool> use_mxfp8_block_scaling = std::nullopt;
  /// BACKEND, TE. TE or MSAMP.
  std::optional<FP8BackendType> backend = std::nullopt;

  bool operator==(const FP8RecipeKwargs&) const = default;
};

/// The recipe that the deprecated struct stands for.
[[nodiscard]] ACCELERATE_API std::variant<TERecipeKwargs, MSAMPRecipeKwargs> recipe_of(
    const FP8RecipeKwargs& kwargs, const Environment& environment = Environment::process());

}  // namespace accelerate

#pragma GCC visibility pop
