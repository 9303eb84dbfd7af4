// accelerate/kwargs/deepspeed_plugin.h - DeepSpeed configurations, as files and as fields.
//
// Part of accelerate/kwargs.h.
//
//     DeepSpeedPlugin plugin = resolved(DeepSpeedPlugin{.hf_ds_config = "zero3.json"});
//     plugin.get_value("zero_optimization.stage");   // 3
//     plugin.set_mixed_precision("bf16");
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/value.h"

namespace accelerate {

/// A DeepSpeed configuration: a tree addressed by dotted keys.
class ACCELERATE_API HfDeepSpeedConfig {
 public:
  // Implicit, so that a file name or a tree can stand for it.
  // NOLINTBEGIN(google-explicit-constructor)
  /// The path of a JSON file, JSON text, or such text in URL-safe base64. Throws `ConfigError`
  /// that tells these three when it is none of them.
  HfDeepSpeedConfig(const std::string& path_or_text);
  HfDeepSpeedConfig(const char* path_or_text) : HfDeepSpeedConfig(std::string(path_or_text)) {}
  HfDeepSpeedConfig(const std::filesystem::path& path) : HfDeepSpeedConfig(path.string()) {}
  HfDeepSpeedConfig(Value::Dict config) : config_(std::move(config)) {}
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] const Value::Dict& config() const noexcept { return config_; }
  [[nodiscard]] Value::Dict& config() noexcept { return config_; }
  explicit operator Value() const { return config_; }

  /// The dictionary that holds the last part of `key` (null when a part before is missing), and
  /// that last part.
  [[nodiscard]] std::pair<Value::Dict*, std::string> find_config_node(std::string_view key);
  [[nodiscard]] std::pair<const Value::Dict*, std::string> find_config_node(
      std::string_view key) const;
  /// The value of a dotted key, or `fallback`.
  [[nodiscard]] Value get_value(std::string_view key, Value fallback = nullptr) const;
  /// Removes a part of the tree. Throws `ConfigError` when it must exist and does not.
  void del_config_sub_tree(std::string_view key, bool must_exist = false);
  /// Whether the key is set and true. Unset: false.
  [[nodiscard]] bool is_true(std::string_view key) const;
  /// Whether the key is set and false. Unset: false.
  [[nodiscard]] bool is_false(std::string_view key) const;

  [[nodiscard]] bool is_zero2() const;
  [[nodiscard]] bool is_zero3() const;
  /// Whether parameters or optimizer states lie on the CPU or on NVMe, in stage 2 or 3.
  [[nodiscard]] bool is_offload() const;

  bool operator==(const HfDeepSpeedConfig&) const = default;

 private:
  Value::Dict config_;
};

/// ZeRO in DeepSpeed's words. Variables begin with ACCELERATE_DEEPSPEED_ unless they are in full.
///
/// `resolved` reads or builds `hf_ds_config` and brings it and the fields into step: where a file
/// is given, what it says wins over the fields, and its "auto" entries take theirs.
struct ACCELERATE_API DeepSpeedPlugin {
  static constexpr std::string_view kOptionsName = "DeepSpeedPlugin";

  /// CONFIG_FILE, none.
  std::optional<HfDeepSpeedConfig> hf_ds_config = std::nullopt;
  /// ACCELERATE_GRADIENT_ACCUMULATION_STEPS, auto.
  std::optional<AutoOr<std::int64_t>> gradient_accumulation_steps = std::nullopt;
  /// ACCELERATE_GRADIENT_CLIPPING, auto.
  std::optional<AutoOr<double>> gradient_clipping = std::nullopt;
  /// ZERO_STAGE, 2. 0 to 3.
  std::optional<std::int64_t> zero_stage = std::nullopt;
  /// The batch size of the run is the smallest of its data loaders', else the largest.
  bool is_train_batch_min = true;
  /// OFFLOAD_OPTIMIZER_DEVICE, none. none, cpu or nvme.
  std::optional<std::string> offload_optimizer_device = std::nullopt;
  /// OFFLOAD_PARAM_DEVICE, none.
  std::optional<std::string> offload_param_device = std::nullopt;
  /// OFFLOAD_OPTIMIZER_NVME_PATH, none.
  std::optional<std::string> offload_optimizer_nvme_path = std::nullopt;
  /// OFFLOAD_PARAM_NVME_PATH, none.
  std::optional<std::string> offload_param_nvme_path = std::nullopt;
  /// ZERO3_INIT, whether the stage is 3. Build models without storage.
  std::optional<bool> zero3_init_flag = std::nullopt;
  /// ZERO3_SAVE_16BIT_MODEL, false.
  std::optional<bool> zero3_save_16bit_model = std::nullopt;
  /// MOE_LAYER_CLS_NAMES, unset. A comma list.
  std::optional<std::string> transformer_moe_cls_names = std::nullopt;
  /// Whether ACCELERATE_FP8_BACKEND is MSAMP.
  std::optional<bool> enable_msamp = std::nullopt;
  /// ACCELERATE_FP8_OPT_LEVEL, O1.
  std::optional<OptLevel> msamp_opt_level = std::nullopt;

  // The rest is for resolved plugins; without `hf_ds_config` each throws `StateError`.

  /// The tree that the run goes by.
  [[nodiscard]] const Value::Dict& deepspeed_config() const;
  [[nodiscard]] Value get_value(std::string_view key, Value fallback = nullptr) const;
  [[nodiscard]] bool is_auto(std::string_view key) const;
  /// Enables the section of the type (fp8 counts as bf16) and resolves its "auto". Throws
  /// `ConfigError` when the configuration enables the other type.
  void set_mixed_precision(std::string_view mixed_precision);
  /// Gives an "auto" entry its value from `values` (`ConfigError` when there is none); of another
  /// entry that differs, adds a line to `mismatches` unless that is null.
  void fill_match(std::string_view key, const Value::Dict& values,
                  std::vector<std::string>* mismatches = nullptr);
  /// `fill_match` for every entry. Throws one `ConfigError` with all mismatches, if they count.
  void deepspeed_config_process(const Value::Dict& values, bool must_match = true);

  bool operator==(const DeepSpeedPlugin&) const = default;
};

}  // namespace accelerate
