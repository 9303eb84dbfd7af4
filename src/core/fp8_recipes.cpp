// The recipes of 8-bit training.
#include "accelerate/fp8_recipes.h"

#include "core/record.h"

namespace accelerate {
namespace detail {
namespace {

const std::string kFp8Prefix = "ACCELERATE_FP8_";

constexpr std::int64_t kAmaxHistoryLen = 1024;
constexpr auto kAmaxComputeAlgo = AmaxComputeAlgorithm::kMostRecent;

/// The fields that `TERecipeKwargs` and the deprecated record share.
template <class T>
auto te_fields() {
  return std::tuple{field("use_autocast_during_eval", &T::use_autocast_during_eval,
                          kFp8Prefix + "USE_AUTOCAST_DURING_EVAL", false),
                    field("margin", &T::margin, kFp8Prefix + "MARGIN", 0),
                    field("interval", &T::interval, kFp8Prefix + "INTERVAL", 1),
                    field("fp8_format", &T::fp8_format, kFp8Prefix + "FORMAT", FP8Format::kHybrid),
                    field("amax_history_len", &T::amax_history_len, kFp8Prefix + "AMAX_HISTORY_LEN",
                          kAmaxHistoryLen),
                    field("amax_compute_algo", &T::amax_compute_algo,
                          kFp8Prefix + "AMAX_COMPUTE_ALGO", kAmaxComputeAlgo),
                    field("override_linear_precision", &T::override_linear_precision),
                    field("use_mxfp8_block_scaling", &T::use_mxfp8_block_scaling,
                          kFp8Prefix + "USE_MXFP8_BLOCK_SCALING", false)};
}

template <class T>
void finish_te(T& record, const Environment& environment) {
  if (!record.override_linear_precision) {
    record.override_linear_precision = {environment.flag(kFp8Prefix + "OVERRIDE_FPROP"),
                                        environment.flag(kFp8Prefix + "OVERRIDE_DGRAD"),
                                        environment.flag(kFp8Prefix + "OVERRIDE_WGRAD")};
  }
  require_at_least(1, "interval", *record.interval);
  require_at_least(1, "amax_history_len", *record.amax_history_len);
  if (*record.use_mxfp8_block_scaling && (*record.amax_history_len != kAmaxHistoryLen ||
                                          *record.amax_compute_algo != kAmaxComputeAlgo)) {
    throw ConfigError(
        "use_mxfp8_block_scaling keeps no history of maxima: leave amax_history_len and "
        "amax_compute_algo unset.");
  }
}

}  // namespace

template <>
struct RecordTraits<Float8LinearConfig> {
  using T = Float8LinearConfig;
  static auto fields() {
    return std::tuple{
        field("recipe", &T::recipe),
        field("enable_fsdp_float8_all_gather", &T::enable_fsdp_float8_all_gather),
        field("pad_inner_dim", &T::pad_inner_dim),
        field("emulate", &T::emulate),
        field("force_recompute_fp8_weight_in_bwd", &T::force_recompute_fp8_weight_in_bwd),
        field("round_scales_to_power_of_2", &T::round_scales_to_power_of_2)};
  }
};

template <>
struct RecordTraits<AORecipeKwargs> {
  using T = AORecipeKwargs;
  static auto fields() {
    return std::tuple{field("config", &T::config),
                      field("module_filter_func", &T::module_filter_func),
                      field("pad_inner_dim", &T::pad_inner_dim),
                      field("enable_fsdp_float8_all_gather", &T::enable_fsdp_float8_all_gather)};
  }
  static void finish(T& record, const T&, const Environment& environment, Warnings& warnings) {
    if (record.config) {
      require_one_of({"tensorwise", "rowwise", "rowwise_with_gw_hp"}, "config.recipe",
                     record.config->recipe);
      if (record.pad_inner_dim.value_or(record.config->pad_inner_dim) !=
              record.config->pad_inner_dim ||
          record.enable_fsdp_float8_all_gather.value_or(
              record.config->enable_fsdp_float8_all_gather) !=
              record.config->enable_fsdp_float8_all_gather) {
        warnings.emplace_back(
            "pad_inner_dim and enable_fsdp_float8_all_gather have no effect beside a config.");
      }
      return;
    }
    const auto fill = [&](std::optional<bool>& value, const char* name) {
      if (!value) value = environment.flag(kFp8Prefix + name, true);
    };
    fill(record.pad_inner_dim, "PAD_INNER_DIM");
    fill(record.enable_fsdp_float8_all_gather, "ENABLE_FSDP_FLOAT8_ALL_GATHER");
    record.config =
        Float8LinearConfig{.enable_fsdp_float8_all_gather = *record.enable_fsdp_float8_all_gather,
                           .pad_inner_dim = *record.pad_inner_dim};
  }
};

template <>
struct RecordTraits<TERecipeKwargs> {
  static auto fields() { return te_fields<TERecipeKwargs>(); }
  static void finish(TERecipeKwargs& record, const TERecipeKwargs&, const Environment& environment,
                     Warnings&) {
    finish_te(record, environment);
  }
};

template <>
struct RecordTraits<MSAMPRecipeKwargs> {
  static auto fields() {
    return std::tuple{
        field("opt_level", &MSAMPRecipeKwargs::opt_level, kFp8Prefix + "OPT_LEVEL", OptLevel::kO2)};
  }
};

template <>
struct RecordTraits<FP8RecipeKwargs> {
  using T = FP8RecipeKwargs;
  static auto fields() {
    return std::tuple_cat(
        std::tuple{field("opt_level", &T::opt_level, kFp8Prefix + "OPT_LEVEL", OptLevel::kO2)},
        te_fields<T>(),
        std::tuple{field("backend", &T::backend, kFp8Prefix + "BACKEND", FP8BackendType::kTe)});
  }
  static void finish(T& record, const T&, const Environment& environment, Warnings& warnings) {
    warnings.emplace_back(
        "FP8RecipeKwargs is deprecated. Use TERecipeKwargs or MSAMPRecipeKwargs instead.");
    if (*record.backend != FP8BackendType::kTe && *record.backend != FP8BackendType::kMsamp) {
      throw ConfigError(str("The backend of FP8RecipeKwargs is '", *record.backend,
                            "'. Choose one of: MSAMP, TE."));
    }
    if (*record.backend == FP8BackendType::kTe) finish_te(record, environment);
  }
};

}  // namespace detail

ACCELERATE_RECORD(AORecipeKwargs);
ACCELERATE_RECORD(TERecipeKwargs);
ACCELERATE_RECORD(MSAMPRecipeKwargs);
ACCELERATE_RECORD(FP8RecipeKwargs);

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

}  // namespace accelerate
