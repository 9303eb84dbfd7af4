// The recipes of 8-bit training.
#include "accelerate/kwargs/fp8_recipes.h"

#include <vector>

#include "accelerate/errors.h"
#include "core/fp8_choice.h"
#include "core/options.h"
#include "core/supported.h"
#include "core/text.h"

namespace accelerate {

using namespace detail;

namespace {

const std::string kFp8Prefix = "ACCELERATE_FP8_";

constexpr std::int64_t kAmaxHistoryLen = 1024;
constexpr auto kAmaxComputeAlgo = AmaxComputeAlgorithm::kMostRecent;

/// The fields that `TERecipeKwargs` and the deprecated struct share.
template <class T>
auto te_fields() {
  return std::tuple_cat(
      with_variables(kFp8Prefix, ACCELERATE_FIELDS(T, use_autocast_during_eval, margin, interval)),
      std::tuple{option("fp8_format", &T::fp8_format, kFp8Prefix + "FORMAT")},
      with_variables(kFp8Prefix, ACCELERATE_FIELDS(T, amax_history_len, amax_compute_algo)),
      ACCELERATE_FIELDS(T, override_linear_precision),
      with_variables(kFp8Prefix, ACCELERATE_FIELDS(T, use_mxfp8_block_scaling)));
}
template <class T>
T te_defaults() {
  return {.use_autocast_during_eval = false,
          .margin = 0,
          .interval = 1,
          .fp8_format = FP8Format::kHybrid,
          .amax_history_len = kAmaxHistoryLen,
          .amax_compute_algo = kAmaxComputeAlgo,
          .use_mxfp8_block_scaling = false};
}

template <class T>
void finish_te(T& options, const Environment& environment) {
  if (!options.override_linear_precision) {
    options.override_linear_precision = {environment.flag(kFp8Prefix + "OVERRIDE_FPROP"),
                                         environment.flag(kFp8Prefix + "OVERRIDE_DGRAD"),
                                         environment.flag(kFp8Prefix + "OVERRIDE_WGRAD")};
  }
  require_at_least(1, "interval", *options.interval);
  require_at_least(1, "amax_history_len", *options.amax_history_len);
  if (*options.use_mxfp8_block_scaling && (*options.amax_history_len != kAmaxHistoryLen ||
                                           *options.amax_compute_algo != kAmaxComputeAlgo)) {
    throw ConfigError(
        "use_mxfp8_block_scaling keeps no history of maxima: leave amax_history_len and "
        "amax_compute_algo unset.");
  }
}

}  // namespace

static ACCELERATE_VALUE_FIELDS(Float8LinearConfig, recipe, enable_fsdp_float8_all_gather,
                               pad_inner_dim, emulate, force_recompute_fp8_weight_in_bwd,
                               round_scales_to_power_of_2);

static ACCELERATE_VALUE_FIELDS(AORecipeKwargs, config, module_filter_func, pad_inner_dim,
                               enable_fsdp_float8_all_gather);
static void finish(AORecipeKwargs& options, const AORecipeKwargs&, const Environment& environment,
                   Warnings& warnings) {
  if (options.config) {
    require_one_of({"tensorwise", "rowwise", "rowwise_with_gw_hp"}, "config.recipe",
                   options.config->recipe);
    if (options.config->enable_fsdp_float8_all_gather && options.config->recipe != "tensorwise") {
      throw ConfigError(
          str("enable_fsdp_float8_all_gather only supports tensorwise scaling, but "
              "config.recipe is ",
              options.config->recipe, ". Set it to false."));
    }
    if (options.config->force_recompute_fp8_weight_in_bwd) {
      warnings.emplace_back(
          "force_recompute_fp8_weight_in_bwd is deprecated and has no effect: weights are always "
          "cast again in backward.");
    }
    const auto differ = [](std::optional<bool> given, bool used) { return given == !used; };
    if (differ(options.pad_inner_dim, options.config->pad_inner_dim) ||
        differ(options.enable_fsdp_float8_all_gather,
               options.config->enable_fsdp_float8_all_gather)) {
      warnings.emplace_back(
          "pad_inner_dim and enable_fsdp_float8_all_gather have no effect beside a config.");
    }
    return;
  }
  const auto fill = [&](std::optional<bool>& value, const char* name) {
    if (!value) value = environment.flag(kFp8Prefix + name, true);
  };
  fill(options.pad_inner_dim, "PAD_INNER_DIM");
  fill(options.enable_fsdp_float8_all_gather, "ENABLE_FSDP_FLOAT8_ALL_GATHER");
  options.config =
      Float8LinearConfig{.enable_fsdp_float8_all_gather = *options.enable_fsdp_float8_all_gather,
                         .pad_inner_dim = *options.pad_inner_dim};
}

static auto value_fields(std::type_identity<TERecipeKwargs>) { return te_fields<TERecipeKwargs>(); }
static TERecipeKwargs option_defaults(std::type_identity<TERecipeKwargs>) {
  return te_defaults<TERecipeKwargs>();
}
static void finish(TERecipeKwargs& options, const TERecipeKwargs&, const Environment& environment,
                   Warnings&) {
  finish_te(options, environment);
}

static auto value_fields(std::type_identity<MSAMPRecipeKwargs>) {
  return with_variables(kFp8Prefix, ACCELERATE_FIELDS(MSAMPRecipeKwargs, opt_level));
}
static MSAMPRecipeKwargs option_defaults(std::type_identity<MSAMPRecipeKwargs>) {
  return {.opt_level = OptLevel::kO2};
}

static auto value_fields(std::type_identity<FP8RecipeKwargs>) {
  using T = FP8RecipeKwargs;
  return std::tuple_cat(with_variables(kFp8Prefix, ACCELERATE_FIELDS(T, opt_level)), te_fields<T>(),
                        with_variables(kFp8Prefix, ACCELERATE_FIELDS(T, backend)));
}
static FP8RecipeKwargs option_defaults(std::type_identity<FP8RecipeKwargs>) {
  auto defaults = te_defaults<FP8RecipeKwargs>();
  defaults.opt_level = OptLevel::kO2;
  defaults.backend = FP8BackendType::kTe;
  return defaults;
}
static void finish(FP8RecipeKwargs& options, const FP8RecipeKwargs&, const Environment& environment,
                   Warnings& warnings) {
  warnings.emplace_back(
      "FP8RecipeKwargs is deprecated. Use TERecipeKwargs or MSAMPRecipeKwargs instead.");
  if (*options.backend != FP8BackendType::kTe && *options.backend != FP8BackendType::kMsamp) {
    throw ConfigError(str("The backend of FP8RecipeKwargs is '", *options.backend,
                          "'. Choose one of: MSAMP, TE."));
  }
  if (*options.backend == FP8BackendType::kTe) finish_te(options, environment);
}

ACCELERATE_OPTIONS(AORecipeKwargs);
ACCELERATE_OPTIONS(TERecipeKwargs);
ACCELERATE_OPTIONS(MSAMPRecipeKwargs);
ACCELERATE_OPTIONS(FP8RecipeKwargs);

std::variant<TERecipeKwargs, MSAMPRecipeKwargs> recipe_of(const FP8RecipeKwargs& kwargs,
                                                          const Environment& environment) {
  if (*resolved(kwargs, environment).backend == FP8BackendType::kMsamp) {
    return MSAMPRecipeKwargs{.opt_level = kwargs.opt_level};
  }
  // As given, not as resolved: the recipe then knows which of its fields were asked for.
  return TERecipeKwargs{.use_autocast_during_eval = kwargs.use_autocast_during_eval,
                        .margin = kwargs.margin,
                        .interval = kwargs.interval,
                        .fp8_format = kwargs.fp8_format,
                        .amax_history_len = kwargs.amax_history_len,
                        .amax_compute_algo = kwargs.amax_compute_algo,
                        .override_linear_precision = kwargs.override_linear_precision,
                        .use_mxfp8_block_scaling = kwargs.use_mxfp8_block_scaling};
}

namespace detail::inline core {
namespace {

TERecipeKwargs delayed_recipe(const TERecipeKwargs& given, const Environment& environment) {
  auto recipe = resolved(given, environment);
  // Parity: Python drops a value that equals its default, and Transformer Engine's own is max.
  if (!given.amax_compute_algo && !environment.get(kFp8Prefix + "AMAX_COMPUTE_ALGO")) {
    recipe.amax_compute_algo = AmaxComputeAlgorithm::kMax;
  }
  if (*recipe.fp8_format == FP8Format::kE5m2) {
    throw ConfigError(
        "fp8_format is E5M2, but no kernel multiplies two operands of that format. Use HYBRID, "
        "which has it for gradients, or E4M3.");
  }
  if (*recipe.use_mxfp8_block_scaling) {
    throw UnsupportedError(
        "MXFP8 block scaling is not available: it takes kernels of Blackwell GPUs, which this "
        "version does not have. Leave use_mxfp8_block_scaling unset.");
  }
  return recipe;
}

}  // namespace

std::optional<Fp8Recipe> choose_fp8_recipe(std::span<const KwargsHandler> handlers, bool fp8,
                                           const Environment& environment) {
  std::vector<Fp8Recipe> found;
  for (const auto& handler : handlers) {
    if (const auto* ao = std::get_if<AORecipeKwargs>(&handler)) {
      found.emplace_back(resolved(*ao, environment));
    } else if (const auto* te = std::get_if<TERecipeKwargs>(&handler)) {
      found.emplace_back(delayed_recipe(*te, environment));
    } else if (const auto* both = std::get_if<FP8RecipeKwargs>(&handler)) {
      found.emplace_back(
          delayed_recipe(std::get<TERecipeKwargs>(recipe_of(*both, environment)), environment));
    }
  }
  if (found.size() > 1) {
    throw ConfigError(str("kwargs_handlers has ", found.size(), " recipes for fp8. Give one."));
  }
  if (!found.empty()) return found.front();
  if (!fp8) return std::nullopt;
  const auto text = environment.get(kFp8Prefix + "BACKEND");
  const auto backend = text ? from_string<FP8BackendType>(*text) : FP8BackendType::kNo;
  require_supported(backend);
  if (backend == FP8BackendType::kTe) return delayed_recipe({}, environment);
  return resolved(AORecipeKwargs{}, environment);
}

FP8BackendType backend_of(const std::optional<Fp8Recipe>& recipe) {
  if (!recipe) return FP8BackendType::kNo;
  return std::holds_alternative<AORecipeKwargs>(*recipe) ? FP8BackendType::kAo
                                                         : FP8BackendType::kTe;
}

}  // namespace detail::inline core

}  // namespace accelerate
