#include "optim/optimizer_options.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "accelerate/optim.h"
#include "accelerate/value/from_value.h"
#include "core/text.h"
#include "optim/torch_optimizers.h"

namespace accelerate::detail::optim {
namespace {

using torch::optim::OptimizerOptions;

/// The keys of a state dict, in Python's order; empty if Python has no such optimizer.
std::vector<std::string> state_dict_keys(const OptimizerOptions& options) {
  std::string_view keys;
  const auto look = [&]<class... Own>(std::type_identity<Own>...) {
    (void)((dynamic_cast<const GroupOptions<Own>*>(&options) != nullptr &&
            (keys = kTraits<Own>.state_dict_keys, true)) ||
           ...);
  };
  using std::type_identity;
  look(type_identity<AdamWOptions>(), type_identity<AdamOptions>(), type_identity<SGDOptions>(),
       type_identity<AdagradOptions>(), type_identity<RMSpropOptions>(),
       type_identity<NAdamOptions>(), type_identity<RAdamOptions>(), type_identity<AdamaxOptions>(),
       type_identity<AdafactorOptions>());
  with_torch_options(options, [&]<class Adapter>(const auto& /*known*/, Adapter) {
    keys = kTraits<typename Adapter::OwnOptions>.state_dict_keys;
  });
  return keys.empty() ? std::vector<std::string>() : split(keys, ' ');
}

/// The value that Python's state dict has for an option that does not exist here.
Value constant_of(const OptimizerOptions& options, std::string_view key) {
  if (key == "foreach" || key == "fused") return nullptr;
  if (key != "decoupled_weight_decay") return false;  // maximize, capturable, differentiable
  return dynamic_cast<const GroupOptions<AdamWOptions>*>(&options) != nullptr ||
         dynamic_cast<const torch::optim::AdamWOptions*>(&options) != nullptr;
}

}  // namespace

Value::Dict options_by_name(const OptimizerOptions& options) {
  if (const auto* own = dynamic_cast<const ParamGroupOptions*>(&options)) return own->to_dict();
  Value::Dict result;
  with_torch_options(options, [&](const auto& known, auto adapter) {
    adapter.for_each_option(known, [&](std::string_view name, const auto& option) {
      result.set(name, to_value(option));
    });
  });
  return result;
}

void update_options(OptimizerOptions& options, const Value::Dict& values) {
  if (auto* own = dynamic_cast<ParamGroupOptions*>(&options)) return own->update(values);
  with_torch_options(options, [&](auto& known, auto adapter) {
    auto changed = known;
    adapter.for_each_option(changed, [&]<class Option>(std::string_view name, Option& option) {
      if (const auto* value = values.get(name)) option = from_value<Option>(*value);
    });
    known = changed;
  });
}

Value::Dict python_options(const OptimizerOptions& options) {
  auto own = options_by_name(options);
  const auto keys = state_dict_keys(options);
  if (keys.empty()) return own;
  Value::Dict result;
  for (const auto& key : keys) {
    const auto* const value = own.get(key);
    result.set(key, value != nullptr ? *value : constant_of(options, key));
  }
  return result;
}

bool is_python_constant(const OptimizerOptions& options, std::string_view key, const Value& value) {
  const auto keys = state_dict_keys(options);
  return std::ranges::find(keys, key) != keys.end() && value == constant_of(options, key);
}

MomentumKind momentum_kind(const OptimizerOptions& options) {
  const auto names = options_by_name(options);
  if (names.contains("betas")) return MomentumKind::kBeta1;
  return names.contains("momentum") ? MomentumKind::kMomentum : MomentumKind::kNone;
}

void set_momentum(OptimizerOptions& options, double momentum) {
  if (auto* own = dynamic_cast<ParamGroupOptions*>(&options)) return own->set_momentum(momentum);
  with_torch_options(options, [&](auto& known, auto /*adapter*/) {
    if constexpr (requires { known.betas(); }) {
      std::get<0>(known.betas()) = momentum;
    } else if constexpr (requires { known.momentum(); }) {
      known.momentum(momentum);
    }
  });
}

}  // namespace accelerate::detail::optim
