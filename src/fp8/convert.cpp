// Which layers of a model multiply in 8 bits.
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <functional>
#include <unordered_set>

#include "accelerate/environment.h"
#include "accelerate/fp8.h"
#include "accelerate/state.h"
#include "core/log.h"
#include "core/text.h"
#include "fp8/converted.h"
#include "fp8/linear_rule.h"
#include "modeling/stand_in.h"

namespace accelerate {
namespace detail::fp8 {
namespace {

using torch::nn::LinearImpl;
using torch::nn::Module;

constexpr std::int64_t kMultiple = 16;

/// The model of the conversion that this thread is in.
thread_local const Module* converted_model = nullptr;

class ConversionScope {
 public:
  explicit ConversionScope(const Module& model) : before_(std::exchange(converted_model, &model)) {}
  ~ConversionScope() { converted_model = before_; }
  ConversionScope(const ConversionScope&) = delete;
  ConversionScope& operator=(const ConversionScope&) = delete;

 private:
  const Module* before_;
};

std::shared_ptr<LinearRule> rule_of(const Module& module) {
  const auto& weight = dynamic_cast<const LinearImpl&>(module).weight;
  return std::dynamic_pointer_cast<LinearRule>(lazy::find_rule(weight));
}

/// In the order of `named_modules`, each once.
std::vector<LinearLayer> linear_layers(const Module& model) {
  std::vector<LinearLayer> layers;
  std::unordered_set<const Module*> seen;
  for (const auto& entry : model.named_modules("", /*include_self=*/false)) {
    if (!seen.insert(entry.value().get()).second) continue;
    if (dynamic_cast<const LinearImpl*>(entry.value().get()) == nullptr) continue;
    layers.push_back({entry.key(), entry.value(), rule_of(*entry.value())});
  }
  return layers;
}

bool has_even_features(const Module& module) {
  const auto& weight = dynamic_cast<const LinearImpl&>(module).weight;
  return weight.size(0) % kMultiple == 0 && weight.size(1) % kMultiple == 0;
}

LinearSettings settings_for(const std::string& name) {
  return {.name = name,
          .emulate = Environment::process().flag("ACCELERATE_FP8_EMULATE"),
          .debug = PartialState::initialized() && PartialState().debug()};
}

/// Layers of `load_and_quantize_model`, whose weights have no bytes to cast.
bool is_quantized(const LinearLayer& layer) {
  const auto& weight = dynamic_cast<const LinearImpl&>(*layer.module).weight;
  if (modeling::find_stand_in(weight) == nullptr) return false;
  info(str("fp8: '", layer.name, "' stays as it is, since its weight is quantized."));
  return true;
}

/// Whether tensor parallelism computes the products of a layer, whose weight has its rule.
bool has_other_rule(const LinearLayer& layer) {
  const auto& weight = dynamic_cast<const LinearImpl&>(*layer.module).weight;
  return rule_of(*layer.module) == nullptr && lazy::find_rule(weight) != nullptr;
}

void say_what_has_other_rules(const std::vector<std::string>& names) {
  if (names.empty()) return;
  warn(str("fp8: ", names.size(),
           " linear layers stay in high precision, since their products are "
           "computed by tensor parallelism: ",
           join(names), "."));
}

/// The layers that `selects` and that are not converted yet.
std::vector<LinearLayer> selected_layers(const Module& model,
                                         const std::function<bool(const LinearLayer&)>& selects) {
  auto layers = linear_layers(model);
  std::unordered_set<const at::TensorImpl*> others;
  const auto weight_of = [](const LinearLayer& layer) {
    return dynamic_cast<const LinearImpl&>(*layer.module).weight.unsafeGetTensorImpl();
  };
  std::vector<std::string> ruled;
  std::erase_if(layers, [&](const LinearLayer& layer) {
    bool stays = is_quantized(layer) || !selects(layer);
    if (!stays && has_other_rule(layer)) {
      ruled.push_back(layer.name);
      stays = true;
    }
    if (stays) others.insert(weight_of(layer));
    return stays;
  });
  say_what_has_other_rules(ruled);
  std::erase_if(layers, [&](const LinearLayer& layer) {
    if (!others.contains(weight_of(layer))) return layer.rule != nullptr;
    info(str("fp8: '", layer.name,
             "' stays in high precision, since a layer that does shares its weight."));
    return true;
  });
  return layers;
}

void give(const LinearLayer& layer, LinearSettings settings) {
  const auto& weight = dynamic_cast<const LinearImpl&>(*layer.module).weight;
  lazy::set_rule(weight, std::make_shared<LinearRule>(std::move(settings)));
}

void say_what_is_converted(std::size_t layers) {
  if (layers > 0) return info(str("fp8: ", layers, " linear layers multiply in 8 bits."));
  warn(
      "fp8: no layer of the model is converted. Layers are Linear modules whose feature counts are "
      "multiples of 16; recipes of AO leave the first and the last one of the model out. All is "
      "computed in bfloat16.");
}

template <class Recipe>
bool has_layers(const Module& model) {
  return std::ranges::any_of(converted_layers(model), [](const LinearLayer& layer) {
    return std::holds_alternative<Recipe>(layer.rule->settings().recipe);
  });
}

}  // namespace

std::vector<LinearLayer> converted_layers(const Module& model) {
  auto layers = linear_layers(model);
  std::erase_if(layers, [](const LinearLayer& layer) { return layer.rule == nullptr; });
  return layers;
}

void restore(const std::vector<LinearLayer>& layers) {
  std::vector<std::string> ruled;
  for (const auto& layer : layers) {
    if (has_other_rule(layer)) {
      ruled.push_back(layer.name);
    } else if (rule_of(*layer.module) != layer.rule) {
      lazy::set_rule(dynamic_cast<const LinearImpl&>(*layer.module).weight, layer.rule);
    }
  }
  say_what_has_other_rules(ruled);
}

void convert_with_current_scales(Module& model, const AORecipeKwargs& kwargs) {
  const ConversionScope scope(model);
  const Fp8ModuleFilter filter = kwargs.module_filter_func
                                     ? kwargs.module_filter_func
                                     : Fp8ModuleFilter(&filter_first_and_last_linear_layers);
  const auto layers = selected_layers(
      model, [&](const LinearLayer& layer) { return filter(*layer.module, layer.name); });
  for (const auto& layer : layers) {
    auto settings = settings_for(layer.name);
    settings.emulate = settings.emulate || kwargs.config->emulate;
    settings.recipe = *kwargs.config;
    give(layer, std::move(settings));
  }
  say_what_is_converted(converted_layers(model).size());
}

std::shared_ptr<DelayedScaling> convert_with_delayed_scales(Module& model,
                                                            const TERecipeKwargs& kwargs) {
  const auto layers = selected_layers(
      model, [](const LinearLayer& layer) { return has_even_features(*layer.module); });
  say_what_is_converted(layers.size());
  if (layers.empty()) return nullptr;
  auto scaling = std::make_shared<DelayedScaling>(kwargs);
  for (const auto& layer : layers) {
    auto settings = settings_for(layer.name);
    settings.recipe = DelayedLayer{scaling, scaling->add_layer(layer.name)};
    give(layer, std::move(settings));
  }
  const auto& first = dynamic_cast<const LinearImpl&>(*layers.front().module);
  scaling->allocate(first.weight.device());
  return scaling;
}

}  // namespace detail::fp8

using namespace detail::fp8;
using torch::nn::LinearImpl;
using torch::nn::Module;

std::pair<std::optional<std::string>, std::optional<std::string>> find_first_last_linear_layers(
    const Module& model) {
  if (dynamic_cast<const LinearImpl*>(&model) != nullptr) return {"", ""};
  const auto layers = linear_layers(model);
  if (layers.empty()) return {};
  return {layers.front().name, layers.back().name};
}

bool filter_linear_layers(const Module& module, const std::string& fqn,
                          const std::vector<std::string>& layers_to_filter) {
  if (dynamic_cast<const LinearImpl*>(&module) != nullptr && !has_even_features(module)) {
    return false;
  }
  return std::ranges::find(layers_to_filter, fqn) == layers_to_filter.end();
}

bool filter_first_and_last_linear_layers(const Module& module, const std::string& fqn) {
  const auto [first, last] =
      find_first_last_linear_layers(converted_model != nullptr ? *converted_model : module);
  std::vector<std::string> filtered;
  if (first) filtered = {*first, *last};
  return filter_linear_layers(module, fqn, filtered);
}

void convert_model_to_fp8_ao(Module& model, const std::optional<Float8LinearConfig>& config,
                             const Fp8ModuleFilter& module_filter_func) {
  convert_with_current_scales(
      model, resolved(AORecipeKwargs{.config = config.value_or(Float8LinearConfig{}),
                                     .module_filter_func = module_filter_func}));
}

void to_high_precision(Module& model) {
  for (const auto& layer : converted_layers(model)) {
    detail::lazy::set_rule(dynamic_cast<const LinearImpl&>(*layer.module).weight, nullptr);
  }
}

std::vector<std::string> fp8_layers(const Module& model) {
  std::vector<std::string> names;
  for (const auto& layer : converted_layers(model)) names.push_back(layer.name);
  return names;
}

bool has_fp8_layers(const Module& model) { return !converted_layers(model).empty(); }
bool has_ao_layers(const Module& model) { return has_layers<Float8LinearConfig>(model); }
bool has_transformer_engine_layers(const Module& model) { return has_layers<DelayedLayer>(model); }

std::vector<std::pair<std::string, std::int64_t>> clamped_fp8_values(const Module& model) {
  std::vector<std::pair<std::string, std::int64_t>> counts;
  for (const auto& layer : converted_layers(model)) {
    counts.emplace_back(layer.name, layer.rule->clamped());
  }
  return counts;
}

}  // namespace accelerate
