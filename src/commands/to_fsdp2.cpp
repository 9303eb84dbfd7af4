#include "commands/to_fsdp2.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::string_view kReshard = "fsdp_reshard_after_forward";
constexpr std::string_view kStrategy = "fsdp_sharding_strategy";
constexpr std::string_view kVersion = "fsdp_version";

struct DroppedKey {
  std::string_view name;
  std::string_view why;
};
constexpr std::array<DroppedKey, 4> kDropped{{
    {"fsdp_backward_prefetch", "has been removed"},
    {"fsdp_sync_module_states", "has been removed"},
    {"fsdp_use_orig_params", "has been removed"},
    {"fsdp_forward_prefetch", "is not yet implemented"},
}};

// Whether a strategy of version 1 frees parameters after the forward pass. Other values stay.
Value reshards(const Value& strategy) {
  if (strategy == "FULL_SHARD" || strategy == "HYBRID_SHARD") return true;
  const bool keeps =
      strategy == "SHARD_GRAD_OP" || strategy == "HYBRID_SHARD_ZERO2" || strategy == "NO_SHARD";
  return keeps ? Value(false) : strategy;
}

}  // namespace

Fsdp2Conversion convert_to_fsdp2(Value::Dict config) {
  Fsdp2Conversion result;
  const Value* found = config.get("fsdp_config");
  if (found == nullptr || !found->is_dict() || found->as_dict().empty()) {
    result.notices.emplace_back("No FSDP config found in the config file, skipping conversion...");
    result.config = std::move(config);
    return result;
  }
  const Value::Dict old = found->as_dict();
  if (old.get(std::string(kVersion), 1) == 2) {
    result.notices.emplace_back(
        "Config already specifies FSDP2, skipping conversion... If the config doesn't use new "
        "argument names, change `fsdp_version` to `1` and rerun the command.");
    result.config = std::move(config);
    return result;
  }
  if (old.contains(std::string(kStrategy)) && old.contains(std::string(kReshard))) {
    result.notices.push_back(str("The file has both ", kStrategy, " and ", kReshard,
                                 "; the later one of them is taken."));
  }
  Value::Dict converted;
  for (const auto& [key, value] : old) {
    const auto name = key.to_string();
    // Parity: Python 1.13 keeps these keys without a word, against its own table.
    const auto* const dropped = std::ranges::find(kDropped, name, &DroppedKey::name);
    if (dropped != kDropped.end()) {
      result.notices.push_back(
          str("Argument ", name, " ", dropped->why, " in FSDP2, skipping this key..."));
    } else if (name == kStrategy || name == kReshard) {
      converted.set(std::string(kReshard), reshards(value));
    } else {
      converted.set(key, value);
    }
  }
  converted.set(std::string(kVersion), 2);
  config.set("fsdp_config", std::move(converted));
  result.config = std::move(config);
  return result;
}

}  // namespace accelerate::detail::commands
